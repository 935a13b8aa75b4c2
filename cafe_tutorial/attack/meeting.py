"""What may lie where the spans of a group's rounds meet: candidates for the h̃_n of the rows that share these rounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cones import extreme_rays
from .rays import rays_by_chance
from .spans import Span, common

MEETS = 1e-8  # a direction whose squared distances from the spans add up to less lies in all of them
NEARLY = 1e-4  # and one below this may mix with them, so that it is taken along
SPARE = 4  # directions more than rows to take along at most
SURE = 1e-5  # a ray known worse than this is looked for in another way too
SAME = 1e-3  # candidates closer than this are one
BLURRED = 5  # times the blur of the spans: a candidate farther from them is no row of theirs


@dataclass(frozen=True)
class Meeting:
    """rays : (c, d1 + 1), unit vectors; error : (c,), expected, in the same units; directions : how many lie in all the spans"""

    rays: Tensor
    error: Tensor
    directions: int


def meeting(spans: list[Span], rows: int, *, rays: bool, seed: int) -> Meeting | None:
    """Candidates for ``rows`` rows, possibly more than these; None where the directions cannot be told apart.

    rays : whether a cone's rays may be looked for, because the h come from a ReLU

    A direction that nearly lies in all spans, because a row of one round resembles a row of another, would blur those that
    do. It is taken along, and its ray recognized by its distance from the spans, which enters its error.
    """
    directions, defects = common(spans)
    found, wide = int((defects < MEETS).sum()), int((defects < NEARLY).sum())
    gap = found == len(defects) or defects[found] > max(10 * MEETS, 100 * float(defects[:found].max()) if found else 0)
    count = found if (gap and found <= rows) or not rays else wide
    if count > rows + SPARE * rays or (count == found and not gap) or (count > 1 and not rays):
        return None
    if count < 2:
        own, apart = directions[:, :count].T, torch.zeros(count).to(defects)
    else:
        own, apart = _rays(directions[:, :count], seed)
    blur = torch.stack([s.blur(own) for s in spans]).norm(dim=0) if len(own) else apart
    spread = (1 / len(spans) ** 2 + (1 / defects[count:].clamp_min(1e-30)).sum() / len(directions)).sqrt()  # of errors in and out of the spans
    misses = torch.stack([(own - (own @ s.basis) @ s.basis.T).norm(dim=1) for s in spans]).norm(dim=0)
    return Meeting(own, blur * spread + apart + torch.where(misses > BLURRED * blur, misses, 0.0), found)


def _rays(basis: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The rays of a cone found in two ways, each ray once, and how far they may be off."""
    own, apart = extreme_rays(basis) or (basis.new_zeros(0, len(basis)), basis.new_zeros(0))
    if len(own) and float(apart.max()) < SURE:
        return own, apart
    sure = own[apart < SURE]
    for known in (sure, sure[:0]):
        more, error = rays_by_chance(basis, seed, known)
        fresh = torch.cdist(more, own).min(1).values > SAME if len(own) else torch.ones_like(error, dtype=torch.bool)
        own, apart = torch.cat([own, more[fresh]]), torch.cat([apart, error[fresh]])
    return own, apart
