"""How long one single-loop iteration takes at the paper's MNIST size, and where the time goes.

Workers fused into one batched call against the plain form, one worker after another: both are timed
in turn within one run, and their ratio is the result.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm

from ..attack import SingleLoopCAFE
from ..data import load_images
from ..model import VFLModel
from ..partition import GridPartition
from ..protocol import VerticalFL

PARTS = ("round", "step1", "step2", "step3")


def run(*, device: torch.device, seed: int = 0, repeats: int = 20, progress: bool = True) -> dict:
    """Time ``repeats`` iterations of 800 digits, 4 workers, K = 40.

    Returns medians in milliseconds of the real round and of each step, fused and plain; the ratio
    plain / fused of the whole iteration; and the operations that take most of the fused form's time, as
    shares of it.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    data, split = load_images("mnist-sample", rows=800, seed=seed), GridPartition(2, 2)
    setups = {}
    for name in ("fused", "plain"):
        model = VFLModel.convolutional(split.part_shapes(data), classes=data.classes, seed=seed, fuse=name == "fused")
        vfl = VerticalFL(model, split.split(data.images), data.labels, seed=seed, device=device)
        setups[name] = (vfl, SingleLoopCAFE(model, rows=800, seed=seed, device=device))
    times: dict = {name: {part: [] for part in PARTS} for name in setups}
    for i in tqdm(range(repeats + 2), desc="speed", unit="iteration", leave=False, disable=not progress):
        for name, (vfl, attack) in setups.items():
            for part, milliseconds in _iteration(vfl, attack, device).items():
                if i >= 2:  # two to warm up
                    times[name][part].append(milliseconds)
    median = {name: {part: round(statistics.median(v), 2) for part, v in parts.items()} for name, parts in times.items()}
    total = {name: round(sum(parts.values()), 2) for name, parts in median.items()}
    return {
        "milliseconds": median,
        "iteration": total,
        "plain_over_fused": round(total["plain"] / total["fused"], 3),
        "operations": _operations(*setups["fused"]),
        "repeats": repeats,
    }


def _iteration(vfl: VerticalFL, attack: SingleLoopCAFE, device: torch.device) -> dict[str, float]:
    """One round and the three steps on it, each timed."""
    stream, out, view = vfl.rounds(1), {}, None
    for part in PARTS:
        start = time.perf_counter()
        if part == "round":
            view = next(stream)
        else:
            getattr(attack, f"_{part}")(view)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        out[part] = 1000 * (time.perf_counter() - start)
    return out


def _operations(vfl: VerticalFL, attack: SingleLoopCAFE, *, top: int = 8) -> dict[str, float]:
    """Shares of self time by operation over three iterations, the largest first."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as recorded:
        for view in vfl.rounds(3):
            attack.observe(view)
    rows = [(e.key, e.self_cpu_time_total + getattr(e, "self_device_time_total", 0)) for e in recorded.key_averages()]
    total = sum(t for _, t in rows)
    return {name: round(t / total, 3) for name, t in sorted(rows, key=lambda r: -r[1])[:top]}
