"""Joining slices of different workers into rows, and reading the labels, from the gradients alone.

The head is additive: the logits of a row are Σ_m W_m o_m + b over its workers' outputs. So a guess which slices
belong together gives the probabilities p, a label y gives e = p - y, and then every worker's v = J_mᵀ W_mᵀ e, with
J_m the Jacobian of its upper layers, must be the one found in the gradients. The combination that fits is the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jacrev, vmap

from ..model import Parameters, VFLModel

JOINED = 1e-6  # squared relative misfit up to which a combination of slices explains the gradients
MOST = 10_000_000  # combinations to try
CHUNK = 1 << 15  # of them at a time


def worker_terms(model: VFLModel, parameters: Parameters, m: int, h: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, for slices h (c, d1) of worker m: their part of the logits W_m o (c, classes), and J_mᵀ W_mᵀ (c, d2, classes)."""
    own, upper = model.of_worker(parameters, m), model.upper(m, parameters)
    W = _columns(model, parameters, m)
    u = F.linear(h, own["first.weight"], own["first.bias"])  # (c, d2)

    def part(one):
        return upper(one[None])[0] @ W.T

    return vmap(part)(u), vmap(jacrev(part))(u).transpose(1, 2)


def _columns(model: VFLModel, parameters: Parameters, m: int) -> Tensor:
    """The head's weights of worker m's outputs, (classes, outputs)."""
    widths = [model.template(w).upper[-2].out_features for w in range(model.workers)]
    return parameters["head.weight"].split(widths, 1)[m]


def silent_terms(model: VFLModel, parameters: Parameters, above: Parameters, m: int) -> Tensor:
    """What a slice of worker m without a gradient may add to the logits, (3, classes): a blank one's part, that of one whose
    first layer is off behind its ReLU, and nothing.

    parameters : Θ; above : its part from the first layer on, in float64
    """
    blank = torch.zeros(1, *model.part_shapes[m], dtype=parameters["head.bias"].dtype, device=parameters["head.bias"].device)
    h = model.representation(m, parameters)(blank).double()
    part = worker_terms(model, above, m, h)[0]
    off = model.upper(m, above)(h.new_full((1, model.d2[m]), -1e6)) @ _columns(model, above, m).T
    return torch.cat([part, off, torch.zeros_like(part)])


def join(
    parts: Sequence[Tensor], slopes: Sequence[Tensor], V: Sequence[Tensor], bias: Tensor, count: int, *, shared: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Which slices make up each of ``count`` rows.

    parts : a tensor (c_m, classes) a worker, and slopes : (c_m, d2, classes), both from :func:`worker_terms`;
    V : (c_m, d2), the gradients found for the slices; bias : (classes,), the head's. A candidate is used once, but for
    the last ``shared[m]`` of worker m, which any number of rows may use.

    Returns, best fit first, the candidates (count, M), labels (count,) and relative residuals (count,), infinite where
    no candidates are left, or None where there are more than MOST combinations or a worker has no candidate.
    """
    lengths = [len(p) for p in parts]
    total = math.prod(lengths)
    if not 0 < total <= MOST:
        return None
    quadratic = [s.transpose(1, 2) @ s for s in slopes]  # (c, classes, classes)
    linear = [torch.einsum("cdk,cd->ck", s, v) for s, v in zip(slopes, V)]
    constant = [v.square().sum(1) for v in V]
    residual = torch.empty(total, dtype=torch.float64, device=bias.device)
    labels = torch.empty(total, dtype=torch.int64, device=bias.device)
    for numbers in torch.arange(total, device=bias.device).split(CHUNK):
        choice = torch.stack(torch.unravel_index(numbers, lengths), 1)
        p = (bias + _sum(parts, choice)).softmax(1)  # e = p - y
        Q, L, size = _sum(quadratic, choice), _sum(linear, choice), _sum(constant, choice)
        Qp = (Q @ p[:, :, None])[:, :, 0]
        own = ((Qp - 2 * L) * p).sum(1) + size
        misfit = own[:, None] - 2 * Qp + torch.diagonal(Q, dim1=1, dim2=2) + 2 * L  # (combinations, label)
        best, labels[numbers] = misfit.min(1)
        residual[numbers] = torch.where(size > 0, best.clamp_min(0) / size.clamp_min(1e-300), torch.inf)
    found, left = [], []
    private = torch.tensor([n - s for n, s in zip(lengths, shared or [0] * len(lengths))], device=bias.device)
    for _ in range(count):
        best = residual.argmin()
        row = torch.stack(torch.unravel_index(best, lengths))
        found.append(row)
        left.append((labels[best].clone(), residual[best].clone()))
        view = residual.view(lengths)
        for m in (row < private).nonzero()[:, 0].tolist():
            view.select(m, int(row[m])).fill_(torch.inf)
        residual[best] = torch.inf
    return torch.stack(found), torch.stack([label for label, _ in left]).cpu(), torch.stack([r for _, r in left])


def _sum(values: Sequence[Tensor], choice: Tensor) -> Tensor:
    """The workers' values (c_m, …) of each combination (n, M), added up."""
    return sum(v[i] for v, i in zip(values, choice.T))
