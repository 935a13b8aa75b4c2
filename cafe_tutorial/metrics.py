"""The only place where a leak meets the truth: PSNR, SSIM, label accuracy and the score of an attack."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

PSNR_CAP = 150.0  # dB; an exact image would be infinite
CERTIFIED_PSNR, CERTIFIED_ERROR = 60.0, 1e-4  # what a certificate promises of a slice, and of a table's record
CERTIFIED_FIRST = 1e6  # more than any other slice, certified ones decide which row a leak's row is


def psnr(recovered: Tensor, true: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB of each image, peak 1, the recovered images clipped to [0, 1].

    recovered, true : (N, C, H, W). Returns (N,), float64, capped at 150 dB.
    """
    if recovered.shape != true.shape:
        raise ValueError(f"recovered has shape {tuple(recovered.shape)}, true {tuple(true.shape)}; they must agree")
    error = (recovered.clamp(0, 1).double() - true.double()).square().flatten(1).mean(1)
    return (-10 * error.log10()).clamp(max=PSNR_CAP)


def ssim(recovered: Tensor, true: Tensor) -> Tensor:
    """Structural similarity of each image (scikit-image, 7x7 window, range 1); NaN where an image is smaller."""
    from skimage.metrics import structural_similarity

    if recovered.shape != true.shape:
        raise ValueError(f"recovered has shape {tuple(recovered.shape)}, true {tuple(true.shape)}; they must agree")
    if min(true.shape[2:]) < 7:
        return torch.full((len(true),), math.nan, dtype=torch.float64)
    pairs = zip(recovered.clamp(0, 1).double().cpu().numpy(), true.double().cpu().numpy())
    return torch.from_numpy(np.array([structural_similarity(t, r, channel_axis=0, data_range=1.0) for r, t in pairs]))


@dataclass(frozen=True)
class Score:
    """How good a leak is.

    psnr_slice : (N, M) dB and psnr_image : (N,) dB, None for tables; relative_error : (N, M),
    ‖x̂ - x‖ / ‖x‖ of each slice, not finite where x is zero; leaks and certified : (N, M), from the leak itself;
    leaking : (N, M), which slices have a gradient, in truth where :func:`score` was told, else as the leak claims.
    ``summary()`` gives the figures of a report.
    """

    psnr_slice: Tensor | None
    psnr_image: Tensor | None
    ssim: Tensor | None
    relative_error: Tensor
    label_accuracy: float
    leaks: Tensor
    certified: Tensor
    leaking: Tensor

    @property
    def false(self) -> Tensor:
        """Which certificates are wrong, (N, M), bool: slices truly below 60 dB; for tables, off by more than 1e-4 of their norm."""
        return self.certified & (self.psnr_slice < CERTIFIED_PSNR if self.psnr_slice is not None else self.relative_error > CERTIFIED_ERROR)

    def summary(self) -> dict:
        """Figures of ``report.json``; the psnr_slice values and the relative error are over slices that have a gradient,
        ``slices_leaking`` in number. ``slices_not_leaked`` counts those that the attack calls silent.

        psnr_slice_mean is the mean of the per-slice values, the released code's definition.
        ``certified_psnr_min`` and ``certified_error_max`` are the worst certified slice.
        """
        return {
            "psnr_slice_mean": _over(self.psnr_slice, self.leaking, torch.mean),
            "psnr_slice_median": _over(self.psnr_slice, self.leaking, torch.median),
            "psnr_image_median": _over(self.psnr_image, None, torch.median),
            "psnr_cap": PSNR_CAP,
            "ssim_mean": _over(self.ssim, None, torch.mean),
            "relative_error_median": _over(self.relative_error, self.leaking, torch.median),
            "relative_error_max": _over(self.relative_error, self.leaking, torch.max),
            "label_accuracy": self.label_accuracy,
            "slices_total": self.leaks.numel(),
            "slices_leaking": int(self.leaking.sum()),
            "slices_not_leaked": int((~self.leaks).sum()),
            "slices_certified": int(self.certified.sum()),
            "images_certified": int(self.certified.all(1).sum()),
            "certified_false": int(self.false.sum()),
            "certified_psnr_min": _over(self.psnr_slice, self.certified, torch.min),
            "certified_error_max": _over(self.relative_error, self.certified, torch.max),
        }

    def __str__(self) -> str:
        s = self.summary()
        lines = [f"slices   {s['slices_total']}, {s['slices_not_leaked']} do not leak, {s['slices_certified']} certified"]
        if self.psnr_slice is not None:
            lines.append(f"PSNR     {_text(s['psnr_slice_median'])} dB median, {_text(s['psnr_slice_mean'])} dB mean per slice, {_text(s['psnr_image_median'])} dB median per image")
        else:
            lines.append(f"error    {_text(s['relative_error_median'], '.1e')} median, {_text(s['relative_error_max'], '.1e')} largest, relative, per slice")
        lines.append(f"labels   {100 * s['label_accuracy']:.1f} % right")
        return "\n".join(lines)


