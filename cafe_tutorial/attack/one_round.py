"""Recovery from a single round: every row of a batch from its one averaged gradient, without row numbers.

The gradient's column space is the span of the batch's h̃_n (see ``attack.spans``), and the server knows the function h.
So it looks for images whose h̃ lies in the span: a search (``attack.search``) gives rough ones, linear programmes the rays
of a cone near them (``attack.rays``), and each is polished. Slices of different workers are joined into rows by
``attack.round_join``, which reads the labels too. Each round is taken for itself, so Θ may change between rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..model import VFLModel
from ..protocol import RoundView
from .invert import invert
from .leak import Leak
from .merge import Picture, merge
from .rays import RayFinder
from .round_join import Row, join_round
from .search import NEAR, Outside, Search, seek
from .spans import Span, apart, balance, span

FOUND = 1e-8  # ρ above this is no row, unless the span itself is known no better
BLURRED = 3  # times the blur of the span up to which an image is taken for a row
NEW = 1e-3  # a row's h̃ is at least this far, relative to its norm, from the span of those found before
SHARP = 1e-4  # directions of the span that are known worse than this are left out of the linear programmes
QUICK = Search(starts=32, steps=50, tv=0.1)
THOROUGH = Search(starts=48, steps=300, tv=0.02)
FEW = 2  # rows from a quick pass below which quick passes end
IDLE = 3  # thorough passes without a new row before the search ends


@dataclass
class Found:
    """What one worker's gradient of one round gave.

    span : the round's span; x : (f, *shape), the images found; coordinates : (f, k) of their h̃ in the span's basis,
    unit vectors; residual : (f,), ρ; certified : (f,), bool, as far as the span alone tells; tried : the rays that were inverted, whether or not an image came
    """

    span: Span
    x: Tensor
    coordinates: Tensor
    residual: Tensor
    certified: Tensor
    tried: list[Tensor] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every direction of the span belongs to a row that was found."""
        return len(self.x) == self.span.basis.shape[1]


class OneRoundCAFE:
    """The attack from single rounds.

    Parameters
    ----------
    model : the public model; its h must not be the record itself, as it is for tables
    seed : chooses the starts
    progress : show a progress bar

    The row numbers of a round are used only to name rows that more than one round shares.
    """

    method = "one-round"

    def __init__(self, model: VFLModel, *, seed: int = 0, progress: bool = False):
        for m in range(model.workers):
            if model.holds_records(m):
                raise ValueError(f"model: worker {m} has h(x) = x, so every vector in the span is a possible record and one round singles out none")
        if model.double_softmax:
            raise ValueError("double_softmax=True: the loss applies a second softmax, which the join of slices does not model; use False")
        self.model, self.seed, self.progress = model, seed, progress
        self.views: list[RoundView] = []

    @property
    def observed(self) -> int:
        return len(self.views)

    def observe(self, view: RoundView) -> None:
        """Keep one round."""
        self.views.append(view)

    def solve(self) -> Leak:
        """Search, join, and put the rounds together; the leak covers the rows of the rounds seen, ``Leak.numbers``."""
        if not self.views:
            raise ValueError("nothing was observed; call observe(view) for at least one round")
        pictures, notes = [], []
        with tqdm(total=len(self.views) * self.model.workers, desc="one-round", unit="gradient", leave=False, disable=not self.progress) as bar:
            for t, view in enumerate(self.views):
                found = []
                for m in range(self.model.workers):
                    found.append(find_rows(self.model, view, m, seed=self.seed + 1000 * t + m))
                    bar.update()
                rows = join_round(self.model, view.parameters, found, len(view.indices))
                pictures += [_picture(t, row, found, self.model, view) for row in rows]
                notes += _missing(t, len(view.indices), found)
        return merge(self.method, pictures, [v.indices.tolist() for v in self.views], notes)


def find_rows(model: VFLModel, view: RoundView, m: int, *, seed: int = 0) -> Found:
    """Worker m's slices of one batch, from its gradient in that round."""
    own = model.of_worker(view.gradients, m)
    weight, bias, like = own["first.weight"], own["first.bias"], view.parameters["head.bias"]
    round_span = span(view.indices, weight, bias, scale=balance(weight, bias))
    representation, shape = model.representation(m, view.parameters), model.part_shapes[m]
    outside = Outside(representation, [round_span.basis.to(like)], round_span.scale)
    k = len(round_span.values)
    known = Found(round_span, like.new_zeros(0, *shape), round_span.basis.new_zeros(0, k), like.new_zeros(0), torch.zeros(0, dtype=torch.bool, device=like.device))
    generator = torch.Generator().manual_seed(seed)
    finder = _ray_finder(round_span)
    gained = k
    while finder and gained >= FEW and not known.complete:  # rough pictures as hints
        hints = outside.extended(seek(outside, known.coordinates, shape, QUICK, generator))
        gained = _add(known, outside, _from_rays(finder, outside, known, hints.double(), generator))
    gained = k
    while finder and gained and not known.complete:  # random hints
        hints = (torch.rand(QUICK.starts, len(round_span.basis), generator=generator) < 0.5).to(round_span.basis)
        gained = _add(known, outside, _from_rays(finder, outside, known, hints, generator))
    idle = 0
    while not known.complete and idle < IDLE:  # the search alone
        gained = _add(known, outside, seek(outside, known.coordinates, shape, THOROUGH, generator))
        idle = 0 if gained else idle + 1
    if len(known.x):
        blur = known.span.blur(known.coordinates @ known.span.basis.T).to(like)
        known.certified = outside.vouched(known.x, known.residual, blur, known.x)
    return known


