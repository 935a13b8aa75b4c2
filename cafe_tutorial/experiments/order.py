"""What fake gradients give away to an attacker who knows of them: slices from the order of the entries, and from those that were not cut."""

from __future__ import annotations

import time

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from tqdm.auto import tqdm

from ..attack import from_clipped, from_order
from ..attack.one_round import find_rows
from ..data import load
from ..metrics import CERTIFIED_PSNR, psnr
from ..model import VFLModel, full_precision
from ..options import AttackOptions, defense, parties
from ..protocol import RoundView, VerticalFL

READINGS = {  # the defence, and what undoes it
    "order": ("fake:sigma=1,relative=true,reading=order", from_order), "clip, by order": ("fake:sigma=1,relative=true", from_order),
    "clip, 1 rms": ("fake:sigma=1,relative=true", from_clipped), "clip, 3 rms": ("fake:sigma=3,relative=true", from_clipped),
}  # fmt: skip
SIZES = {"smoke": ((2, 32),), "laptop": ((4, 64), (20, 256)), "paper": ((4, 64), (10, 256), (20, 256), (40, 256))}  # K and d2
SEEDS = {"smoke": (0,), "laptop": (3, 4, 5), "paper": (3, 4, 5)}  # the settings of ``attack.ranks`` were found with 0, 1 and 2
MUCH = 10  # the smallest K for which one seed must do


def run(*, device: torch.device, size: str, data: str, seeds: tuple[int, ...] | None = None, progress: bool = True) -> dict:
    """For each reading, K and seed, one round: each worker's first gradient from what is left of it, then the slices in its span.

    Returns by setting: the error of the weight gradient's direction and the misfit, of the worst worker; over all workers the
    slices, how many of them were found, certified, and falsely so; their PSNR in the median, those not found as black; and the
    worst certified one's. A slice found stands for the true one that it fits best, each for another.
    """
    table, seeds = [], seeds or SEEDS[size]
    settings = [(K, d2, reading, seed) for K, d2 in SIZES[size] for reading in READINGS for seed in (seeds if K < MUCH else seeds[:1])]
    for K, d2, reading, seed in tqdm(settings, desc="order", unit="round", leave=False, disable=not progress):
        uploaded, undo = READINGS[reading]
        options = AttackOptions(data=data, rows=3 * K, batch_size=K, d2=d2, defense=uploaded, seed=seed)
        images, start = load(data, rows=3 * K, seed=seed), time.perf_counter()
        split, model = parties(options, images)
        parts = split.split(images.features)
        true, view = (next(VerticalFL(model, parts, images.labels, batch_size=K, defense=d, seed=seed, device=device).rounds(1)) for d in (None, defense(options)))
        found, misfits = undo(view, model)
        errors = [_error(*(model.of_worker(v.gradients, m)["first.weight"] for v in (found, true))) for m in range(model.workers)]
        decibels, there, certified = (torch.cat(column) for column in zip(*(_slices(found, m, model, parts[m], seed) for m in range(model.workers))))
        table.append({
            "reading": reading, "batch_size": K, "d2": d2, "seed": seed, "error": max(errors), "misfit": max(misfits), "slices": len(decibels),
            "found": int(there.sum()), "certified": int(certified.sum()), "certified_false": int((certified & (decibels < CERTIFIED_PSNR)).sum()),
            "psnr_median": float(decibels.median()), "certified_psnr_min": float(decibels[certified].min()) if certified.any() else None,
            "seconds": round(time.perf_counter() - start, 2),
        })  # fmt: skip
    return {"data": images.name, "data_sha256": images.sha256, "seeds": list(seeds), "settings": table}


def _error(found: Tensor, true: Tensor) -> float:
    """The sine of the angle between two gradients, 1 where one is zero."""
    a, b = found.double().flatten(), true.double().flatten()
    if not (a.any() and b.any()):
        return 1.0
    a, b = a / a.norm(), b / b.norm()
    return float((a - (a @ b) * b).norm())


def _slices(found: RoundView, m: int, model: VFLModel, part: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of worker m's true slices of the round, (K,): PSNR of what was found for it, whether anything was, whether it is certified."""
    with full_precision():
        rows = find_rows(model, found, m, seed=seed)
    true = part[found.indices.cpu()]
    x, certified, there = torch.zeros_like(true), torch.zeros(len(true), dtype=torch.bool), torch.zeros(len(true), dtype=torch.bool)
    if len(rows.x):
        own, whose = (torch.from_numpy(n) for n in linear_sum_assignment(torch.cdist(rows.x.cpu().flatten(1), true.flatten(1)).numpy()))
        x[whose], certified[whose], there[whose] = rows.x.cpu()[own], rows.certified.cpu()[own], True
    return psnr(x, true), there, certified
