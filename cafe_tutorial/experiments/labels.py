"""Labels from the head's gradients: class counts of one batch, and every row's label from many."""

from __future__ import annotations

import torch
from tqdm.auto import tqdm

from ..attack.label_counts import label_counts
from ..attack.step1 import BiasEquations
from ..data import load
from ..options import AttackOptions, parties
from ..protocol import VerticalFL
from ..run import pretrain

SIZES = {"smoke": (20, (4,), (0, 5), 3), "laptop": (200, (10, 40, 100), (0, 60, 200), 20), "paper": (800, (10, 20, 40, 80, 100), (0, 60, 200), 50)}


def run(*, device: torch.device, size: str, data: str, seeds: tuple[int, ...] | None = None, progress: bool = True) -> dict:
    """For each K, number of training steps before and seed: the share of labels that the counts of one batch get right,
    1 - Σ|n̂_c - n_c| / (2K), averaged over rounds, and the share of rows whose label the linear system of step I gives."""
    rows, batch_sizes, trainings, rounds = SIZES[size]
    table = []
    settings = [(K, steps, seed) for K in batch_sizes for steps in trainings for seed in seeds or (0,)]
    for K, steps, seed in tqdm(settings, desc="labels", unit="setting", leave=False, disable=not progress):
        options = AttackOptions(data=data, rows=rows, batch_size=K, pretrain=steps, seed=seed, progress=False)
        images = load(data, rows=rows, seed=seed)
        split, model = parties(options, images)
        parts = split.split(images.features)
        accuracy = pretrain(options, model, parts, images, K, device)["pretrain_accuracy"] if steps else None
        vfl = VerticalFL(model, parts, images.labels, batch_size=K, below=False, seed=seed, device=device)
        equations, right = BiasEquations(rows), []
        while equations.rank < rows or len(equations) < rows + rows // 20:
            for view in vfl.rounds(1):
                equations.add(view.indices, view.gradients["head.bias"])
                if len(right) < rounds:
                    true = images.labels[view.indices.cpu()].bincount(minlength=model.classes)
                    right.append(1 - float((label_counts(view).cpu() - true).abs().sum()) / (2 * K))
        solved = equations.solve(eps=torch.finfo(torch.float32).eps)[0].argmin(1)
        exact = float((solved == images.labels).double().mean())
        table.append({"batch_size": K, "pretrain": steps, "training_accuracy": accuracy, "seed": seed, "counts": sum(right) / len(right), "rounds": len(right), "exact": exact})
    return {"rows": rows, "data": images.name, "data_sha256": images.sha256, "labels": table}


