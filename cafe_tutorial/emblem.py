"""The book's emblem: how well private rows come back, by the rounds that the server sees."""

from __future__ import annotations

from . import results
from .plots import Picture, curves

PAPER = {"rounds": 6600, "psnr": 38.0}  # table 5: MNIST, single loop, the rounds to its stop at 38 dB


def emblem() -> Picture:
    """Median PSNR of a slice against the rounds seen, 800 digits, four workers, K = 40, from the results files."""
    def point(*names):
        found = [results.load(name) for name in names]
        return [r["rounds"] for r in found], [r["psnr_slice_median"] for r in found]

    curve = results.load("single_loop_mnist")["curve"]
    lines = {
        "one round": point("one_round_mnist"),
        "few rounds": point("few_rounds_2_mnist", "few_rounds_4_mnist"),
        "exact": point("exact_mnist"),
        "single loop, as run here": ([p["rounds"] for p in curve], [p["psnr_slice_median"] for p in curve]),
        "paper: single loop": ([PAPER["rounds"]], [PAPER["psnr"]]),
    }
    return curves(lines, xlabel="rounds seen", ylabel="PSNR (dB)", log_x=True, marks=True, right=20000, bottom=0, top=160)
