"""Joining slices of different workers into rows, and reading the labels, from the gradients alone.

The head is additive: the logits of a row are Σ_m W_m o_m + b over its workers' outputs. So a guess which slices
belong together gives the probabilities p, a label y gives e = p - y, and then every worker's v = J_mᵀ W_mᵀ e, with
J_m the Jacobian of its upper layers, must be the one found in the gradients. The combination that fits is the row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jacrev, vmap

from ..model import Parameters, VFLModel

MOST = 300_000  # combinations to try


def worker_terms(model: VFLModel, parameters: Parameters, m: int, h: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, for slices h (c, d1) of worker m: their part of the logits W_m o (c, classes), and J_mᵀ W_mᵀ (c, d2, classes)."""
    own, upper = model.of_worker(parameters, m), model.upper(m, parameters)
    widths = [model.template(w).upper[-2].out_features for w in range(model.workers)]
    W = parameters["head.weight"].split(widths, 1)[m]  # (classes, outputs)
    u = F.linear(h, own["first.weight"], own["first.bias"])  # (c, d2)

    def part(one):
        return upper(one[None])[0] @ W.T

    return vmap(part)(u), vmap(jacrev(part))(u).transpose(1, 2)


def join(parts: list[Tensor], slopes: list[Tensor], V: list[Tensor], bias: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Which slices make up each of ``count`` rows.

    parts : a tensor (c_m, classes) a worker, and slopes : (c_m, d2, classes), both from :func:`worker_terms`;
    V : (c_m, d2), the gradients found for the slices; bias : (classes,), the head's. A candidate is used once.

    Returns, best fit first, the candidates (count, M), labels (count,) and relative residuals (count,), or None
    where there are more than MOST combinations.
    """
    total = 1
    for p in parts:
        total *= len(p)
    if total > MOST:
        return None
    choice = torch.cartesian_prod(*[torch.arange(len(p)) for p in parts]).view(total, -1).to(bias.device)
    logits = bias + sum(p[i] for p, i in zip(parts, choice.T))
    classes = torch.eye(logits.shape[1], dtype=torch.float64, device=bias.device)
    e = logits.softmax(1)[:, None] - classes  # (combinations, label, classes)
    misfit, size = 0, 0
    for slope, v, i in zip(slopes, V, choice.T):
        quadratic, linear, constant = slope.transpose(1, 2) @ slope, torch.einsum("cdk,cd->ck", slope, v), v.square().sum(1)
        misfit = misfit + ((e @ quadratic[i]) * e).sum(2) - 2 * (e @ linear[i][:, :, None])[..., 0] + constant[i][:, None]
        size = size + constant[i][:, None]
    residual = misfit.clamp_min(0) / size.clamp_min(1e-300)  # (combinations, label)
    found, labels, left = [], [], []
    for _ in range(count):
        best = int(residual.argmin())
        row, label = divmod(best, residual.shape[1])
        found.append(choice[row])
        labels.append(label)
        left.append(residual[row, label])
        residual = residual.masked_fill((choice == choice[row]).any(1)[:, None], torch.inf)
    return torch.stack(found), torch.tensor(labels), torch.stack(left)
