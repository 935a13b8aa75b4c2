"""How many rows of each class a batch holds, from one round's head gradient (Ma et al., ICLR 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..protocol import RoundView


def label_counts(view: RoundView) -> Tensor:
    """Class counts (classes,), int64, that add up to |s|, for a loss with a single softmax.

    The head's bias gradient of class c is Σ_n (p_nc - y_nc) / |s|. If all rows of class j had the same probabilities
    p̄_j, the counts would solve Σ_j n_j p̄_jc - n_c = |s| ∂b_c with Σ_j n_j = |s|. Each class is given a prototype, its weight
    gradient divided by its bias gradient, a weighted sum of the head's inputs in which the class's own rows weigh most unless the
    model is sure and wrong; p̄_j is what the head makes of it. The counts are the least-squares solution, rounded so that
    their sum stays.
    """
    size = len(view.indices)
    W, b = view.parameters["head.weight"].double(), view.parameters["head.bias"].double()  # (classes, D), (classes,)
    gW, gb = view.gradients["head.weight"].double(), view.gradients["head.bias"].double()
    prototypes = gW / torch.where(gb.abs() > 1e-12, gb, 1e-12)[:, None]  # (classes, D)
    p = (prototypes @ W.T + b).softmax(1)  # (classes, classes), row j is p̄_j
    system = torch.cat([p.T - torch.eye(len(b), dtype=b.dtype, device=b.device), torch.ones_like(b)[None]])
    right = torch.cat([size * gb, torch.full_like(b[:1], size)])
    return _whole(torch.linalg.lstsq(system.cpu(), right[:, None].cpu(), driver="gelsd").solution[:, 0], size).to(b.device)


def _whole(counts: Tensor, size: int) -> Tensor:
    """Non-negative whole numbers that add up to ``size``: rounded down, then up where most was lost."""
    counts = counts.clamp_min(0)
    counts = counts if float(counts.sum()) > 0 else torch.ones_like(counts)
    counts = counts * (size / counts.sum().clamp_min(1e-12))
    whole = counts.floor()
    rest = size - int(whole.sum())
    whole[(counts - whole).topk(min(rest, len(whole))).indices] += 1
    return whole.long()
