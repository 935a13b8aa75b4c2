"""Recovery from a handful of epochs: rows as intersections of spans.

A row that was in batches t_1 … t_r has its h̃_n in the column space of each of their gradients (see
``attack.spans``). Where it shares all these batches with no other row, the spans meet in h̃_n alone, and
dividing by its last entry gives h_n. Rows that share all their batches are found together, as the rays of a
cone (``attack.cones``), and their slices joined by ``attack.join``, which also reads the labels. v_n drops out,
so the layers above the first may train meanwhile; the layers below must stand still.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import at_least_one
from ..model import Parameters, VFLModel
from ..protocol import RoundView
from .group_join import join_groups
from .invert import ATTEMPTS, Attempt
from .leak import Leak
from .meeting import meeting
from .pool import EQUAL, Pool
from .search import FLOOR, NEAR, Outside
from .slices import PIXEL_ERROR, recover_slices
from .spans import Span, balance, span

FINE = 3e-7  # representations that are known better, relative to their norm, are good enough for the join
NO_IMAGE = 1e-2  # residual of a slice above which its representation is none, and forgotten
LAST = 1e-3  # a ray whose last entry is below this share of its largest is no h̃


class FewRoundsCAFE:
    """The attack from a few epochs of rounds.

    Parameters
    ----------
    model : the public model
    rows : N
    attempts, seed, progress : as for :class:`~cafe_tutorial.attack.ExactCAFE`

    Rows that share every batch they were in have no numbers of their own in what the server sees: they are
    recovered up to an exchange among them, and ``Leak.exchangeable`` says which.
    """

    method = "few-rounds"

    def __init__(self, model: VFLModel, *, rows: int, attempts: tuple[Attempt, ...] = ATTEMPTS, seed: int = 0, progress: bool = False):
        self.model, self.rows, self.attempts, self.seed, self.progress = model, at_least_one("rows", rows), attempts, seed, progress
        self.spans: list[list[Span]] = [[] for _ in range(model.workers)]
        self.observed = 0
        self._scale: list[float] = []
        self._first: Parameters | None = None
        self._above: list[Parameters] = []  # each round's weights of the first layers and above
        self._moved = False

    def observe(self, view: RoundView) -> None:
        """Use one round: its indices and the gradients of the first layers."""
        view.check_rows(self.rows)
        below = {k for k in view.parameters if ".representation." in k}
        self._first = self._first or dict(view.parameters)
        self._moved = self._moved or any(not torch.equal(view.parameters[k], self._first[k]) for k in below)
        for m in range(self.model.workers):
            own = self.model.of_worker(view.gradients, m)
            weight, bias = own["first.weight"], own["first.bias"]
            if len(self._scale) == m:
                self._scale.append(balance(weight, bias))
            self.spans[m].append(span(view.indices, weight, bias, scale=self._scale[m]))
        self._above.append({k: v for k, v in view.parameters.items() if k not in below})
        self.observed += 1

    def memberships(self) -> dict[tuple[int, ...], list[int]]:
        """Rows by the rounds they were in; rows that share all of them are listed together."""
        rounds: list[list[int]] = [[] for _ in range(self.rows)]
        for t, s in enumerate(self.spans[0]):
            for n in s.rows.tolist():
                rounds[n].append(t)
        groups: dict[tuple[int, ...], list[int]] = {}
        for n, own in enumerate(rounds):
            groups.setdefault(tuple(own), []).append(n)
        return groups

    def solve(self) -> Leak:
        """Intersect, invert, join; a label that these rounds do not determine is -1."""
        if not self.observed:
            raise ValueError("nothing was observed; call observe(view) for at least two epochs of rounds")
        groups, member = self.memberships(), self._member()
        pools = [self._pool(m, groups, member) for m in range(self.model.workers)]
        most = max(len(pool.error) for pool in pools)
        pools = [pool.extended(most) for pool in pools]
        slices, residual, certified = recover_slices(
            self.model, self._first, [p.H for p in pools], [p.error for p in pools], torch.stack([p.error.isfinite() for p in pools], 1),
            trusted=not self._moved, attempts=self.attempts, seed=self.seed, progress=self.progress,
        )  # fmt: skip
        complete, silent, settled = [], [], []
        for m, pool in enumerate(pools):
            pool.x, pool.residual, pool.certified = slices[m], residual[:, m], certified[:, m]
            self._polish(m, pool)
            pool.error[pool.residual > NO_IMAGE] = math.inf
            for _ in range(2):  # which of its candidates belong to a group shows better once the other groups have chosen
                pool.select(self.rows)
            complete.append(self._complete(m, pool.H, pool.error))
            # a direction may be that of a row that is neither found nor silent
            accounted = (pool.error.isfinite() | pool.silent)[: self.rows].cpu()
            settled.append(torch.stack([c & accounted[own.rows].all() for c, own in zip(complete[m], self.spans[m])]))
            silent.append(pool.silent[: self.rows] & (~member | complete[m]).all(1).to(pool.silent.device) & (not self._moved))
            pool.truncate(self.rows)
        labels, joined = torch.full((self.rows,), -1), torch.zeros(self.rows, dtype=torch.bool)
        if not self.model.double_softmax:
            complete_for = torch.stack(complete).sum(0)
            labels, joined = join_groups(self.model, self._first, self._above, self.spans, groups, pools, silent, complete_for)
        slices, residual, certified = [p.x for p in pools], torch.stack([p.residual for p in pools], 1), torch.stack([p.certified for p in pools], 1)
        known, silent = torch.stack([p.error.isfinite() for p in pools], 1), torch.stack(silent, 1)
        exchangeable = torch.zeros(self.rows, dtype=torch.int64)
        for number, rows in enumerate(groups.values()):
            exchangeable[rows] = number
        together = exchangeable.bincount()[exchangeable] > 1
        single = torch.stack([_unlike_others(p.H, p.error) for p in pools], 1)
        owned = torch.stack([(member & rounds).any(1) for rounds in settled], 1)
        certified = certified & torch.where(together[:, None], joined[:, None], owned).to(certified.device) & single
        open_spans = int((~known & ~silent).sum())
        notes = [f"{int(together.sum())} of {self.rows} rows share all their batches with another row and are known up to an exchange"] * bool(together.any())
        notes += [f"{open_spans} slices lie in spans that meet in more directions than could be told apart"] * bool(open_spans)
        notes += [f"{int((labels < 0).sum())} labels are not determined by these rounds"] * bool((labels < 0).any())
        notes += ["the loss applies a second softmax, so slices are not joined, no label is read and nothing is certified"] * self.model.double_softmax
        notes += ["the layers below the first moved between the rounds, so the spans need not meet and nothing is certified"] * self._moved
        return Leak(
            self.method, slices, labels.to(slices[0].device), ~silent, residual, certified, self.observed, notes, exchangeable=exchangeable
        )

    def _pool(self, m: int, groups: dict, member: Tensor) -> Pool:
        """Worker m's candidates; within a group they come in no particular order."""
        pool = Pool.empty(self.spans[m][0].basis.new_zeros(self.rows, self.model.d1[m]), member)
        for rounds, rows in groups.items():
            own = [self.spans[m][t] for t in rounds]
            if len(own) < 2 or int(member[:, list(rounds)].all(1).sum()) > len(rows):
                continue  # a row that was in all these rounds and in others too would be in the intersection
            if min(len(s.values) for s in own) == 0:
                pool.add(rows, 0)
                continue
            met = meeting(own, len(rows), rays=not self.model.holds_records(m), seed=self.seed)
            if met is not None:
                usable = met.rays[:, -1].abs() > LAST * met.rays.abs().amax(1)
                rays, last = met.rays[usable], met.rays[usable, -1].abs()
                rays = rays * rays[:, -1:].sign()
                H = rays[:, :-1] / last[:, None] * own[0].scale
                pool.add(rows, met.directions, H, met.error[usable] / torch.minimum(rays[:, :-1].norm(dim=1), last))
        return pool

    def _polish(self, m: int, pool: Pool) -> None:
        """Fit slices of worker m to the spans themselves where h_n is not known well, and certify by these; in place.

        With the slice, h_n is known better too, which the join needs.
        """
        if self._moved or self.model.holds_records(m) or pool.H.shape[1] < math.prod(self.model.part_shapes[m]):
            return
        x, certified = pool.x, pool.certified
        open_rows = (pool.error.isfinite() & (pool.residual < NEAR) & (~certified | (pool.error > FINE))).nonzero()[:, 0]
        times = pool.member.sum(1).to(open_rows.device)
        for r in times[open_rows].unique().tolist():
            for rows in open_rows[times[open_rows] == r].split(16):
                own = [[self.spans[m][t] for t in pool.member[n].nonzero()[:, 0].tolist()] for n in rows.tolist()]
                widest = max(len(s.values) for spans in own for s in spans)
                bases = [torch.stack([F.pad(spans[i].basis, (0, widest - len(spans[i].values))) for spans in own]).to(x) for i in range(r)]
                outside = Outside(self.model.representation(m, self._first), bases, own[0][0].scale)
                found, rho = outside.polish(x[rows], _blur(own, outside.extended(x[rows]).double()).to(x))
                extended = outside.extended(found).double()
                blur = _blur(own, extended).to(x)
                moved = (found - x[rows]).flatten(1).square().mean(1).sqrt()
                good = certified[rows] & (rho < FLOOR) & (moved < PIXEL_ERROR)
                new = (~certified[rows]).nonzero()[:, 0]
                company = x[pool.places_with(rows.tolist())]
                good[new] = outside.at(new).vouched(found[new], rho[new], blur[new], company) if len(new) else good[new]
                x[rows[good]], pool.residual[rows[good]], certified[rows[good]] = found[good], rho[good], True
                pool.H[rows[good]] = extended[good, :-1]
                pool.error[rows[good]] = 5 * (rho + blur.square()).sqrt()[good].double()

    def _member(self) -> Tensor:
        """Which row was in which round, (N, rounds), bool."""
        member = torch.zeros(self.rows, self.observed, dtype=torch.bool)
        for t, s in enumerate(self.spans[0]):
            member[s.rows, t] = True
        return member

    def _complete(self, m: int, H: Tensor, error: Tensor) -> Tensor:
        """In which rounds the known rows of worker m account for every direction of the span, (rounds,): as many, and independent."""
        complete = torch.zeros(self.observed, dtype=torch.bool)
        for t, own in enumerate(self.spans[m]):
            h = H[own.rows[error[own.rows].isfinite().cpu()]]
            if len(h) == len(own.values):
                extended = torch.cat([h, torch.full_like(h[:, :1], own.scale)], 1)
                inside = extended @ own.basis / extended.norm(dim=1, keepdim=True)
                complete[t] = not len(h) or bool(torch.linalg.svdvals(inside)[-1] > 1e-5)
        return complete


def _unlike_others(H: Tensor, error: Tensor) -> Tensor:
    """Rows whose representation no other row has, (N,): where rows agree, spans also meet for rows that only share their company."""
    known = error.isfinite()
    size = H.norm(dim=1).clamp_min(1e-300)
    apart = torch.cdist(H, H) / size[:, None] + torch.diag(torch.full_like(size, torch.inf))
    return (apart + torch.where(known, 0.0, torch.inf)).min(1).values > EQUAL


def _blur(spans: list[list[Span]], extended: Tensor) -> Tensor:
    """The expected distance of each h̃ (n, d1 + 1) from its own spans, relative, root mean square over them, (n,)."""
    unit = F.normalize(extended, dim=1)
    return torch.stack([torch.stack([s.blur(u) for s in own]).square().mean().sqrt() for own, u in zip(spans, unit)])
