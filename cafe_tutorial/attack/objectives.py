"""What earlier attacks compare: one class a work, the distance between two gradients and what is added to it.

The fake rows' gradient is to match the round's. Each objective has a ``distance`` of the two, which all its settings
share, and a ``prior`` on the fake rows. Squared distances are relative to the real gradient's squared norm: this moves
no minimum, and a weight then means the same for every network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .step3 import gradient_distance

Statistics = list[list[tuple[Tensor, Tensor]]]  # by group and convolution: mean and variance, (M_g, channels) each
RATES = (0.1, 0.03, 0.01, 0.003)
TWO = (0.1, 0.03)


@dataclass(frozen=True)
class Batch:
    """The fake rows of one batch.

    x : a tensor (M_g, n, …) a group; features : by group, every convolution's outputs (M_g, n, channels, h, w), only
    where the objective asks for them; mean : as x, the pixel mean over the members of a group of attacks, or None
    """

    x: list[Tensor]
    features: list[tuple[Tensor, ...]]
    mean: list[Tensor] | None


@dataclass(frozen=True)
class DLG:
    """Deep leakage from gradients: D = Σ ‖∇' - ∇‖² over all of Θ. Fake labels are softmax(ŷ).

    ``rate`` is the learning rate; with ``decay`` it falls to a tenth at 3/8, 5/8 and 7/8 of the rounds. Attributes of the
    class: ``grid``, the settings that are tried; ``sign``, whether Adam sees only the gradient's sign; ``quasi_newton``, whether L-BFGS is used where one batch repeats; ``one_row``, whether the label is read off the head's
    gradient; ``members``, how many attacks run side by side; ``statistics``, whether the prior needs published ones.
    """

    rate: float = 0.1
    decay: bool = False
    grid: ClassVar[tuple[dict, ...]] = tuple({"rate": r} for r in RATES)
    sign: ClassVar[bool] = False
    quasi_newton: ClassVar[bool] = True
    one_row: ClassVar[bool] = False
    members: ClassVar[int] = 1
    statistics: ClassVar[bool] = False

    def distance(self, fake: Sequence[Tensor], real: Sequence[Tensor]) -> Tensor:
        return gradient_distance(fake, real) / sum(r.square().sum() for r in real)

    def prior(self, batch: Batch, statistics: Statistics | None) -> Tensor | float:
        return 0.0


@dataclass(frozen=True)
class IDLG(DLG):
    """Improved DLG: one row, whose label is the class with a negative head gradient; only x̂ is fitted."""

    one_row: ClassVar[bool] = True


@dataclass(frozen=True)
class Cosine(DLG):
    """Inverting gradients: 1 - cos(∇', ∇) over all tensors together, plus ``tv`` times the mean absolute differences
    of neighbouring pixels, down and across; Adam on the gradient's sign."""

    tv: float = 1e-4
    grid: ClassVar[tuple[dict, ...]] = tuple({"rate": r, "decay": d} for r in TWO for d in (True, False))
    sign: ClassVar[bool] = True
    quasi_newton: ClassVar[bool] = False

    def distance(self, fake, real):
        inner = sum((f * r).sum() for f, r in zip(fake, real))
        lengths = [sum(v.square().sum() for v in side) for side in (fake, real)]
        return 1 - inner * lengths[0].clamp_min(1e-38).rsqrt() * lengths[1].clamp_min(1e-38).rsqrt()

    def prior(self, batch, statistics):
        images = [x for x in batch.x if x.dim() == 5]
        return self.tv * sum(len(x) * _mean_variation(x) for x in images) / max(1, sum(len(x) for x in images))


@dataclass(frozen=True)
class SAPAG(DLG):
    """Self-adaptive attack: Σ_l (1 - exp(-Δ_l / σ_l)) with Δ_l the mean of a layer's squared differences and σ_l
    ``width`` times the mean of its real squared entries. With sums in their place the exponential would saturate."""

    width: float = 1.0
    quasi_newton: ClassVar[bool] = False

    def distance(self, fake, real):
        return sum(1 - torch.exp(-(f - r).square().mean() / (self.width * r.square().mean() + 1e-38)) for f, r in zip(fake, real))


@dataclass(frozen=True)
class BatchNorm(DLG):
    """GradInversion's eq. 10: the squared distance, plus ``weight`` times Σ_l ‖μ_l - μ̄_l‖ + ‖σ²_l - σ̄²_l‖, the
    distance of the fake batch's statistics from published ones, worker by worker and averaged over the workers."""

    weight: float = 1e-2
    grid: ClassVar[tuple[dict, ...]] = tuple({"rate": r, "weight": w} for r in TWO for w in (1e-1, 1e-3))
    quasi_newton: ClassVar[bool] = False
    statistics: ClassVar[bool] = True

    def prior(self, batch, statistics):
        total, workers = 0.0, sum(len(x) for x in batch.x)
        for layers, known in zip(batch.features, statistics):
            for z, (mean, variance) in zip(layers, known):
                own = z.mean((1, 3, 4)), z.var((1, 3, 4), unbiased=False)  # (M_g, channels)
                total = total + sum(_norm(o - k).sum() for o, k in zip(own, (mean, variance)))
        return self.weight * total / workers


@dataclass(frozen=True)
class GroupConsistency(DLG):
    """GradInversion's eq. 11: the squared distance, plus ``weight`` times ‖x̂ - E(x̂)‖ of each row, E the pixel mean
    over three attacks that run side by side from different starts; images are not registered, nor rows put in order. The mean is the result."""

    weight: float = 1e-2
    grid: ClassVar[tuple[dict, ...]] = tuple({"rate": r, "weight": w} for r in TWO for w in (1e-1, 1e-3))
    quasi_newton: ClassVar[bool] = False
    members: ClassVar[int] = 3

    def prior(self, batch, statistics):
        return self.weight * sum(_norm((x - e).flatten(2)).mean() for x, e in zip(batch.x, batch.mean))


def _mean_variation(x: Tensor) -> Tensor:
    """Mean absolute difference to the pixel below plus that to the pixel beside, of images (M_g, n, C, h, w)."""
    steps = [x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1]]
    return sum((s.abs().mean() for s in steps if s.numel()), x.new_zeros(()))


def _norm(v: Tensor) -> Tensor:
    """‖v‖ over the last dimension, with a gradient at zero."""
    return (v.square().sum(-1) + 1e-12).sqrt()


OBJECTIVES = {"dlg": DLG, "idlg": IDLG, "cosine": Cosine, "sapag": SAPAG, "bn": BatchNorm, "gc": GroupConsistency}
