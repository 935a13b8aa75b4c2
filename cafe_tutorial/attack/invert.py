"""Step III with an exact H: find the x whose representation h(x) is the recovered h_n, images in [0, 1].

The squared relative residual ρ(x) = ‖h(x) - h_n‖² / ‖h_n‖² is minimized row by row. A linear map reads a first likeness
from h_n; Adam on log ρ, whose gradient does not vanish with ρ, carries it near the right linear piece of h; projected
gradient steps of Barzilai-Borwein length and a few Gauss-Newton steps finish. Rows that miss the goal start again, longer, unless
the first starts show that of many targets none is any image's h.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..model import full_precision
from .chords import chords
from .decoder import enlarged_noise, linear_decoder
from .layers import evaluate, layers_of, part, spare, thinned
from .step3 import total_variation

GOAL = 1e-13  # ρ at which a row is done: float32's floor
TINY = 1e-14  # keeps the logarithm of an exact fit finite
ROUGHLY = 2  # Adam looks at every so-many-th filter of the last convolution, where there are enough
LARGE = 1024  # pixels above which a Jacobian for every row takes too long
BETWEEN = 10  # gradient steps before each of them
JACOBIANS = 4  # for a row at most, as long as each leaves less than a tenth
NEAR = 1e-5  # ρ from which a row may be in the right piece
MANY, WRONG = 16, (3e-2, 1e-3)  # of so many targets, one below this ρ after the first and the second attempt, or they are no h
DONE = 1e-12  # ρ from which a further Jacobian is not worth its time


@dataclass(frozen=True)
class Attempt:
    """One round of starts: ``steps`` of Adam on log ρ at a ``rate`` falling to zero, with noise added to the image up to 55 % of
    them and a total-variation weight that vanishes half-way. start : ``decoded`` from h_n, ``grey`` or ``smooth``."""

    start: str
    steps: int
    tv: float = 0.0
    noise: float = 0.0
    rate: float = 0.1


ATTEMPTS = (
    Attempt("decoded", 20),
    Attempt("decoded", 200, 2e-2, rate=0.05),
    Attempt("smooth", 300, 2e-2, 0.03),
    Attempt("smooth", 600, 2e-2, 0.03),
    Attempt("smooth", 1000, 2e-2, 0.03),
)


def invert(
    representation: Callable[[Tensor], Tensor], target: Tensor, shape: tuple[int, ...], *, goal: Tensor | float = GOAL,
    attempts: tuple[Attempt, ...] = ATTEMPTS, chunk: int = 128, generator: torch.Generator, tick: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Invert h row by row.

    Parameters
    ----------
    representation : (n, *shape) to (n, d1), public
    target : Tensor, shape (n, d1), the recovered h_n, none of them zero
    shape : (C, h, w) of a slice, or (D,) of a record
    goal : the relative residual at which a row does not start again, one number or one a row
    generator : draws the starts
    tick : called with the number of rows that an attempt has settled

    Returns
    -------
    x : Tensor, shape (n, *shape), images in [0, 1]
    residual : Tensor, shape (n,), ρ at x; each row keeps the start with the smallest ρ
    """
    n = len(target)
    x = torch.zeros(n, *shape, dtype=target.dtype, device=target.device)
    residual = torch.full((n,), math.inf, dtype=target.dtype, device=target.device)
    goal = torch.as_tensor(goal, dtype=target.dtype, device=target.device).expand(n)
    left = torch.arange(n, device=target.device)
    decode = None
    if n and len(shape) == 3 and any(a.start == "decoded" for a in attempts):
        with full_precision():
            decode = linear_decoder(_evaluated(representation), shape, like=target, generator=generator)
    for number, attempt in enumerate(attempts):
        if not len(left):
            break
        for rows in left.split(chunk):
            with full_precision():
                found, rho = _attempt(representation, target[rows], shape, attempt, decode, generator)
            better = rho < residual[rows]
            x[rows[better]], residual[rows[better]] = found[better], rho[better]
            done = len(rows) if number == len(attempts) - 1 else int((residual[rows] <= goal[rows]).sum())
            if tick and done:
                tick(done)
        left = left[residual[left] > goal[left]]
        if number < len(WRONG) and n >= MANY and float(residual.min()) > WRONG[number]:
            if tick and number < len(attempts) - 1:
                tick(len(left))
            break
    return x, residual


