"""Fake gradients, Algorithm 5 of the paper: an upload that keeps the true gradient's order and little else.

The paper leaves two readings open. ``clip`` is its text: each entry is cut to the range of the candidate's value of the
same rank; the order is kept where as many entries are negative as positive. ``order`` is what the authors call a
projection on predefined gradients: the candidate's values are uploaded, in the order of the true ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import at_least_one
from ..model import Parameters
from .base import Defense, flat, one_of, positive, unflat

READINGS = ("clip", "order")
MEMORY = 2**27  # bytes of candidates that a party keeps


class FakeGradients(Defense):
    """Algorithm 5.

    Parameters
    ----------
    sigma : standard deviation of the candidates' entries; the paper's σ² = 1.1
    relative : whether sigma counts in root mean squares of the true gradient, round by round
    reading : ``clip`` or ``order``
    candidates : ν, the paper's 1,000; as many of them are kept, and used in every round, as fit into 128 MB
    tau : the distance of the sorted gradient to its nearest candidate above which new ones are drawn
    redraws : how often in one round, at the most; then ``ValueError``
    seed : draws the candidates
    """

    def __init__(
        self, *, sigma: float = math.sqrt(1.1), relative: bool = False, reading: str = "clip", candidates: int = 1000,
        tau: float = math.inf, redraws: int = 10, seed: int = 0,
    ):  # fmt: skip
        super().__init__(seed=seed)
        self.sigma, self.relative, self.reading = positive("sigma", sigma, most=1e6), relative, one_of("reading", reading, READINGS)
        self.candidates, self.tau, self.redraws = at_least_one("candidates", candidates), positive("tau", tau), redraws
        if isinstance(redraws, bool) or not isinstance(redraws, int) or redraws < 0:
            raise ValueError(f"redraws={redraws!r} must be a whole number of at least 0")
        self._pool: Tensor | None = None  # (candidates, D), sorted rows of N(0, 1)
        self._squares: Tensor | None = None  # (candidates,), their squared norms

    def __call__(self, gradient: Parameters, *, rows: int) -> Parameters:
        true = flat(gradient)
        ascending, order = true.sort()
        fake = self._nearest(ascending, self.scale(true))  # (D,), ascending
        if self.reading == "clip":
            fake = torch.minimum(torch.maximum(ascending, -fake.abs()), fake.abs())
        return unflat(torch.empty_like(true).scatter_(0, order, fake), gradient)

    def scale(self, true: Tensor) -> float:
        """The candidates' standard deviation for this gradient (D,)."""
        return self.sigma * (float(true.square().mean().sqrt()) if self.relative else 1.0)

    def _nearest(self, ascending: Tensor, scale: float) -> Tensor:
        """The candidate nearest to the sorted gradient in L2, drawn again while it is farther than tau."""
        nearest = math.inf
        for _ in range(self.redraws + 1):
            if self._pool is None or self._pool.shape[1] != len(ascending):
                self._pool = self._draw(len(ascending)).to(ascending)
                self._squares = torch.stack([row.square().sum() for row in self._pool])
            distances = (self._squares * scale**2 - 2 * scale * (self._pool @ ascending) + ascending.square().sum()).clamp_min(0).sqrt()
            least, which = distances.min(0)
            if least <= self.tau:
                return scale * self._pool[which]
            self._pool, nearest = None, min(nearest, float(least))
        raise ValueError(f"tau={self.tau:g} was not reached in {self.redraws} redraws: the nearest candidate was {nearest:.3g} away; a larger tau or another sigma (now {scale:.3g}) is needed")

    def _draw(self, entries: int) -> Tensor:
        """Sorted samples of N(0, 1), each without a sort: sums of exponential spacings are a uniform sample in order."""
        found = torch.empty(max(1, min(self.candidates, MEMORY // (4 * entries))), entries)
        for row in found:
            sums = torch.empty(entries + 1, dtype=torch.float64).exponential_(generator=self.generator).cumsum(0)
            row.copy_(torch.special.ndtri(sums[:-1] / sums[-1]))
        return found
