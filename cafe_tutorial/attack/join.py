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

from ..model import Parameters, VFLModel, full_precision

JOINED = 1e-6  # squared relative misfit, over all workers, up to which a combination of slices explains the gradients
EACH = 1e-4  # the same for each worker alone
MOST = 10_000_000  # combinations to try
CHUNK = 1 << 15  # of them at a time
CLEAR = 100  # another combination with one of the same slices must fit this many times worse


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


def blank_representation(model: VFLModel, parameters: Parameters, m: int) -> Tensor:
    """h of worker m for a blank image, (1, d1), float64."""
    bias = parameters["head.bias"]
    with full_precision():
        return model.representation(m, parameters)(bias.new_zeros(1, *model.part_shapes[m])).double()


def silent_terms(model: VFLModel, parameters: Parameters, above: Parameters, m: int) -> Tensor:
    """What a slice of worker m without a gradient may add to the logits, (3, classes): a blank one's part, that of one whose
    first layer is off behind its ReLU, and nothing.

    parameters : Θ; above : its part from the first layer on, in float64
    """
    h = blank_representation(model, parameters, m)
    part = worker_terms(model, above, m, h)[0]
    off = model.upper(m, above)(h.new_full((1, model.d2[m]), -1e6)) @ _columns(model, above, m).T
    return torch.cat([part, off, torch.zeros_like(part)])


def coefficients(C: Tensor, core: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """V of the slices of one batch, and their slopes, as far as the gradient determines them.

    C : (f, k), coordinates of their h̃ in the span's basis; core : (k, d2), with K G̃ = basis @ core; slopes : (n, d2, classes).
    While k - f directions of the span belong to no slice that is known, V is known only up to multiples of those
    directions' rows of the gradient, and these are projected out of V and the slopes.
    """
    V = torch.linalg.lstsq(C.T, core).solution
    if len(C) < C.shape[1]:
        rest = torch.linalg.svd(C, full_matrices=True)[2][len(C) :]  # (k - f, k), orthogonal to all that are known
        Q = torch.linalg.qr((rest @ core).T)[0]  # (d2, k - f)
        V, slopes = V - (V @ Q) @ Q.T, slopes - Q @ (Q.T @ slopes)
    return V, slopes


def join(
    parts: Sequence[Tensor], slopes: Sequence[Tensor], V: Sequence[Tensor], bias: Tensor, count: int, *, shared: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Which slices make up each of ``count`` rows.

    parts : a tensor (c_m, classes) a worker, and slopes : (c_m, d2, classes), both from :func:`worker_terms`;
    V : (c_m, d2), the gradients found for the slices; bias : (classes,), the head's. A candidate is used once, but for
    the last ``shared[m]`` of worker m, which any number of rows may use.

    Returns, best fit first, the candidates (r, M), labels (r,) and relative residuals (r,), r at most ``count``: one for
    each row where no more than CHUNK combinations are possible, else those that fit. The residual is infinite where a
    worker does not fit for itself, or where slices fit another combination nearly as well. None where there are more
    than MOST combinations, or a worker has no candidate.
    """
    lengths = [len(p) for p in parts]
    total = math.prod(lengths)
    if not 0 < total <= MOST:
        return None
    device = bias.device
    quadratic = [s.transpose(1, 2) @ s for s in slopes]  # (c, classes, classes)
    linear = [torch.einsum("cdk,cd->ck", s, v) for s, v in zip(slopes, V)]
    constant = [v.square().sum(1) for v in V]
    kept = []
    for first in range(0, total, CHUNK):
        numbers = torch.arange(first, min(first + CHUNK, total), device=device)
        choice = torch.stack(torch.unravel_index(numbers, lengths), 1)
        p = (bias + sum(part[i] for part, i in zip(parts, choice.T))).softmax(1)
        misfits = torch.stack([_misfit(p, Q[i], L[i], size[i]) for Q, L, size, i in zip(quadratic, linear, constant, choice.T)])
        sizes = torch.stack([size[i] for size, i in zip(constant, choice.T)])  # (M, combinations)
        worst = (misfits / sizes.clamp_min(1e-300)[:, :, None]).max(0).values
        best, label = (misfits.sum(0) / sizes.sum(0).clamp_min(1e-300)[:, None]).min(1)
        best = torch.where((sizes.sum(0) > 0) & (worst.gather(1, label[:, None])[:, 0] < EACH), best, torch.inf)
        keep = best < JOINED if total > CHUNK else torch.ones_like(best, dtype=torch.bool)
        kept.append((choice[keep], label[keep], best[keep]))
    private = torch.tensor([n - s for n, s in zip(lengths, shared or [0] * len(lengths))], device=device)
    choice, labels, residual = map(torch.cat, zip(*kept))
    return greedy(choice, labels, residual, torch.where(choice < private, choice, -1), count)


def greedy(choice: Tensor, labels: Tensor, residual: Tensor, own: Tensor, count: int, *, holes: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The best combination, and so on without its candidates, (r, M), (r,), (r,); see :func:`join`.

    own : (n, M), the candidates that only one row may use, -1 for others; holes : whether -1 means a slice that was not
    looked for, so that combinations with more slices come first and a hole contradicts nothing
    """
    order = residual.argsort(stable=True)
    if holes:
        order = order[(own[order] < 0).sum(1).argsort(stable=True)]
    choice, labels, residual, own = choice[order], labels[order], residual[order], own[order]
    open_, taken, left = torch.ones_like(labels, dtype=torch.bool), [], []
    while len(taken) < count and bool(open_.any()):
        best = int(open_.nonzero()[0])
        common = ((own == own[best]) & (own[best] >= 0)).any(1)
        differs = (own != own[best]) & ~(((own < 0) | (own[best] < 0)) & holes)
        rivals = common & differs.any(1) & (residual < JOINED) & (residual < CLEAR * residual[best].clamp_min(1e-14))
        taken.append(best)
        left.append(torch.inf if bool(rivals.any()) else float(residual[best]))
        open_ &= ~common
        open_[best] = False
    chosen = torch.tensor(taken, dtype=torch.int64, device=choice.device)
    return choice[chosen], labels[chosen].cpu(), torch.tensor(left, dtype=residual.dtype, device=residual.device)


def _misfit(p: Tensor, Q: Tensor, L: Tensor, size: Tensor) -> Tensor:
    """‖S e - v‖² of one worker for e = p - y and every label y, (n, classes): p and L = Sᵀ v (n, classes), Q = Sᵀ S, size = ‖v‖²."""
    Qp = (Q @ p[:, :, None])[:, :, 0]
    own = (((Qp - 2 * L) * p).sum(1) + size)[:, None] - 2 * Qp + torch.diagonal(Q, dim1=1, dim2=2) + 2 * L
    return own.clamp_min(0)