def _evaluated(representation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same function, by its layers where it has them."""
    layers = layers_of(representation)
    return representation if layers is None else partial(evaluate, layers)


def _attempt(representation, target, shape, attempt: Attempt, decode, generator) -> tuple[Tensor, Tensor]:
    read = decode is not None and attempt.start == "decoded"
    x = decode(target) if read else start(attempt.start, len(target), shape, generator).to(target)
    layers, h = layers_of(representation), _evaluated(representation)
    few, some = h, target
    if layers is not None:
        every = min(ROUGHLY, spare(layers, target.shape[1], x[0].numel()))
        few, some = partial(evaluate, thinned(layers, every)), part(target, layers, every)

    def distance(x, rows):
        return _relative(h, target[rows], x)

    x = adam(lambda x, rows: (_relative(few, some[rows], x) + TINY).log(), x, attempt.steps, attempt.rate, 0.0, tv=attempt.tv, noise=attempt.noise, generator=generator)
    if layers is None or x[0].numel() > LARGE:
        return settle(distance, x)
    return _finish(layers, target, distance, x)


def _finish(layers, target, distance, x) -> tuple[Tensor, Tensor]:
    """Gradient steps, and Gauss-Newton steps on a part of h for the rows that are near; x changes in place."""
    every = spare(layers, target.shape[1], x[0].numel())
    few, some = thinned(layers, every), part(target, layers, every)
    rho, left = torch.full_like(target[:, 0], math.inf), torch.arange(len(x), device=x.device)
    for _ in range(JACOBIANS):
        before = rho.clone()
        x[left], rho[left] = settle(lambda x, rows: distance(x, left[rows]), x[left], steps=BETWEEN)
        far = left[rho[left] >= NEAR]
        if len(far):
            x[far], rho[far] = settle(lambda x, rows: distance(x, far[rows]), x[far])
        left = left[rho[left] < NEAR]
        if not len(left):
            break
        closer = chords(few, some[left], x[left])
        less = distance(closer, left).detach()
        better = less < rho[left]
        x[left[better]], rho[left[better]] = closer[better], less[better]
        left = left[(rho[left] > DONE) & (rho[left] < 0.1 * before[left])]
    return x, rho


def start(kind: str, n: int, shape, generator: torch.Generator) -> Tensor:
    """Smooth random images, 4x4 uniform noise enlarged to full size; else, and for small tiles and records, nearly grey ones."""
    if kind != "smooth" or len(shape) != 3 or min(shape[1:]) < 4:
        return 0.5 + 0.05 * torch.randn(n, *shape, generator=generator)
    return enlarged_noise(n, shape, 4, generator=generator).clamp(0, 1)


def _relative(representation, target, x) -> Tensor:
    """ρ(x), shape (n,)."""
    return (representation(x) - target).square().sum(1) / target.square().sum(1)


def adam(
    objective: Callable[[Tensor, Tensor], Tensor], x: Tensor, steps: int, first_rate: float, last_rate: float, *,
    tv: float = 0.0, noise: float = 0.0, generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Adam on every row's objective, as for :func:`settle`, at a rate falling along a half cosine.

    tv : total-variation weight, vanishes half-way; noise : standard deviation of what is added to the images after
    each step, drawn by the generator, vanishes at 55 % of the steps
    """
    x, rows = x.clone().requires_grad_(), torch.arange(len(x), device=x.device)
    optimizer = torch.optim.Adam([x], lr=first_rate)
    for i in range(steps):
        done = i / steps
        optimizer.param_groups[0]["lr"] = last_rate + (first_rate - last_rate) * 0.5 * (1 + math.cos(math.pi * done))
        loss = objective(x, rows).sum()
        if tv and done < 0.5:
            loss = loss + tv * (1 - 2 * done) * total_variation(x).sum() / x.shape[1]
        (x.grad,) = torch.autograd.grad(loss, x)
        optimizer.step()
        with torch.no_grad():
            if noise and done < 0.55:
                x.add_(noise * (1 - done / 0.55) * torch.randn(x.shape, generator=generator).to(x))
            x.copy_(project(x))
    return x.detach()


def project(x: Tensor) -> Tensor:
    """Images (n, C, h, w) onto [0, 1]; records as they are."""
    return x.clamp(0, 1) if x.dim() == 4 else x


def settle(objective: Callable[[Tensor, Tensor], Tensor], x: Tensor, *, steps: int = 120, every: int = 10) -> tuple[Tensor, Tensor]:
    """Projected gradient with Barzilai-Borwein steps; a row that worsens fourfold returns to its best point.

    objective : x (n, …) of the rows with the given numbers (n,) to what each is to minimize, (n,); x : (N, …), the
    start. Every ``every`` steps the rows that reached GOAL, or that gained less than a tenth, drop out.
    Returns each row's best x and its objective, (N,).
    """
    rows = torch.arange(len(x), device=x.device)
    best_x, best = x.clone(), torch.full((len(x),), math.inf, dtype=x.dtype, device=x.device)
    column = (-1,) + (1,) * (x.dim() - 1)
    state = None
    mark = best.clone()
    for i in range(steps):
        probe = x.detach().requires_grad_()
        rho = objective(probe, rows)
        (gradient,) = torch.autograd.grad(rho.sum(), probe)
        rho = rho.detach()
        if state is None:
            length = rho / gradient.square().flatten(1).sum(1).clamp_min(1e-30)
            best[rows], top_gradient = rho, gradient.clone()
        else:
            old_x, old_gradient, length = state
            moved, turned = (x - old_x).flatten(1), (gradient - old_gradient).flatten(1)
            inner = (moved * turned).sum(1)
            proposal = moved.square().sum(1) / inner if i % 2 else inner / turned.square().sum(1)
            length = torch.where((inner > 0) & torch.isfinite(proposal), proposal, length).clamp(1e-6, 1e6)
            improved, worse = rho < best[rows], rho > 4 * best[rows]
            best_x[rows[improved]], best[rows[improved]] = x[improved], rho[improved]
            top_gradient = torch.where(improved.view(column), gradient, top_gradient)
            x = torch.where(worse.view(column), best_x[rows], x)
            gradient = torch.where(worse.view(column), top_gradient, gradient)
            length = torch.where(worse, length / 4, length)
        state = (x, gradient, length)
        x = project(x - length.view(column) * gradient)
        if i % every == every - 1:
            keep = (best[rows] > GOAL) & (best[rows] < 0.9 * mark[rows])
            mark[rows] = best[rows]
            rows, x, top_gradient = rows[keep], x[keep], top_gradient[keep]
            state = tuple(s[keep] for s in state)
            if not len(rows):
                break
    return best_x, best
