"""Rows put together worker by worker: for many workers, and where a slice is missing.

A slice with gradient v gives the linear equations v = S e for its row's e = p - y, S = J_mᵀ W_mᵀ, and the entries of e
sum to zero. Slices of one row agree on e. Two or three of them determine it, and then each other worker's slices
are tested one by one, so that the number of combinations no longer grows like a power of the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .join import CHUNK, CLEAR, greedy

BEAM = 1 << 16  # combinations to go on with, the best
TOLERANCES = (1e-10, 1e-8)  # of a slice's squared misfit, relative to its v; what fits well is settled first
SURPLUS = 5  # equations more than unknowns from which a combination counts
SMALL = 1e-5  # a singular value of S below this share of the largest gives no equation
CONFIRMED = 1e-3  # relative difference between e and p - y up to which the logits of a row explain its gradients
REFUTED = 0.1  # and above which they do not
RIDGE = 1e-12  # added to the normal matrix, relative to its largest entry, so that it can be solved from the start


def grow(slopes: Sequence[Tensor], V: Sequence[Tensor], absent: Sequence[bool], count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which slices make up each of at most ``count`` rows, by least squares for e.

    slopes : a tensor (c_m, d2, classes) a worker, and V : (c_m, d2), as for :func:`~cafe_tutorial.attack.join.join`;
    absent : whether a row may be without a slice of that worker, because it is silent or was not found.

    Returns candidates (r, M), -1 for none, labels (r,), relative residuals (r,), infinite where slices fit another
    combination nearly as well, and e (r, classes).
    """
    classes, device = slopes[0].shape[2], slopes[0].device
    B = torch.linalg.svd(slopes[0].new_ones(1, classes))[2][1:].T  # (classes, classes - 1): e = B z sums to zero
    terms = [Equations.of(s, v, B) for s, v in zip(slopes, V)]
    rows = []
    for tolerance in TOLERANCES:
        left = [torch.ones(len(v), dtype=torch.bool, device=device) for v in V]
        for choice, *_ in rows:
            for m, own in enumerate(choice.T):
                left[m][own[own >= 0]] = False
        choice = _combinations(terms, [m.nonzero()[:, 0] for m in left], absent, tolerance)
        misfit, z, number = _solved(terms, choice)
        e = z @ B.T
        one_label = ((e < -1e-3 * e.abs().max(1, keepdim=True).values).sum(1) == 1) & (e.min(1).values > -1)
        good = (number >= classes - 1 + SURPLUS) & one_label
        rows.append(greedy(choice[good], e[good].argmin(1), misfit[good], choice[good], count - sum(len(r[0]) for r in rows), holes=True))
    choice, labels, residual = map(torch.cat, zip(*rows))
    return choice, labels, residual, _solved(terms, choice)[1] @ B.T


