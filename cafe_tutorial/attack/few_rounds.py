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
from .cones import extreme_rays
from .invert import ATTEMPTS, Attempt
from .join import JOINED, blank_representation, coefficients, join, worker_terms
from .leak import Leak
from .rays import rays_by_chance
from .search import FLOOR, NEAR, Outside
from .slices import PIXEL_ERROR, recover_slices
from .spans import Span, balance, common, span

EQUAL = 1e-3  # representations of one worker that are closer, relative to their norm, count as equal
FINE = 3e-7  # representations that are known better, relative to their norm, are good enough for the join
NO_IMAGE = 1e-2  # residual of a slice above which its representation is none, and forgotten
MEETS = 1e-8  # a direction whose squared distances from the spans add up to less lies in all of them


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
        """Intersect, join, invert; a label that these rounds do not determine is -1."""
        if not self.observed:
            raise ValueError("nothing was observed; call observe(view) for at least two epochs of rounds")
        groups = self.memberships()
        member = self._member()
        H, error, silent, complete = map(list, zip(*(self._representations(m, groups, member) for m in range(self.model.workers))))
        known = torch.stack([e.isfinite() for e in error], 1)
        slices, residual, certified = recover_slices(
            self.model, self._first, H, error, known, trusted=not self._moved, attempts=self.attempts, seed=self.seed, progress=self.progress
        )
        for m in range(self.model.workers):
            self._polish(m, member, H[m], error[m], slices[m], residual[:, m], certified[:, m])
            error[m][residual[:, m].to(error[m].device) > NO_IMAGE] = math.inf
            complete[m] = self._complete(m, H[m], error[m])
            silent[m] &= (~member | complete[m]).all(1).to(silent[m].device)
        labels, joined = self._join(groups, H, error, silent, torch.stack(complete).sum(0), [slices, residual.T, certified.T])
        known, silent = torch.stack([e.isfinite() for e in error], 1), torch.stack(silent, 1)
        exchangeable = torch.zeros(self.rows, dtype=torch.int64)
        for number, rows in enumerate(groups.values()):
            exchangeable[rows] = number
        together = exchangeable.bincount()[exchangeable] > 1
        single = torch.stack([_unlike_others(h, e) for h, e in zip(H, error)], 1)
        confirmed = torch.stack([(member & rounds).any(1) for rounds in complete], 1)
        certified = certified & torch.where(together[:, None], joined[:, None], confirmed).to(certified.device) & single
        open_spans = int((~known & ~silent).sum())
        notes = [f"{int(together.sum())} of {self.rows} rows share all their batches with another row and are known up to an exchange"] * bool(together.any())
        notes += [f"{open_spans} slices lie in spans that meet in more directions than could be told apart"] * bool(open_spans)
        notes += [f"{int((labels < 0).sum())} labels are not determined by these rounds"] * bool((labels < 0).any())
        notes += ["the loss applies a second softmax, so slices are not joined, no label is read and nothing is certified"] * self.model.double_softmax
        notes += ["the layers below the first moved between the rounds, so the spans need not meet and nothing is certified"] * self._moved
        return Leak(
            self.method, slices, labels.to(slices[0].device), ~silent, residual, certified, self.observed, notes, exchangeable=exchangeable
        )

    def _representations(self, m: int, groups: dict, member: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For worker m: H (N, d1), each row's expected relative error (N,), infinite where unknown, which rows are
        silent (N,), and which rounds are complete (rounds,).

        Within a group the rays come in no particular order. A row is called silent when no direction is left for
        it and every direction of all its rounds belongs to a row that is known.
        """
        device = self.spans[m][0].basis.device
        H = torch.zeros(self.rows, self.model.d1[m], dtype=torch.float64, device=device)
        error = torch.full((self.rows,), math.inf, dtype=torch.float64, device=device)
        silent = torch.zeros(self.rows, dtype=torch.bool, device=device)
        for rounds, rows in groups.items():
            own = [self.spans[m][t] for t in rounds]
            if len(own) < 2 or int(member[:, list(rounds)].all(1).sum()) > len(rows):
                continue  # a row that was in all these rounds and in others too would be in the intersection
            if min(len(s.values) for s in own) == 0:
                silent[rows] = True
                continue
            directions, defects = common(own)
            found = int((defects < MEETS).sum())
            clear = found == len(defects) or defects[found] > max(10 * MEETS, 100 * float(defects[:found].max()) if found else 0)
            if found > len(rows) or not clear or (found > 1 and self.model.holds_records(m)):
                continue
            rays = directions[:, :found].T, torch.zeros(found).to(error)
            if found > 1:
                rays = extreme_rays(directions[:, :found]) or rays_by_chance(directions[:, :found], self.seed)
                if rays is None:
                    continue
            silent[rows[found:]] = True
            for n, ray, apart in zip(rows, *rays):
                blur = torch.stack([s.blur(ray) for s in own]).norm()
                spread = (1 / len(own) ** 2 + (1 / defects[found:].square()).sum() / len(ray)).sqrt()  # of errors in and out of the spans
                H[n] = ray[:-1] / ray[-1] * own[0].scale
                error[n] = (blur * spread + apart) / torch.minimum(ray[:-1].norm(), ray[-1].abs())
        complete = self._complete(m, H, error)
        silent &= (~member | complete).all(1).to(device) & (not self._moved)
        return H, error, silent, complete

    def _polish(self, m: int, member: Tensor, H: Tensor, error: Tensor, x: Tensor, residual: Tensor, certified: Tensor) -> None:
        """Fit slices of worker m to the spans themselves where h_n is not known well, and certify by these; in place.

        With the slice, h_n is known better too, which the join needs.
        """
        if self._moved or self.model.holds_records(m) or H.shape[1] < math.prod(self.model.part_shapes[m]):
            return
        open_rows = (error.isfinite() & (residual < NEAR) & (~certified | (error > FINE))).nonzero()[:, 0]
        times = member.sum(1).to(open_rows.device)
        for r in times[open_rows].unique().tolist():
            for rows in open_rows[times[open_rows] == r].split(16):
                own = [[self.spans[m][t] for t in member[n].nonzero()[:, 0].tolist()] for n in rows.tolist()]
                widest = max(len(s.values) for spans in own for s in spans)
                bases = [torch.stack([F.pad(spans[i].basis, (0, widest - len(spans[i].values))) for spans in own]).to(x) for i in range(r)]
                outside = Outside(self.model.representation(m, self._first), bases, own[0][0].scale)
                found, rho = outside.polish(x[rows])
                extended = outside.extended(found).double()
                unit = extended / extended.norm(dim=1, keepdim=True)
                blur = torch.stack([torch.stack([s.blur(u) for s in spans]).square().mean().sqrt() for spans, u in zip(own, unit)]).to(x)
                moved = (found - x[rows]).flatten(1).square().mean(1).sqrt()
                good = certified[rows] & (rho < FLOOR) & (moved < PIXEL_ERROR)
                new = (~certified[rows]).nonzero()[:, 0]
                good[new] = outside.at(new).vouched(found[new], rho[new], blur[new]) if len(new) else good[new]
                x[rows[good]], residual[rows[good]], certified[rows[good]] = found[good], rho[good], True
                H[rows[good]] = extended[good, :-1]
                error[rows[good]] = 5 * (rho + blur.square()).sqrt()[good].double()

    def _join(
        self, groups: dict, H: list[Tensor], error: list[Tensor], silent: list[Tensor], complete: Tensor, others: list[list[Tensor]]
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Order each group's slices so that those of one row stand together, in place; labels (N,) and which rows fit (N,).

        others : more values to order alike, each (N, …) for every worker
        """
        labels, joined = torch.full((self.rows,), -1), torch.zeros(self.rows, dtype=torch.bool)
        by_round: dict[int, list[list[int]]] = {}
        if self.model.double_softmax:
            return labels, joined
        for rounds, rows in groups.items():
            if all(bool((error[m][rows].isfinite() | silent[m][rows]).all()) for m in range(len(H))):
                by_round.setdefault(max(rounds, key=lambda t: (int(complete[t]), t)), []).append(rows)
        for t, members in by_round.items():
            above = {k: v.double() for k, v in self._above[t].items()}
            terms, V = zip(*(self._terms(m, t, above, H[m], error[m]) for m in range(len(H))))
            place = {n: i for i, n in enumerate(self.spans[0][t].rows.tolist())}
            for rows in members:
                own = [place[n] for n in rows]
                found = join([p[own] for p, _ in terms], [s[own] for _, s in terms], [v[own] for v in V], above["head.bias"], len(rows))
                if found is None:
                    continue
                choice, named, residual = found
                if len(choice) < len(rows):  # too many guesses to keep those that do not fit
                    continue
                for m, order in enumerate(choice.T.tolist()):
                    for values in (H[m], error[m], silent[m], *(o[m] for o in others)):
                        values[rows] = values[[rows[i] for i in order]]
                good = (residual < JOINED).cpu()
                labels[torch.tensor(rows)[good]], joined[torch.tensor(rows)[good]] = named[good], True
        return labels, joined

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

    def _terms(self, m: int, t: int, above: Parameters, H: Tensor, error: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """For the rows of round t: what :func:`worker_terms` gives, and V (|s|, d2) from the round's gradient; zero where not known."""
        own = self.spans[m][t]
        h, known = H[own.rows].clone(), error[own.rows].isfinite()
        h[~known] = blank_representation(self.model, self._first, m)
        extended = torch.cat([h, torch.full_like(h[:, :1], own.scale)], 1)[known]
        V = torch.zeros(len(h), self.model.d2[m], dtype=torch.float64, device=H.device)
        parts, slopes = worker_terms(self.model, above, m, h)
        if bool(known.any()):
            V[known], slopes = coefficients(extended @ own.basis, own.core, slopes)
        return (parts, slopes), V


def _unlike_others(H: Tensor, error: Tensor) -> Tensor:
    """Rows whose representation no other row has, (N,): where rows agree, spans also meet for rows that only share their company."""
    known = error.isfinite()
    size = H.norm(dim=1).clamp_min(1e-300)
    apart = torch.cdist(H, H) / size[:, None] + torch.diag(torch.full_like(size, torch.inf))
    return (apart + torch.where(known, 0.0, torch.inf)).min(1).values > EQUAL
