"""Candidates for the slices of one worker, by the groups of rows that share their rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .spans import apart

EQUAL = 1e-3  # representations that are closer, relative to their norm, count as equal


@dataclass
class Pool:
    """The first N places are the rows', of which each group's hold the candidates chosen for it; more candidates stand behind.

    H : (n, d1); error : (n,), expected, relative to the norm of h, infinite where nothing is known; member : (n, rounds), bool,
    the rounds of each place; silent : (n,), places for which no direction is left; x, residual, certified : the slices, as
    they are recovered; groups : places of each group, its rows' first, and how many directions its spans share
    """

    H: Tensor
    error: Tensor
    member: Tensor
    silent: Tensor
    x: Tensor | None = None
    residual: Tensor | None = None
    certified: Tensor | None = None
    groups: list[tuple[list[int], list[int], int]] = field(default_factory=list)

    @classmethod
    def empty(cls, H: Tensor, member: Tensor) -> Pool:
        """Without candidates; H : (N, d1), zeros; member : (N, rounds)"""
        return cls(H, torch.full_like(H[:, 0], math.inf), member, torch.zeros_like(H[:, 0], dtype=torch.bool))

    def add(self, rows: list[int], directions: int, H: Tensor | None = None, error: Tensor | None = None) -> None:
        """A group's candidates, (c, d1), and their errors (c,)."""
        count = 0 if H is None else len(H)
        extra = list(range(len(self.error), len(self.error) + max(0, count - len(rows))))
        self.groups.append((rows, extra, directions))
        self._lengthen(len(extra), self.member[rows[:1]])
        if count:
            places = (rows + extra)[:count]
            self.H[places], self.error[places] = H, error

    def extended(self, length: int) -> Pool:
        """The same with empty places up to this length."""
        self._lengthen(length - len(self.error), torch.zeros_like(self.member[:1]))
        return self

    def _lengthen(self, more: int, member: Tensor) -> None:
        self.H, self.error = F.pad(self.H, (0, 0, 0, more)), F.pad(self.error, (0, more), value=math.inf)
        self.silent = F.pad(self.silent, (0, more))
        self.member = torch.cat([self.member, member.expand(more, -1)])

    def places_with(self, places: list[int]) -> list[int]:
        """All places of the groups that these belong to."""
        wanted = set(places)
        return [p for own, extra, _ in self.groups if wanted & {*own, *extra} for p in own + extra]

    def select(self, rows: int) -> None:
        """Choose for each group as many independent candidates as it has rows: those that are certified and fit best.

        One that equals a candidate of another group in the same round comes last: there, spans also meet.
        """
        fit = torch.where(self.error.isfinite(), self.residual.nan_to_num(math.inf).to(self.error), math.inf)
        fit = torch.where(self.certified.to(fit.device), fit - 1, fit)
        for own, extra, directions in self.groups:
            places = own + extra
            rank = fit[places].clone()
            if extra:
                others = (self.member[:rows] & self.member[own[0]]).any(1).to(fit.device) & self.error[:rows].isfinite()
                others[own] = False
                near = torch.cdist(self.H[places], self.H[:rows][others]) / self.H[places].norm(dim=1, keepdim=True).clamp_min(1e-300)
                rank += 2.0 * (near < EQUAL).any(1)
            chosen = _independent(self.H[places], rank, len(own))
            order = [places[i] for i in chosen + [i for i in range(len(places)) if i not in chosen]]
            self.permute(places, order)
            self.error[own[len(chosen) :]] = math.inf
            self.silent[own] = torch.arange(len(own), device=fit.device) >= max(len(chosen), directions)

    def permute(self, places: list[int], order: list[int]) -> None:
        """Put what stands at ``order`` to ``places``, without the rounds and the silence of the places."""
        for values in (self.H, self.error, self.x, self.residual, self.certified):
            values[places] = values[order]

    def truncate(self, rows: int) -> None:
        """Forget the candidates that were not chosen."""
        for name in ("H", "error", "member", "silent", "x", "residual", "certified"):
            setattr(self, name, getattr(self, name)[:rows])


def _independent(H: Tensor, rank: Tensor, count: int) -> list[int]:
    """The first candidates by rank, infinite ones left out, that are no combinations of those before, at most ``count``."""
    chosen: list[int] = []
    unit = F.normalize(H, dim=1)
    for i in rank.argsort(stable=True).tolist():
        if len(chosen) == count or rank[i] == math.inf:
            break
        if apart(unit[i], unit[chosen]) > EQUAL:
            chosen.append(i)
    return chosen
