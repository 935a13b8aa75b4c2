"""What the order of a gradient's entries gives away: slices from fake gradients, by an attacker who knows of them."""

from __future__ import annotations

import time

import torch
from tqdm.auto import tqdm

from ..attack import from_order
from ..attack.one_round import find_rows
from ..data import load
from ..metrics import CERTIFIED_PSNR, psnr
from ..model import full_precision
from ..options import AttackOptions, defense, parties
from ..protocol import RoundView, VerticalFL

READINGS = {"order": "fake:sigma=1,relative=true,reading=order", "clip, 1 rms": "fake:sigma=1,relative=true", "clip, 3 rms": "fake:sigma=3,relative=true"}
SIZES = {"smoke": ((4, 64),), "laptop": ((4, 64), (20, 256)), "paper": ((4, 64), (10, 256), (20, 256), (40, 256))}  # K and d2
SEEDS = {"smoke": (0,), "laptop": (3, 4, 5), "paper": (3, 4, 5)}  # the settings of ``attack.ranks`` were found with 0, 1 and 2
MUCH = 10  # the smallest K for which one seed must do


def run(*, device: torch.device, size: str, data: str, seeds: tuple[int, ...] | None = None, progress: bool = True) -> dict:
    """For each reading, K and seed, one round: each worker's first gradient from its order, then the slices in its span.

    Returns by setting: the error of the weight gradient's direction and the misfit, the worst of the workers, and over all
    workers the slices found, certified, and falsely so; their PSNR in the median, and that of the worst certified. A slice
    found is compared with the true one that it is most like.
    """
    table, seeds = [], seeds or SEEDS[size]
    settings = [(K, d2, reading, seed) for K, d2 in SIZES[size] for reading in READINGS for seed in (seeds if K < MUCH else seeds[:1])]
    for K, d2, reading, seed in tqdm(settings, desc="order", unit="round", leave=False, disable=not progress):
        options = AttackOptions(data=data, rows=3 * K, batch_size=K, d2=d2, defense=READINGS[reading], seed=seed)
        images, start = load(data, rows=3 * K, seed=seed), time.perf_counter()
        split, model = parties(options, images)
        parts = split.split(images.features)
        views = [next(VerticalFL(model, parts, images.labels, batch_size=K, defense=d, seed=seed, device=device).rounds(1)) for d in (None, defense(options))]
        found, misfits = from_order(views[1], model)
        errors = [_error(model.of_worker(found.gradients, m)["first.weight"], model.of_worker(views[0].gradients, m)["first.weight"]) for m in range(model.workers)]
        slices = [_slices(found, m, model, parts[m], seed) for m in range(model.workers)]
        decibels, certified = (torch.cat(column) for column in zip(*slices))
        table.append({
            "reading": reading, "batch_size": K, "d2": d2, "seed": seed, "error": max(errors), "misfit": max(misfits), "slices": K * model.workers,
            "found": len(decibels), "certified": int(certified.sum()), "false": int((certified & (decibels < CERTIFIED_PSNR)).sum()),
            "psnr_median": float(decibels.median()) if len(decibels) else None, "certified_psnr_min": float(decibels[certified].min()) if certified.any() else None,
            "seconds": round(time.perf_counter() - start, 2),
        })  # fmt: skip
    return {"data": images.name, "data_sha256": images.sha256, "settings": table}


def _error(found: torch.Tensor, true: torch.Tensor) -> float:
    """The sine of the angle between two gradients."""
    a, b = found.double().flatten(), true.double().flatten()
    a, b = a / a.norm(), b / b.norm()
    return float((a - (a @ b) * b).norm())


def _slices(found: RoundView, m: int, model, part: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PSNR (f,) of the slices found in worker m's span, and whether each is certified."""
    with full_precision():
        rows = find_rows(model, found, m, seed=seed)
    true = part[found.indices.cpu()]
    near = torch.cdist(rows.x.cpu().double().flatten(1), true.double().flatten(1)).argmin(1) if len(rows.x) else torch.zeros(0, dtype=torch.int64)
    return psnr(rows.x.cpu(), true[near]), rows.certified.cpu()