def score(leak, data, split, *, leaking: Tensor | None = None) -> Score:
    """Compare a leak with the truth.

    leak : an attack's :class:`~cafe_tutorial.attack.Leak`; data : the :class:`~cafe_tutorial.data.Images`
    or :class:`~cafe_tutorial.data.Table` that was attacked; split : its partition. Rows that the attack calls
    exchangeable are put in the order, the same for all workers, that fits the truth best; a leak about some rows is
    compared with these. leaking : (N, M), bool, which of the data's slices have a gradient, for the averages
    (:func:`~cafe_tutorial.reveal.row_gradients` tells); what the leak claims where it is not given.
    """
    if leaking is not None:
        leaking = leaking.cpu() if leak.numbers is None else leaking.cpu()[leak.numbers.cpu()]
    leak, data = facing(leak, data, split)
    true, features = split.split(data.features), data.features
    if [tuple(s.shape) for s in leak.slices] != [tuple(t.shape) for t in true]:
        raise ValueError(f"leak has slices {[tuple(s.shape) for s in leak.slices]}, the data {[tuple(t.shape) for t in true]}")
    if not all(s.isfinite().all() for s in leak.slices):
        raise ValueError("leak holds NaN or infinite slices; the attack diverged and has no score")
    error = [(s.double() - t).flatten(1).norm(dim=1) / t.double().flatten(1).norm(dim=1) for s, t in zip(leak.slices, true)]
    images = features.dim() == 4
    merged = split.merge(leak.slices)
    return Score(
        psnr_slice=torch.stack([psnr(s, t) for s, t in zip(leak.slices, true)], 1) if images else None,
        psnr_image=psnr(merged, features) if images else None,
        ssim=ssim(merged, features) if images else None,
        relative_error=torch.stack(error, 1),
        label_accuracy=float((leak.labels == data.labels).double().mean()),
        leaks=leak.leaks,
        certified=leak.certified,
        leaking=leak.leaks if leaking is None else leaking,
    )


def facing(leak, data, split):
    """A leak on the CPU and the data, row beside row: the data's rows that the leak is about, and exchangeable rows of
    the leak in the order that fits the truth best. Returns both; arguments as for :func:`score`."""
    leak = leak.to("cpu")
    data = data if leak.numbers is None else data.take(leak.numbers)
    if leak.exchangeable is not None:
        leak = _best_exchange(leak, split.split(data.features))
    return leak, data


def _best_exchange(leak, true: list[Tensor]):
    """The leak with its exchangeable rows matched to the true ones by their squared error over all workers, certified slices first:
    one that was not found says nothing about which row it is."""
    from scipy.optimize import linear_sum_assignment

    order = torch.arange(len(leak.labels))
    for number in (leak.exchangeable.bincount() > 1).nonzero()[:, 0]:
        rows = (leak.exchangeable == number).nonzero()[:, 0]
        weights = 1 + CERTIFIED_FIRST * leak.certified[rows].double()  # (n, M)
        pairs = zip(leak.slices, true, weights.T)
        cost = sum(torch.cdist(t[rows].double().flatten(1), s[rows].double().flatten(1)).square() * w for s, t, w in pairs)
        order[rows] = rows[torch.from_numpy(linear_sum_assignment(cost.numpy())[1])]
    moved = ("labels", "leaks", "residual", "certified")
    return replace(leak, slices=[s[order] for s in leak.slices], **{name: getattr(leak, name)[order] for name in moved})


def _over(values: Tensor | None, mask: Tensor | None, reduce) -> float | None:
    """Reduce the finite values that the mask keeps; None where there are none."""
    if values is None:
        return None
    kept = values[torch.isfinite(values) if mask is None else mask & torch.isfinite(values)]
    if not kept.numel():
        return None
    return float(reduce(kept))


def _text(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)