def _ray_finder(own: Span) -> RayFinder | None:
    """For the directions of the span that are known well."""
    sharp = own.noise * len(own.basis) ** 0.5 / own.values < SHARP
    return RayFinder(own.basis[:, sharp].cpu().numpy()) if bool(sharp.any()) else None


def _from_rays(finder: RayFinder, outside: Outside, known: Found, hints: Tensor, generator: torch.Generator) -> Tensor:
    """Images (f, *shape) whose h̃ are rays near the hints (n, d1 + 1), none of them tried before."""
    basis = torch.from_numpy(finder.basis)
    old = torch.nn.functional.normalize((known.coordinates @ known.span.basis.T).cpu() @ basis, dim=1)
    rays = old
    for hint in hints.cpu().numpy():
        ray = finder.near(hint, rays.numpy()) if len(rays) < basis.shape[1] else None
        if ray is None or apart(torch.from_numpy(ray), rays) < NEW:
            continue
        h = basis @ torch.from_numpy(ray)
        if h[-1] > NEW * h.max() and all(float((h - other).norm()) > NEW for other in known.tried):
            known.tried.append(h)
            rays = torch.cat([rays, torch.from_numpy(ray)[None]])
    h = (rays[len(old) :] @ basis.T).to(known.span.basis)
    H = (h[:, :-1] / h[:, -1:] * known.span.scale).to(outside.bases[0])
    return invert(outside.representation, H, known.x.shape[1:], goal=1e-9, generator=generator)[0]


def _add(known: Found, outside: Outside, x: Tensor) -> int:
    """Polish candidates x and keep those that lie in the span and are not a combination of those known; how many."""
    before = len(known.x)
    if not len(x):
        return 0
    x = x[outside.relative(x) < NEAR]
    x, rho = outside.polish(x, _blur(known, outside, x))
    inside = torch.nn.functional.normalize(outside.extended(x).double() @ known.span.basis, dim=1)
    most = (BLURRED * _blur(known, outside, x)).square().clamp(FOUND, NEAR)
    for i in rho.argsort().tolist():
        if rho[i] < most[i] and not known.complete and apart(inside[i], known.coordinates) > NEW:
            known.x, known.residual = torch.cat([known.x, x[i : i + 1]]), torch.cat([known.residual, rho[i : i + 1]])
            known.coordinates = torch.cat([known.coordinates, inside[i : i + 1]])
    return len(known.x) - before


def _blur(known: Found, outside: Outside, x: Tensor) -> Tensor:
    """How far h̃(x) may be from the span by the span's own error, relative to its norm, (n,)."""
    return known.span.blur(torch.nn.functional.normalize(outside.extended(x).double(), dim=1)).to(x)


def _picture(t: int, row: Row, found: list[Found], model: VFLModel, view: RoundView) -> Picture:
    blank = [view.parameters["head.bias"].new_zeros(shape) for shape in model.part_shapes]
    return Picture(
        rounds=(t,), label=row.label,
        slices=[b if i is None else f.x[i] for i, f, b in zip(row.slots, found, blank)],
        leaks=[i is not None or not ((row.label >= 0 and f.complete) or len(f.span.values) == 0) for i, f in zip(row.slots, found)],
        residual=[float("nan") if i is None else float(f.residual[i]) for i, f in zip(row.slots, found)],
        certified=[i is not None and sure and bool(f.certified[i]) for i, sure, f in zip(row.slots, row.sure, found)],
    )  # fmt: skip


def _missing(t: int, size: int, found: list[Found]) -> list[str]:
    """What round t did not give."""
    notes = []
    for m, f in enumerate(found):
        k = len(f.span.values)
        if k < size:
            notes.append(f"round {t}, worker {m}: {size - k} of {size} rows leave no direction of their own above the gradient's rounding")
        if len(f.x) < k:
            notes.append(f"round {t}, worker {m}: {k - len(f.x)} of {k} directions belong to no row that was found")
    return notes
