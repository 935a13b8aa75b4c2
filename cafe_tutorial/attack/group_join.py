"""Rows from slices where row numbers are known up to an exchange within groups: the join of the attack from a few rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model import Parameters, VFLModel
from .grow import explained, grow
from .join import JOINED, blank_representation, coefficients, join, worker_terms
from .pool import Pool
from .spans import Span


def join_groups(
    model: VFLModel, below: Parameters, above: list[Parameters], spans: list[list[Span]], groups: dict[tuple[int, ...], list[int]],
    pools: list[Pool], silent: list[Tensor], complete: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Order each group's slices so that those of one row stand together, in place; labels (N,) and which rows are confirmed (N,).

    below : Θ up to the first layers; above : Θ from there on, in each round; spans : of each worker and round; silent : (N,) a
    worker; complete : (rounds,), of how many workers every direction is accounted for. Each group is joined with the gradients of
    its round that is complete for most workers, and what does not fit with those of its other rounds.
    """
    rows = len(pools[0].error)
    labels, joined = torch.full((rows,), -1), torch.zeros(rows, dtype=torch.bool)
    left = {rounds: list(own) for rounds, own in groups.items() if rounds}
    for turn in range(max(map(len, left), default=0)):
        by_round: dict[int, list[tuple[int, ...]]] = {}
        for rounds in left:
            if len(rounds) > turn:
                by_round.setdefault(sorted(rounds, key=lambda t: (-int(complete[t]), -t))[turn], []).append(rounds)
        for t, members in by_round.items():
            weights = {k: v.double() for k, v in above[t].items()}
            terms = [_terms(model, below, weights, m, spans[m][t], pool) for m, pool in enumerate(pools)]
            single = [len(s[t].values) == len(s[t].rows) for s in spans]
            place = {n: i for i, n in enumerate(spans[0][t].rows.tolist())}
            for rounds in members:
                own = left[rounds]
                found = _rows([[x[[place[n] for n in own]] for x in term] for term in terms], [s[own] for s in silent], weights["head.bias"], single)
                for m, (pool, quiet) in enumerate(zip(pools, silent)):
                    order = [own[slots[m]] for slots, *_ in found]
                    pool.permute(own, order)
                    quiet[own] = quiet[order]
                for n, (_, label, sure) in zip(own, found):
                    labels[n], joined[n] = label, sure
                left[rounds] = [n for n, (_, label, _) in zip(own, found) if label < 0]
        left = {rounds: own for rounds, own in left.items() if own}
    return labels, joined


def _rows(terms: list[list[Tensor]], silent: list[Tensor], bias: Tensor, single: list[bool]) -> list[tuple[list[int], int, bool]]:
    """Of one group, for each row the slots of its slices, its label, -1 where none fits, and whether the gradients confirm that it is one row's.

    terms : of each worker, parts, slopes, V and whether the slice is known, for the slots; single : as for :func:`~cafe_tutorial.attack.grow.explained`
    """
    parts, slopes, V, known = zip(*terms)
    count, M = len(parts[0]), len(parts)
    free = [list(range(count)) for _ in range(M)]
    found: list[tuple[list[int], int, bool]] = []

    def take(slots: list[int], label: int, sure: bool) -> None:
        for m, i in enumerate(slots):
            free[m].remove(i)
        found.append((slots, label, sure))

    guesses = None
    if all(bool((k | s.to(k.device)).all()) for k, s in zip(known, silent)):
        guesses = join(parts, slopes, V, bias, count)
    for slots, label, misfit in zip(*(g.tolist() for g in guesses)) if guesses else ():
        if misfit < JOINED:
            take(slots, label, True)
    usable = [[i for i in own if bool(k[i])] for own, k in zip(free, known)]
    holes = [[i for i in own if not bool(k[i])] for own, k in zip(free, known)]
    choice, named, misfit, e = grow([s[u] for s, u in zip(slopes, usable)], [v[u] for v, u in zip(V, usable)], [bool(h) for h in holes], len(free[0]))
    blanks = [part[(hole or own or [0])[:1]] for part, hole, own in zip(parts, holes, usable)]  # unused where there is no hole
    confirmed, refuted = explained(choice, named, e, [p[u] for p, u in zip(parts, usable)], blanks, bias, single)
    for chosen, label, miss, sure, no in zip(*(x.tolist() for x in (choice, named, misfit, confirmed, refuted))):
        if miss < float("inf") and not no and all(i >= 0 or hole for i, hole in zip(chosen, holes)):
            take([usable[m][i] if i >= 0 else holes[m].pop(0) for m, i in enumerate(chosen)], label, sure)
    for slots, *_ in zip(*(g.tolist() for g in guesses)) if guesses else ():
        if all(i in own for i, own in zip(slots, free)):
            take(slots, -1, False)
    while len(found) < count:
        take([own[0] for own in free], -1, False)
    return found


def _terms(model: VFLModel, below: Parameters, above: Parameters, m: int, own: Span, pool: Pool) -> list[Tensor]:
    """For the rows of a round: what :func:`~cafe_tutorial.attack.join.worker_terms` gives, V (|s|, d2) from the round's gradient, zero
    where the slice is not known, and whether it is."""
    h, known = pool.H[own.rows].clone(), pool.error[own.rows].isfinite()
    h[~known] = blank_representation(model, below, m)
    extended = torch.cat([h, torch.full_like(h[:, :1], own.scale)], 1)[known]
    V = h.new_zeros(len(h), model.d2[m])
    parts, slopes = worker_terms(model, above, m, h)
    if bool(known.any()):
        V[known], slopes = coefficients(extended @ own.basis, own.core, slopes)
    return [parts, slopes, V, known]
