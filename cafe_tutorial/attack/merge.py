"""The pictures of single rounds put together, and named where rounds share rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .leak import Leak

SAME = 2.5e-3  # root mean square difference up to which two slices, each certified to 1e-3, are the same picture


@dataclass
class Picture:
    """One row as one or more rounds gave it: its slices, one a worker, and what is known of each.

    rounds : the rounds in which it was found; label : -1 where its slices could not be joined; leaks, residual and
    certified : as in :class:`~cafe_tutorial.attack.Leak`
    """

    rounds: tuple[int, ...]
    label: int
    slices: list[Tensor]
    leaks: list[bool]
    residual: list[float]
    certified: list[bool]

    def same(self, other: Picture) -> bool:
        """Whether two pictures of different rounds are of one row: joined, with the same label, and alike in every slice that is
        certified in both, at least two unless there is only one worker."""
        if min(self.label, other.label) < 0 or self.label != other.label or set(self.rounds) & set(other.rounds):
            return False
        both = [m for m in range(len(self.slices)) if self.certified[m] and other.certified[m]]
        alike = all(float((self.slices[m] - other.slices[m]).square().mean()) < SAME**2 for m in both)
        return len(both) >= min(2, len(self.slices)) and alike

    def add(self, other: Picture) -> None:
        """Take over what the other picture of the same row knows better."""
        self.rounds = (*self.rounds, *other.rounds)
        for m, residual in enumerate(other.residual):
            if not (self.certified[m] or self.residual[m] <= residual) and residual == residual:
                self.slices[m], self.residual[m], self.certified[m] = other.slices[m], residual, other.certified[m]
            self.leaks[m] = self.leaks[m] or other.leaks[m]


def merge(method: str, pictures: list[Picture], batches: list[list[int]], notes: list[str]) -> Leak:
    """One leak over all rows that occur in the rounds' batches.

    Pictures of different rounds that are the same become one. A picture that was found in the rounds t belongs to a row
    that is in the batches of all of them, and in no other whose rows were all found. Rows that are in the same batches
    are exchangeable; a picture that may belong to rows in different batches loses its certificates. So does one of several
    rounds of which not all have all their rows joined: two rows may look the same, and a third, silent one be in both rounds.
    """
    merged: list[Picture] = []
    for picture in pictures:
        twin = next((p for p in merged if p.same(picture)), None)
        merged.append(picture) if twin is None else twin.add(picture)
    joined = [sum(t in p.rounds for p in merged if p.label >= 0) for t in range(len(batches))]
    whole = {t for t, batch in enumerate(batches) if joined[t] == len(batch)}
    seen = {n: tuple(t for t, batch in enumerate(batches) if n in batch) for n in sorted({n for batch in batches for n in batch})}
    numbers = list(seen)
    patterns = {pattern: i for i, pattern in enumerate(dict.fromkeys(seen.values()))}
    place, unsure = _places(merged, seen, whole)
    rows: list[Picture | None] = [None] * len(numbers)
    for picture, row, doubt in zip(merged, place, unsure):
        if row is not None:
            picture.certified = [c and not doubt for c in picture.certified]
            rows[row] = picture
    blank = merged[0]
    workers = len(blank.slices)
    empty = Picture((), -1, [torch.zeros_like(s) for s in blank.slices], [True] * workers, [float("nan")] * workers, [False] * workers)
    rows = [r or empty for r in rows]
    device = blank.slices[0].device
    unnamed, dropped = sum(r.label < 0 for r in rows), sum(row is None for row in place)
    notes = [*notes, *[f"{dropped} pictures found no row left to belong to"] * bool(dropped)]
    notes = [*notes, *[f"{unnamed} of {len(rows)} rows could not be joined from their slices"] * bool(unnamed)]
    return Leak(
        method,
        [torch.stack([r.slices[m] for r in rows]) for m in range(workers)],
        torch.tensor([r.label for r in rows], device=device),
        *(torch.tensor([getattr(r, name) for r in rows], device=device) for name in ("leaks", "residual", "certified")),
        len(batches), notes, exchangeable=torch.tensor([patterns[p] for p in seen.values()]), numbers=torch.tensor(numbers),
    )  # fmt: skip


def _places(merged: list[Picture], seen: dict[int, tuple[int, ...]], whole: set[int]) -> tuple[list[int | None], list[bool]]:
    """A row for each picture, None where none is left, and whether rows of other batches could claim it; joined pictures choose first."""
    patterns = list(seen.values())
    free: dict[tuple[int, ...], list[int]] = {}
    for row, pattern in enumerate(patterns):
        free.setdefault(pattern, []).append(row)
    possible = [[p for p in free if set(m.rounds) <= set(p) and not (set(p) - set(m.rounds)) & whole] for m in merged]
    claims = {p: sum(p in own and m.label >= 0 for own, m in zip(possible, merged)) for p in free}
    unsure = [
        len(own) != 1 or claims[own[0]] > patterns.count(own[0]) or (len(m.rounds) > 1 and not whole.issuperset(m.rounds))
        for own, m in zip(possible, merged)
    ]
    place: list[int | None] = [None] * len(merged)
    for i in sorted(range(len(merged)), key=lambda i: (unsure[i], merged[i].label < 0, -len(merged[i].rounds))):
        open_to = sorted((p for p in possible[i] or free if free[p] and set(merged[i].rounds) <= set(p)), key=len)
        if open_to:
            place[i] = free[open_to[0]].pop()
    return place, unsure
