"""Where the time goes: an iteration by workers, the steps iterative against exact, whole attacks by rows.

What is compared is timed in turn within one run, and the ratio is the result.
"""

from __future__ import annotations

import cProfile
import math
import pstats
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm

from ..attack import SingleLoopCAFE
from ..attack.invert import invert
from ..attack.step1 import BiasEquations
from ..data import load_images
from ..model import VFLModel
from ..options import AttackOptions
from ..partition import GridPartition
from ..protocol import VerticalFL
from ..reveal import row_gradients
from ..run import run_attack

PARTS = ("round", "step1", "step2", "step3")
WORKERS = (1, 4, 16)
SEARCHED = {  # where a whole attack's time may go: file and function
    ("protocol.py", "rounds"): "rounds", ("step1.py", "solve"): "step I", ("step2.py", "solve"): "step II", ("invert.py", "invert"): "inversion",
    ("jacobians.py", "tells_apart"): "certificates", ("spans.py", "span"): "spans", ("meeting.py", "meeting"): "intersections",
    ("few_rounds.py", "_polish"): "polish", ("pool.py", "select"): "choice", ("group_join.py", "join_groups"): "joins",
    ("reveal.py", "row_gradients"): "scoring", ("metrics.py", "score"): "scoring",
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """rows, batch_size : of the iteration and the steps; repeats : iterations timed; grow : rows of the whole attacks"""

    rows: int
    batch_size: int
    repeats: int
    grow: tuple[int, ...]


SIZES = {"smoke": Size(16, 4, 1, (8, 16)), "laptop": Size(800, 40, 10, (200, 400, 800)), "paper": Size(800, 40, 20, (200, 400, 800, 1600, 3200))}


def run(*, device: torch.device, size: str, data: str, seeds: tuple[int, ...] | None = None, progress: bool = True) -> dict:
    """Time everything once.

    Returns *iteration*: medians in milliseconds of the round and each step, by workers, fused and plain, and the ratio
    plain over fused; *operations*: shares of an iteration's time; *step1* and *step3*: iterative against exact;
    *attacks*: seconds of exact and few-rounds from data to report by rows, and the exponent with which they grow.
    """
    own, seed = SIZES[size], (seeds or (0,))[0]
    images = load_images(data, rows=own.rows, seed=seed)
    with tqdm(total=len(WORKERS) + 3 + 2 * len(own.grow), desc="speed", unit="part", leave=False, disable=not progress) as bar:
        iterations = {}
        for M in WORKERS:
            iterations[str(M)] = _iterations(images, M, own, seed, device)
            bar.update()
        vfl, attack = _setup(images, 4, own, seed, device)
        operations = _operations(vfl, attack)
        bar.update()
        step1 = _step1(images, own, seed, device)
        bar.update()
        step3 = _step3(images, own, seed, device, iterations["4"]["fused"]["step3"])
        bar.update()
        attacks = {}
        for method in ("exact", "few-rounds"):
            attacks[method] = {}
            for N in own.grow:
                attacks[method][str(N)] = _whole(method, data, N, own, seed, device)
                bar.update()
    growth = {method: exponent({int(N): r["seconds"] for N, r in by.items()}) for method, by in attacks.items()}
    return {
        "rows": own.rows, "batch_size": own.batch_size, "data": images.name, "repeats": own.repeats, "iteration": iterations,
        "operations": operations, "step1": step1, "step3": step3, "attacks": attacks, "growth_exponent": growth,
    }  # fmt: skip


def exponent(seconds: dict[int, float]) -> float:
    """The slope of log seconds against log rows, by least squares."""
    x, y = [math.log(n) for n in seconds], [math.log(max(s, 0.01)) for s in seconds.values()]
    return statistics.linear_regression(x, y).slope


def _setup(images, workers: int, own: Size, seed: int, device, *, fuse: bool = True):
    split = GridPartition.for_workers(workers, *images.images.shape[2:])
    model = VFLModel.convolutional(split.part_shapes(images), classes=images.classes, seed=seed, fuse=fuse)
    vfl = VerticalFL(model, split.split(images.images), images.labels, batch_size=own.batch_size, seed=seed, device=device)
    return vfl, SingleLoopCAFE(model, rows=own.rows, seed=seed, device=device)


def _iterations(images, workers: int, own: Size, seed: int, device) -> dict:
    """Median milliseconds of each part of a single-loop iteration; workers in one batched call against one after another."""
    setups = {name: _setup(images, workers, own, seed, device, fuse=name == "fused") for name in ("fused", "plain")}
    times: dict = {name: {part: [] for part in PARTS} for name in setups}
    for i in range(own.repeats + 2):
        for name, (vfl, attack) in setups.items():
            for part, milliseconds in _iteration(vfl, attack, device).items():
                if i >= 2:  # two to warm up
                    times[name][part].append(milliseconds)
    median = {name: {part: round(statistics.median(v), 2) for part, v in parts.items()} for name, parts in times.items()}
    total = {name: sum(parts.values()) for name, parts in median.items()}
    return {**median, "plain_over_fused": round(total["plain"] / total["fused"], 3)}


def _iteration(vfl: VerticalFL, attack: SingleLoopCAFE, device: torch.device) -> dict[str, float]:
    """One round and the three steps on it, each timed."""
    stream, out, view = vfl.rounds(1), {}, None
    for part in PARTS:
        start = time.perf_counter()
        if part == "round":
            view = next(stream)
        else:
            getattr(attack, f"_{part}")(view)
        out[part] = 1000 * _since(start, device)
    return out


def _since(start: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _operations(vfl: VerticalFL, attack: SingleLoopCAFE, *, top: int = 8) -> dict[str, float]:
    """Shares of self time by operation over three iterations, the largest first."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as recorded:
        for view in vfl.rounds(3):
            attack.observe(view)
    rows = [(e.key, e.self_cpu_time_total + getattr(e, "self_device_time_total", 0)) for e in recorded.key_averages()]
    total = sum(t for _, t in rows)
    return {name: round(t / total, 3) for name, t in sorted(rows, key=lambda r: -r[1])[:top]}


def _step1(images, own: Size, seed: int, device) -> dict:
    """Step I by iteration and by least squares on the same rounds: seconds, and the error of V that each leaves."""
    vfl, attack = _setup(images, 4, own, seed, device)
    V = torch.cat(row_gradients(vfl)[0], 1).double().cpu()  # (N, Σ d2), to compare with
    equations, iterative = BiasEquations(own.rows), 0.0
    while equations.rank < own.rows or len(equations) < own.rows + own.rows // 20:
        for view in vfl.rounds(1):
            start = time.perf_counter()
            attack._step1(view)
            iterative += _since(start, device)
            equations.add(view.indices, torch.cat(vfl.model.unstack([view.gradients[f"group{g}.first.bias"] for g in range(len(vfl.model.groups))])))
    start = time.perf_counter()
    solved = equations.solve(eps=torch.finfo(torch.float32).eps)[0]
    seconds = time.perf_counter() - start
    guessed = own.batch_size * torch.cat(vfl.model.unstack(attack.V), 1).double().cpu()
    errors = {name: float((v - V).norm() / V.norm()) for name, v in (("iterative", guessed), ("exact", solved))}
    return {"rounds": len(equations), "iterative_seconds": iterative, "exact_seconds": seconds, "iterative_error": errors["iterative"], "exact_error": errors["exact"]}


def _step3(images, own: Size, seed: int, device, milliseconds: float) -> dict:
    """Milliseconds a slice: one iteration of eq. 9, and the whole inversion of an exact h."""
    vfl, _ = _setup(images, 4, own, seed, device)
    V, H = row_gradients(vfl)
    few = min(own.rows, 64)
    rows = (V[0].norm(dim=1) > 0).nonzero()[:few, 0]
    view = next(vfl.rounds(1))
    start = time.perf_counter()
    _, rho = invert(vfl.model.representation(0, view.parameters), H[0][rows].detach(), vfl.model.part_shapes[0], generator=torch.Generator().manual_seed(seed))
    inversion = 1000 * _since(start, device) / len(rows)
    iteration = milliseconds / (4 * own.batch_size)
    return {"iteration_a_slice": iteration, "inversion_a_slice": inversion, "iterations_in_an_inversion": inversion / iteration, "residual_median": float(rho.median())}


def _whole(method: str, data: str, rows: int, own: Size, seed: int, device) -> dict:
    """One attack from data to report, with the seconds of its parts; a part that calls another holds its time too."""
    options = AttackOptions(data=data, rows=rows, batch_size=min(own.batch_size, rows // 2), method=method, device=device.type, seed=seed, progress=False)
    recorded = cProfile.Profile()
    report = recorded.runcall(run_attack, options).report
    parts = {}
    for (file, _, name), (_, _, _, cumulative, _) in pstats.Stats(recorded).stats.items():
        part = SEARCHED.get((Path(file).name, name))
        if part and "cafe_tutorial" in file:
            parts[part] = round(parts.get(part, 0.0) + cumulative, 2)
    kept = ("seconds", "rounds", "psnr_slice_median", "label_accuracy", "slices_leaking", "slices_certified")
    return {**{k: report[k] for k in kept}, "parts": dict(sorted(parts.items(), key=lambda item: -item[1]))}
