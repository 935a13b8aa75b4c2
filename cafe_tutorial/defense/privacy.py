"""Differential privacy as in DP-SGD (Abadi et al.): clip, average, add Gaussian noise.

Opacus' accountant turns (ε, δ), the share of rows in a batch and the number of rounds into the noise. It counts what one
worker's uploads tell about one of its rows; M workers and the head's holder who hold parts of the same row add up.
"""

from __future__ import annotations

import math
import warnings
from functools import cache

import torch
from torch import Tensor

from ..checks import at_least_one
from ..model import Parameters
from .base import Defense, flat, one_of, positive

WHERE = ("row", "batch")
ORDERS = [*(1 + i / 10 for i in range(1, 100)), *range(12, 64), *(2**i for i in range(6, 13))]  # Rényi; the large ones for small ε


class GaussianMechanism(Defense):
    """Clipping and noise.

    Parameters
    ----------
    clip_norm : C, the largest norm that a clipped gradient may have; the paper's 3
    per : ``row`` clips each row's own gradient before the average, as (ε, δ) demands. ``batch`` clips the batch's averaged
        gradient alone, as the paper's numbers suggest; the noise is then relative to that norm, and the guarantee is none of
        a row's
    epsilon, delta : what all rounds together may cost
    noise_multiplier : z in place of epsilon: the noise's standard deviation over the norm that one row can move the sum by
    steps : rounds that the budget is for; the paper's 8,000
    amplified : whether epsilon may count on whoever sees the uploads not knowing which rows a batch holds, each row being in
        it by a chance of its own (Poisson sampling). In this book's protocol the server deals the batches; False asks for
        noise that holds against it, for every row in as many random batches as the luckiest one but with probability delta
    seed : draws the noise
    """

    def __init__(
        self, *, clip_norm: float = 3.0, per: str = "row", epsilon: float | None = None, delta: float = 1e-5,
        noise_multiplier: float | None = None, steps: int = 8000, amplified: bool = True, seed: int = 0,
    ):  # fmt: skip
        super().__init__(seed=seed)
        self.clip_norm, self.per, self.steps = positive("clip_norm", clip_norm, most=1e9), one_of("per", per, WHERE), at_least_one("steps", steps)
        self.epsilon = None if epsilon is None else positive("epsilon", epsilon, most=1000)
        self.delta = positive("delta", delta, most=0.5)
        if (epsilon is None) == (noise_multiplier is None):
            raise ValueError(f"epsilon={epsilon} and noise_multiplier={noise_multiplier}: give one of the two")
        if noise_multiplier is not None and not 0 <= noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier={noise_multiplier} must be a number of at least 0")
        self.noise_multiplier, self.amplified = noise_multiplier, amplified
        self.per_row = self.per == "row"

    def for_party(self, party: int, *, rows: int, batch_size: int) -> GaussianMechanism:
        own = super().for_party(party, rows=rows, batch_size=batch_size)
        if self.epsilon is not None:
            share = batch_size / rows
            counted = {"sample_rate": share, "steps": self.steps} if self.amplified else {"sample_rate": 1.0, "steps": appearances(rows, share, self.steps, self.delta)}
            own.noise_multiplier = noise_for(self.epsilon, self.delta, **counted)
        return own

    def factors(self, norms: Tensor) -> Tensor:
        """What brings each row's gradient down to the norm C where it is longer, (n,) to (n,)."""
        return (self.clip_norm / norms.clamp_min(1e-30)).clamp_max(1.0)

    def __call__(self, gradient: Parameters, *, rows: int) -> Parameters:
        factor, std = 1.0, self.noise_multiplier * self.clip_norm / rows
        if not self.per_row:
            factor, std = float(self.factors(flat(gradient).norm())), self.noise_multiplier * self.clip_norm
        return {name: factor * g + std * torch.randn(g.shape, generator=self.generator).to(g) for name, g in gradient.items()}


def appearances(rows: int, share: float, steps: int, delta: float) -> int:
    """In how many of ``steps`` random batches a row is at the most, for all of ``rows`` rows, but with probability delta."""
    from scipy.stats import binom

    return min(steps, int(binom.isf(delta / rows, steps, share)))


@cache
def noise_for(epsilon: float, delta: float, *, sample_rate: float, steps: int) -> float:
    """The noise multiplier with which ``steps`` rounds cost at most (epsilon, delta), by Opacus' Rényi accountant."""
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best order may lie at the end of its range
        try:
            return get_noise_multiplier(target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=steps, accountant="rdp", alphas=ORDERS)
        except ValueError as error:
            raise ValueError(f"epsilon={epsilon:g} with delta={delta:g} over {steps} rounds is too small for any noise that the accountant knows; use a larger one") from error


def epsilon_of(noise_multiplier: float, delta: float, *, sample_rate: float, steps: int) -> float:
    """The ε that ``steps`` rounds at this noise cost, by the same accountant."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, sample_rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accountant.get_epsilon(delta, alphas=ORDERS)
