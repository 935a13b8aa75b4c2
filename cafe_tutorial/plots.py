"""Figures: image grids, true beside recovered, curves; legible on light and on dark pages.

Each function returns a :class:`Picture`; as the last expression of a notebook cell it shows itself.
"""

from __future__ import annotations

import io
from contextlib import contextmanager

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from torch import Tensor

from .metrics import facing

INK = "#808080"  # mid-grey text and lines stand out on white and on near-black
COLOURS = ("#4c78a8", "#e4572e", "#59a14f", "#b07aa1", "#c98500")  # told apart on white and on near-black


class Picture(Figure):
    """A figure outside pyplot's bookkeeping: shown once, by its own PNG, and freed with its last reference."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=150, facecolor="none", bbox_inches="tight", pad_inches=0.05)
        return buffer.getvalue()


@contextmanager
def style():
    """Transparent axes with mid-grey text."""
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    with mpl.rc_context({**colours, "figure.facecolor": "none", "axes.facecolor": "none", "font.size": 11}):
        yield


def _tiles(images: Tensor, gap: int = 1) -> np.ndarray:
    """Images (n, C, H, W) side by side as one (H, n·(W + gap) - gap, 4) array; the gaps are transparent."""
    pixels = images.detach().cpu().clamp(0, 1).float()
    n, channels, height, width = pixels.shape
    strip = np.zeros((n, height, width + gap, 4), dtype=np.float32)
    strip[:, :, :width, :3] = pixels.expand(n, 3, height, width).permute(0, 2, 3, 1).numpy()
    strip[:, :, :width, 3] = 1
    return strip.transpose(1, 0, 2, 3).reshape(height, -1, 4)[:, :-gap]


def image_rows(rows: dict[str, Tensor], *, columns: int = 10, size: float = 0.55) -> Picture:
    """Labelled rows of images.

    rows : row label to images (n, C, H, W); the first ``columns`` of each are drawn
    columns : images a row
    size : inches an image
    """
    if not rows:
        raise ValueError("rows must hold at least one row of images")
    columns = min(columns, *(len(images) for images in rows.values()))
    with style():
        figure = Picture(figsize=(columns * size + 1.1, len(rows) * size * 1.15))
        for ax, (label, images) in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows.items()):
            ax.imshow(_tiles(images[:columns]), interpolation="nearest")
            ax.set_ylabel(label, rotation=0, ha="right", va="center")
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        figure.tight_layout(pad=0.4)
    return figure


def true_beside_recovered(leak, data, split, *, columns: int = 10) -> Picture:
    """Two rows, true and recovered: images of an image set, or records of a table as colour strips."""
    leak, data = facing(leak, data, split)
    recovered = split.merge(leak.slices)
    if recovered.dim() == 4:
        return image_rows({"true": data.images, "recovered": recovered}, columns=columns)
    with style():
        figure = Picture(figsize=(10, 3.2))
        axes = figure.subplots(1, 3, sharey=True)
        true, found = data.records[:columns], recovered[:columns]
        for ax, title, values in zip(axes, ("true", "recovered", "difference"), (true, found, found - true)):
            ax.imshow(values.numpy(), cmap="coolwarm", vmin=-3, vmax=3, aspect="auto", interpolation="nearest")
            ax.set(title=title, xlabel="column", xticks=[0, values.shape[1] - 1])
        axes[0].set(ylabel="record", yticks=[0, len(true) - 1])
        figure.tight_layout()
    return figure


def curve(points: list[tuple[int, float]], *, xlabel: str = "rounds", ylabel: str = "PSNR (dB)") -> Picture:
    """A line through (x, y) points."""
    with style():
        figure = Picture(figsize=(6, 3))
        ax = figure.subplots()
        x, y = zip(*points)
        ax.plot(x, y, color=COLOURS[0], marker="o", markersize=3)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        ax.grid(alpha=0.25)
        figure.tight_layout()
    return figure


def histograms(groups: dict[str, Tensor], *, xlabel: str, top: float | None = None) -> Picture:
    """Overlaid histograms of values in [0, 1], one a group.

    groups : label to values (n,); top : upper end of the count axis, for frames that are to be compared
    """
    with style():
        figure = Picture(figsize=(6, 3))
        ax = figure.subplots()
        for (label, values), colour in zip(groups.items(), COLOURS):
            ax.hist(values.cpu().numpy(), bins=20, range=(0, 1), alpha=0.6, label=label, color=colour)
        ax.set(xlabel=xlabel, ylabel="rows", xlim=(0, 1), ylim=(0, top))
        ax.legend(frameon=False)
        figure.tight_layout()
    return figure


def curves(
    lines: dict[str, tuple], *, xlabel: str, ylabel: str, log: bool = False, log_x: bool = False,
    top: float | None = None, bottom: float | None = None, right: float | None = None, marks: bool = False,
) -> Picture:  # fmt: skip
    """Several lines: label to (x, y), on logarithmic axes when ``log`` (y) or ``log_x``.

    top, bottom, right : ends of the axes, for frames that are to be compared; marks : a dot at each point. A label
    that begins with "predicted" is drawn dashed, one that begins with "paper" as crosses without a line.
    """
    with style():
        figure = Picture(figsize=(6, 3.4))
        ax = figure.subplots()
        solid = iter(COLOURS)
        for label, (x, y) in lines.items():
            dashed, foreign = label.startswith("predicted"), label.startswith("paper")
            shape = {"linestyle": "", "marker": "x", "markersize": 7} if foreign else {"linestyle": "--" if dashed else "-", "marker": "o" if marks else None, "markersize": 4}
            ax.plot(x, y, label=label, color=INK if dashed or foreign else next(solid), **shape)
        ax.set(xlabel=xlabel, ylabel=ylabel, yscale="log" if log else "linear", xscale="log" if log_x else "linear")
        ax.set_ylim(bottom, top)
        ax.set_xlim(right=right)
        for axis in (ax.xaxis, ax.yaxis):
            _few_ticks(axis)
        ax.grid(alpha=0.25)
        ax.legend(frameon=False, fontsize=9)
        figure.tight_layout()
    return figure


def _few_ticks(axis):
    """A logarithmic axis of less than two decades gets plain numbers at 1, 2 and 5 times the powers of ten."""
    low, high = axis.get_view_interval()
    if axis.get_scale() == "log" and high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def matrices(named: dict[str, Tensor], *, xlabel: str, ylabel: str, limit: float) -> Picture:
    """Matrices side by side as colours between -``limit`` and ``limit``: label to (rows, columns)."""
    with style():
        figure = Picture(figsize=(6, 2.6))
        for ax, (label, values) in zip(figure.subplots(1, len(named), squeeze=False)[0], named.items()):
            ax.imshow(values.cpu().numpy(), cmap="coolwarm", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
            ax.set(title=label, xlabel=xlabel, ylabel=ylabel, xticks=[], yticks=[])
        figure.tight_layout()
    return figure
