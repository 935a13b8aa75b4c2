"""Rows from the slices of one round, in no particular order: the join of the attack from single rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ..model import Parameters, VFLModel
from .grow import explained, grow
from .join import JOINED, coefficients, join, silent_terms, worker_terms

if TYPE_CHECKING:
    from .one_round import Found

EQUATIONS = 3  # numbers that must fit for slices to be joined
EXACT = 1e-11  # ρ of a slice whose h̃ is good enough for the V of the others
LOOSE = 0.1  # relative squared misfit up to which a slice left over may belong to a row that lacks one


class Row(NamedTuple):
    """slots : the slice of each worker, None for one that is silent or was not found; label : -1 where the gradients confirm no
    combination; sure : of each slice, whether they show that it is this row's, and no mixture's; e : (classes,), p - y"""

    slots: list[int | None]
    label: int
    sure: list[bool]
    e: Tensor | None = None


def join_round(model: VFLModel, parameters: Parameters, found: list[Found], size: int) -> list[Row]:
    """The rows of a batch of ``size``: first those that the gradients confirm, then the slices left over, in no particular order.

    found : what each worker's gradient gave, by :func:`~cafe_tutorial.attack.one_round.find_rows`
    """
    round_join = _RoundJoin(model, parameters, found, size)
    combined = round_join.combine()
    round_join.grow()
    if not combined:
        round_join.combine()
    round_join.fill()
    more = range(size - len(round_join.rows))
    return round_join.rows + [Row([rest[i] if i < len(rest) else None for rest in round_join.left], -1, [False] * len(found)) for i in more]


class _RoundJoin:
    """rows : those joined; left : of each worker, the slices that are in none of them; silent : how many of its rows without a direction"""

    def __init__(self, model: VFLModel, parameters: Parameters, found: list[Found], size: int):
        above = {k: v.double() for k, v in parameters.items() if ".representation." not in k}
        self.size, self.found, self.bias = size, found, above["head.bias"]
        self.parts, self.slopes, self.V = zip(*(_terms(model, above, m, f) for m, f in enumerate(found)))
        self.blanks = [silent_terms(model, parameters, above, m) for m in range(model.workers)]
        self.rows: list[Row] = []
        self.left = [list(range(len(f.x))) for f in found]
        self.silent = [size - len(f.span.values) for f in found]

    def combine(self) -> bool:
        """Rows among the slices left by :func:`~cafe_tutorial.attack.join.join`; whether there were few enough."""
        stand_ins = [len(b) if s > 0 else 0 for b, s in zip(self.blanks, self.silent)]
        parts, slopes, V = (
            [torch.cat([x[own], x.new_zeros(n, *x.shape[1:])]) for x, own, n in zip(values, self.left, stand_ins)]
            for values in (self.parts, self.slopes, self.V)
        )
        for part, blank, n in zip(parts, self.blanks, stand_ins):
            part[len(part) - n :] = blank[:n]
        joined = join(parts, slopes, V, self.bias, self.size - len(self.rows), shared=stand_ins)
        ranks = [torch.linalg.matrix_rank(s) if len(s) else s.new_zeros(0) for s in slopes]
        left = [list(own) for own in self.left]
        for choice, label, misfit in zip(*(j.tolist() for j in joined)) if joined else ():
            slots = [own[i] if i < len(own) else None for i, own in zip(choice, left)]
            equations = sum(int(r[i]) for r, i in zip(ranks, choice))
            if misfit < JOINED and equations >= EQUATIONS and all(i is not None or s > 0 for i, s in zip(slots, self.silent)):
                self.silent = [s - (i is None) for i, s in zip(slots, self.silent)]
                p = (self.bias + sum(part[i] for part, i in zip(parts, choice))).softmax(0)
                self._take(Row(slots, label, [True] * len(slots), p - F.one_hot(torch.tensor(label), len(p)).to(p)))
        return joined is not None

    def grow(self) -> None:
        """Rows among the slices left, with what else is known of them, by :func:`~cafe_tutorial.attack.grow.grow`."""
        parts, slopes, V = ([x[own] for x, own in zip(values, self.left)] for values in (self.parts, self.slopes, self.V))
        absent = [s > 0 or not f.complete for s, f in zip(self.silent, self.found)]
        single = [len(f.span.values) == self.size for f in self.found]
        choice, labels, misfit, e = grow(slopes, V, absent, self.size - len(self.rows))
        confirmed, refuted = explained(choice, labels, e, parts, self.blanks, self.bias, single)
        left = [list(own) for own in self.left]
        for chosen, label, miss, sure, no, own_e in zip(*(x.tolist() for x in (choice, labels, misfit, confirmed, refuted)), e):
            if miss < float("inf") and not no:
                self._take(Row([own[i] if i >= 0 else None for i, own in zip(chosen, left)], label, [sure] * len(chosen), own_e))

    def fill(self) -> None:
        """Once there are all rows, slices left over go to those that lack one of their worker, where they fit best; not surely."""
        if len(self.rows) < self.size:
            return
        for m, left in enumerate(self.left):
            rows = [r for r, row in enumerate(self.rows) if row.slots[m] is None]
            if not (left and rows):
                continue
            S, v, e = self.slopes[m][left], self.V[m][left], torch.stack([self.rows[r].e for r in rows])
            misfit = (torch.einsum("idc,rc->rid", S, e) - v).square().sum(2) / v.square().sum(1).clamp_min(1e-300)  # (rows, left)
            for r, i in zip(*linear_sum_assignment(misfit.clamp_min(1e-16).log().cpu().numpy())):
                if misfit[r, i] < LOOSE:
                    row, slots = self.rows[rows[r]], list(self.rows[rows[r]].slots)
                    slots[m], sure = left[i], [s and w != m for w, s in enumerate(row.sure)]
                    self.rows[rows[r]] = row._replace(slots=slots, sure=sure)
        self.left = [[i for i in rest if all(row.slots[m] != i for row in self.rows)] for m, rest in enumerate(self.left)]

    def _take(self, row: Row) -> None:
        self.rows.append(row)
        self.left = [[i for i in rest if i != own] for rest, own in zip(self.left, row.slots)]


def _terms(model: VFLModel, above: Parameters, m: int, found: Found) -> tuple[Tensor, Tensor, Tensor]:
    """For the slices found: their part of the logits, their slopes and their V; see ``attack.join``.

    An inexact h̃ spoils the V of all others, so those of exact ones are solved for as if the rest were not found.
    """
    own, C = found.span, found.coordinates
    h = C @ own.basis.T  # (f, d1 + 1)
    last = h[:, -1:] / own.scale
    parts, slopes = worker_terms(model, above, m, h[:, :-1] / last)
    if not len(C):
        return parts, slopes, h.new_zeros(0, model.d2[m])
    C, exact = C / last, found.residual < EXACT
    V, kept = coefficients(C, own.core, slopes)
    if bool(exact.any()) and not bool(exact.all()):
        kept = kept.clone()
        V[exact], kept[exact] = coefficients(C[exact], own.core, slopes[exact])
    return parts, kept, V