def explained(
    choice: Tensor, labels: Tensor, e: Tensor, parts: Sequence[Tensor], blanks: Sequence[Tensor], bias: Tensor, single: Sequence[bool]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Which rows of :func:`grow` are confirmed as one row's, and which are refuted, (r,) each.

    Rows whose v are dependent share a direction of the span: a mixture of their h̃, which comes with a mixture of their e. So e
    must be the p - y that the slices' own logits give. Where slices are missing, one of a worker whose span has a direction
    for every row of the batch will do, for its e is no mixture.

    parts : (c_m, classes) a worker, of the logits; blanks : (b, classes) a worker, what a silent slice may add; bias : (classes,);
    single : whether a worker's span has as many directions as the batch has rows
    """
    target = e + F.one_hot(labels, e.shape[1]).to(e)  # p, if e is one row's
    off = torch.full_like(e[:, 0], torch.inf)
    for kind in range(len(blanks[0])):
        choices = [torch.cat([part, blank[kind : kind + 1]])[own] for part, blank, own in zip(parts, blanks, choice.T)]
        off = torch.minimum(off, ((bias + sum(choices)).softmax(1) - target).norm(dim=1) / e.norm(dim=1).clamp_min(1e-300))
    there = choice >= 0
    alone = (there & torch.tensor(single, device=there.device)).any(1)
    refuted = there.all(1) & (off > REFUTED)
    return ((off < CONFIRMED) | alone) & ~refuted, refuted


def _combinations(terms: list[Equations], left: list[Tensor], absent: Sequence[bool], tolerance: float) -> Tensor:
    """Combinations (n, M) of the slices left whose equations have a solution; where e is determined, only clear choices."""
    M, unknowns = len(terms), terms[0].right.shape[1]
    choice = torch.full((1, M), -1, device=terms[0].right.device)
    for m in sorted(range(M), key=lambda m: (absent[m], -terms[m].typical)):
        kept = []
        for parents in choice.split(max(1, CHUNK // (len(left[m]) + 1))):
            before, _, number = _solved(terms, parents)
            children = parents[:, None].repeat(1, len(left[m]), 1)
            children[:, :, m] = left[m]
            added = _solved(terms, children.flatten(0, 1))[0].view(children.shape[:2]) - before[:, None]
            fits, determined = added < tolerance, number >= unknowns
            nearest = F.pad(added, (0, 2), value=1.0).sort(1).values[:, :2].clamp_min(1e-12)
            clear = nearest[:, 1] > CLEAR * nearest[:, 0]
            fits &= ~determined[:, None] | (clear[:, None] & (added <= nearest[:, :1]))
            without = parents[~(determined & fits.any(1))] if absent[m] else parents[:0]
            kept = [_best(terms, torch.cat([*kept, children[fits], without]))]
        choice = kept[0]
    return choice


def _best(terms: list[Equations], choice: Tensor) -> Tensor:
    """No more than BEAM of the combinations, those with the most equations, and of these the best fits."""
    if len(choice) <= BEAM:
        return choice
    misfit, number = (torch.cat(x) for x in zip(*(_solved(terms, part)[::2] for part in choice.split(CHUNK))))
    return choice[(misfit - number).argsort()[:BEAM]]


@dataclass(frozen=True)
class Equations:
    """The equations for z of each of a worker's c slices, and last of none: A z = v / ‖v‖ with A = S B / ‖v‖.

    normal : Aᵀ A, (c + 1, q, q); right : Aᵀ v / ‖v‖, (c + 1, q); size : (c + 1,), 1, but 0 for none; number : of equations, (c + 1,)
    """

    normal: Tensor
    right: Tensor
    size: Tensor
    number: Tensor

    @classmethod
    def of(cls, S: Tensor, v: Tensor, B: Tensor) -> Equations:
        """S : (c, d2, classes); v : (c, d2); B : (classes, q)"""
        length = v.norm(dim=1).clamp_min(1e-300)
        A = F.pad(S @ B / length[:, None, None], (0, 0, 0, 0, 0, 1))
        unit = F.pad(v / length[:, None], (0, 0, 0, 1))
        values = torch.linalg.svdvals(A)
        number = (values > SMALL * values[:, :1].clamp_min(1e-300)).sum(1)
        return cls(A.mT @ A, torch.einsum("cdq,cd->cq", A, unit), unit.square().sum(1), number)

    @property
    def typical(self) -> float:
        """How many equations a slice gives on average."""
        return float(self.number[:-1].double().mean()) if len(self.number) > 1 else 0.0


def _solved(terms: Sequence[Equations], choice: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For combinations (n, M): the sum of the slices' relative squared misfits (n,), z (n, q) and the number of equations (n,)."""
    normal, right, size, number = (
        sum(getattr(t, name)[own] for t, own in zip(terms, choice.T)) for name in ("normal", "right", "size", "number")
    )
    eye = torch.eye(normal.shape[1], dtype=normal.dtype, device=normal.device)
    ridge = RIDGE * normal.diagonal(dim1=1, dim2=2).amax(1).clamp_min(1e-300)
    z = torch.cholesky_solve(right[:, :, None], torch.linalg.cholesky(normal + ridge[:, None, None] * eye))[:, :, 0]
    return (size - (right * z).sum(1)).clamp_min(0), z, number
