"""From recovered representations to slices, each with its residual and a certificate.

A slice is certified when h_n is known to about 2e-5 of its norm, the image found has that h_n, and h,
linearized there, tells it from its neighbours well enough for 60 dB; whether an image far away has the
same h_n is not tested. Nothing is certified where h has fewer numbers than the slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..model import Parameters, VFLModel
from .invert import ATTEMPTS, Attempt, invert
from .jacobians import tells_apart

CERTIFIED = 1e-8  # no residual above this is ever certified
FLOOR = 1e-10  # and none below this is doubted for its size, if h_n itself is known well enough
PIXEL_ERROR = 1e-3  # root mean square, 60 dB: what a certificate allows for


def recover_slices(
    model: VFLModel, parameters: Parameters, H: Sequence[Tensor], H_error: Sequence[Tensor], live: Tensor, *,
    trusted: bool = True, attempts: tuple[Attempt, ...] = ATTEMPTS, seed: int = 0, progress: bool = False,
) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
    """Step III for every worker.

    H : a tensor (N, d1) a worker; H_error : (N,) a worker, the expected error of each row relative to its
    norm, infinite where unknown; live : (N, M), the slices to look for; trusted : whether anything may be
    certified. Returns slices (zero where not looked for), residuals (N, M) and certificates (N, M).
    """
    dtype, device = parameters["head.bias"].dtype, parameters["head.bias"].device
    generator = torch.Generator().manual_seed(seed)
    slices, residual, certified = [], [], []
    with tqdm(total=int(live.sum()), desc="step III", unit="slice", leave=False, disable=not progress) as bar:
        for m, (h, delta) in enumerate(zip(H, H_error)):
            known = live[:, m].to(device) & torch.isfinite(delta) & (delta > 0)
            representation, shape = model.representation(m, parameters), model.part_shapes[m]
            x = torch.zeros(len(h), *shape, dtype=dtype, device=device)
            rho = torch.full((len(h),), math.nan, dtype=dtype, device=device)
            limit = (25 * delta.square()).clamp_min(FLOOR)
            if model.holds_records(m):
                x[known], rho[known] = h[known].to(dtype).reshape(-1, *shape), 0.0
            elif bool(known.any()):
                x[known], rho[known] = invert(
                    representation, h[known].to(dtype), shape, goal=limit[known], attempts=attempts,
                    chunk=_chunk(shape, device), generator=generator, tick=bar.update,
                )  # fmt: skip
            passed = (rho <= limit) & (limit <= CERTIFIED) & known & (trusted and h.shape[1] >= math.prod(shape))
            if bool(passed.any()) and not model.holds_records(m):
                error = (rho.sqrt() + limit.sqrt()) * h.norm(dim=1)
                passed[passed.clone()] = tells_apart(representation, x[passed], error[passed] / (PIXEL_ERROR * math.prod(shape) ** 0.5))
            slices.append(x)
            residual.append(rho)
            certified.append(passed)
    return slices, torch.stack(residual, 1), torch.stack(certified, 1)


def _chunk(shape: tuple[int, ...], device: torch.device) -> int:
    """Slices at a time in step III: the first convolution's 64 maps of them take about 6 MB, 200 MB on a GPU."""
    return max(16, (50_000_000 if device.type == "cuda" else 1_600_000) // (64 * math.prod(shape[1:] or shape)))
