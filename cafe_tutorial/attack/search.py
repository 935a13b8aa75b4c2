"""The search for images whose h̃ lies in given spans.

For an image x, let P h̃(x) be what of h̃(x) = [h(x); 1] lies outside the span of a batch. For the batch's rows it is zero,
so ρ(x) = ‖P h̃(x)‖² / ‖h̃(x)‖² is an objective that the server can evaluate anywhere, without knowing a single h_n.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model import full_precision
from .invert import adam, settle, start
from .jacobians import jacobians_at_once, tells_apart
from .newton import gauss_newton
from .slices import PIXEL_ERROR

NEAR = 1e-4  # ρ below which polishing is worthwhile
CLOSE = 1e-8  # the same for Gauss-Newton steps, a Jacobian each
SMALL = 256  # pixels up to which a Jacobian costs little, so that NEAR is close enough
STUCK = 1e-12  # ρ above which an image is polished further
FLOOR = 1e-11  # no ρ below this is doubted for its size
CEILING = 1e-9  # and none above this is certified
TINY = 1e-20  # keeps the logarithm of an exact fit finite


class Outside:
    """What of h̃(x) lies outside of spans, for images x.

    representation : x (n, …) to h (n, d1); bases : of the r spans that an image is to lie in, each (d1 + 1, k), the same
    for all images, or (n, d1 + 1, k), zero columns allowed; scale : of the last entry, as in the spans

    Called with x it returns (n, r (d1 + 1)).
    """

    def __init__(self, representation: Callable[[Tensor], Tensor], bases: list[Tensor], scale: float):
        self.representation, self.bases, self.scale = representation, bases, scale

    def at(self, rows: Tensor) -> Outside:
        """For the images with these numbers alone."""
        return Outside(self.representation, [U[rows] if U.dim() == 3 else U for U in self.bases], self.scale)

    def extended(self, x: Tensor) -> Tensor:
        """h̃ of the images, (n, d1 + 1), the last entry scaled."""
        with full_precision():
            h = self.representation(x)
        return torch.cat([h, torch.full_like(h[:, :1], self.scale)], 1)

    def __call__(self, x: Tensor) -> Tensor:
        h = self.extended(x)
        return torch.cat([_outside(h, U) for U in self.bases], 1)

    def relative(self, x: Tensor) -> Tensor:
        """ρ(x), the mean over the spans, (n,)."""
        h = self.extended(x)
        return sum(_outside(h, U).square().sum(1) for U in self.bases) / (len(self.bases) * h.square().sum(1))

    def polish(self, x: Tensor, blur: Tensor) -> tuple[Tensor, Tensor]:
        """Minimize ρ near x: gradient steps, then Gauss-Newton and Adam where they are stuck above what the spans are known to.

        blur : (n,), expected distance of h̃(x) from the spans. Returns x (n, …) and ρ (n,).
        """
        x, rho = self._settled(x)
        floor = (4 * blur.square()).clamp_min(STUCK)
        self._newton(x, rho, floor)
        stuck = ((rho > floor) & (rho < NEAR)).nonzero()[:, 0]
        if len(stuck):
            own = self.at(stuck)
            with full_precision():
                again = adam(lambda x, _: own.relative(x), x[stuck], 300, 0.02, 0.0)
            self._keep_better(x, rho, stuck, *own._settled(again))
            self._newton(x, rho, floor)
        return x, rho

    def _newton(self, x: Tensor, rho: Tensor, floor: Tensor) -> None:
        """Gauss-Newton steps, in place, for images that may be near a row."""
        rows = ((rho > floor) & (rho < (NEAR if math.prod(x.shape[1:]) <= SMALL else CLOSE))).nonzero()[:, 0]
        if len(rows):
            self._keep_better(x, rho, rows, *gauss_newton(self.at(rows), x[rows], rho[rows]))

    @staticmethod
    def _keep_better(x: Tensor, rho: Tensor, rows: Tensor, found: Tensor, less: Tensor) -> None:
        better = less < rho[rows]
        x[rows[better]], rho[rows[better]] = found[better], less[better]

    def _settled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with full_precision():
            return settle(lambda x, rows: self.at(rows).relative(x), x)

    def vouched(self, x: Tensor, rho: Tensor, blur: Tensor, others: Tensor) -> Tensor:
        """Which images the spans tell from their neighbours well enough for 60 dB, (n,).

        rho : ρ(x); blur : (n,), the expected distance of h̃(x) from the spans, root mean square over them; others : (f, …), images
        in the same spans. An image is off by both over the smallest singular value of the Jacobian of P h̃: it is zero where
        another image near by has its h̃ in the spans as well. At the edge of [0, 1], where h has kinks, that Jacobian does not
        speak for all directions, so the directions of the other images are tried. What else is far away is not looked at.
        """
        limit = (25 * blur.square()).clamp_min(FLOOR)
        passed = (rho <= limit) & (limit <= CEILING)
        pixels = x[0].numel()
        error = (rho.sqrt() + limit.sqrt()) * (len(self.bases) * self.extended(x).square().sum(1)).sqrt()
        numbers = passed.nonzero()[:, 0]
        for rows in numbers.split(jacobians_at_once(len(self.bases) * self.bases[0].shape[-2], pixels)) if len(numbers) else ():
            passed[rows] = tells_apart(self.at(rows), x[rows], error[rows] / (PIXEL_ERROR * pixels**0.5))
        numbers = passed.nonzero()[:, 0]
        if len(numbers):
            passed[numbers] = ~self.at(numbers).blended(x[numbers], others, limit[numbers])
        return passed

    def blended(self, x: Tensor, others: Tensor, limit: Tensor) -> Tensor:
        """Which images stay within ρ ≤ limit when they move a little towards one of the others, (n,): neither of both is singled out."""
        stays = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        for other in others:
            d = other - x
            length = d.flatten(1).square().mean(1).sqrt()
            step = (2 * PIXEL_ERROR / length.clamp_min(1e-12)).clamp_max(0.5)
            moved = x + step.view(-1, *[1] * (x.dim() - 1)) * d
            stays |= (length > PIXEL_ERROR / 10) & (self.relative(moved) <= limit)
        return stays


def _outside(h: Tensor, U: Tensor) -> Tensor:
    """The part of h (n, D) that is orthogonal to the columns of U, (D, k) or (n, D, k)."""
    return h - (h @ U) @ U.T if U.dim() == 2 else h - (U @ (U.mT @ h[:, :, None]))[:, :, 0]


@dataclass(frozen=True)
class Search:
    """One pass of starts: Adam at a rate falling from ``rate`` to zero in ``steps``, with noise added to the image up to
    55 % of them and a total-variation weight ``tv`` that vanishes half-way."""

    starts: int
    steps: int
    tv: float
    rate: float = 0.1
    noise: float = 0.03


def seek(outside: Outside, known: Tensor, shape: tuple[int, ...], search: Search, generator: torch.Generator) -> Tensor:
    """Images (starts, *shape) near rows of the batch that are not known yet.

    Each start draws a direction w of the span that is orthogonal to the known h̃, and minimizes
    log(‖P h̃(x)‖² / (w · h̃(x))²): at a known row w · h̃ is zero, so that no start ends there.

    outside : of one span; known : (f, k), coordinates of the known h̃ in its basis
    """
    U = outside.bases[0]
    w = torch.randn(search.starts, U.shape[1], generator=generator, dtype=torch.float64)
    if len(known):
        directions = torch.linalg.qr(known.T)[0].cpu()
        w = w - (w @ directions) @ directions.T
    w = torch.nn.functional.normalize(w, dim=1).to(U)

    def objective(x, rows):
        h = outside.extended(x)
        inside = h @ U
        misses = (h - inside @ U.T).square().sum(1)
        return (misses + TINY).log() - ((inside * w[rows]).sum(1).square() + TINY).log()

    x = start("smooth", search.starts, shape, generator).to(U)
    with full_precision():
        return adam(objective, x, search.steps, search.rate, 0.0, tv=search.tv, noise=search.noise, generator=generator)
