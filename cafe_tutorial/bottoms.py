"""The networks of one worker: h(Θ_c, ·), the first fully connected layer, and the upper layers (section 3.1 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

Parameters = dict[str, Tensor]


class BottomModel(nn.Module):
    """One worker's model: ``upper(first(representation(x)))``.

    Parameters
    ----------
    representation : module, one row's part to h, shape (n, d1); an identity for tables
    first : nn.Linear(d1, d2), the layer whose gradients leak h
    upper : module, (n, d2) to the worker's output (n, outputs)
    """

    def __init__(self, representation: nn.Module, first: nn.Linear, upper: nn.Module):
        super().__init__()
        self.representation, self.first, self.upper = representation, first, upper

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (n, …) to h (n, d1) and the output (n, outputs)."""
        h = self.representation(x)
        return h, self.upper(self.first(h))


def convolutional_bottom(part_shape: Sequence[int], *, d2: int = 256, outputs: int = 10) -> BottomModel:
    """The released network for a tile (C, h, w): two 5x5 convolutions of 64 and 128 filters, each with
    ReLU and 2x2 pooling ("same"), then fully connected layers of ``d2``, 64 and ``outputs`` units."""
    channels, height, width = part_shape
    flat = 128 * math.ceil(height / 4) * math.ceil(width / 4)
    representation = nn.Sequential(
        nn.Conv2d(channels, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(64, 128, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(),
    )  # fmt: skip
    upper = nn.Sequential(nn.ReLU(), nn.Linear(d2, 64), nn.ReLU(), nn.Linear(64, outputs), nn.ReLU())
    return BottomModel(representation, nn.Linear(flat, d2), upper)


def smooth_bottom(part_shape: Sequence[int], *, d2: int = 256, outputs: int = 10) -> BottomModel:
    """A network like the one DLG was shown on, for a tile (C, h, w): three 5x5 convolutions of 12 filters with sigmoids, the
    first two of stride 2, then fully connected layers of ``d2`` and ``outputs`` units. Its second derivatives never vanish."""
    channels, height, width = part_shape
    layers = [nn.Conv2d(channels, 12, 5, 2, 2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, 2, 2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, 1, 2), nn.Sigmoid()]
    flat = 12 * math.ceil(height / 4) * math.ceil(width / 4)
    return BottomModel(nn.Sequential(*layers, nn.Flatten()), nn.Linear(flat, d2), nn.Sequential(nn.Sigmoid(), nn.Linear(d2, outputs)))


def mlp_bottom(width: int, *, d2: int = 256, outputs: int = 10, activation: str = "tanh") -> BottomModel:
    """A bottom model for ``width`` table columns: h is the record itself, then ``d2``, 64 and ``outputs`` units."""
    kinds = {"tanh": nn.Tanh, "relu": nn.ReLU}
    if activation not in kinds:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(kinds)}")
    act = kinds[activation]
    upper = nn.Sequential(act(), nn.Linear(d2, 64), act(), nn.Linear(64, outputs), act())
    return BottomModel(nn.Identity(), nn.Linear(width, d2), upper)


def glorot(module: nn.Module, generator: torch.Generator) -> None:
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)


def uniform(module: nn.Module, generator: torch.Generator) -> None:
    for value in module.parameters():
        nn.init.uniform_(value, -0.5, 0.5, generator=generator)


class Taps(nn.Module):
    """A representation whose forward pass gives the outputs of its convolutions, (n, channels, h, w) each."""

    def __init__(self, representation: nn.Sequential):
        super().__init__()
        self.representation = representation

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = []
        for layer in self.representation:
            x = layer(x)
            found += [x] * isinstance(layer, nn.Conv2d)
        return tuple(found)


@dataclass(frozen=True)
class Piece:
    """A part of a bottom model as a function: ``module`` with these ``parameters`` in place of its own."""

    module: nn.Module
    parameters: Parameters

    def __call__(self, x: Tensor) -> Tensor:
        return functional_call(self.module, self.parameters, (x,))


def outputs_of(bottom: BottomModel) -> int:
    """How many outputs a bottom model has."""
    return [layer for layer in bottom.upper if isinstance(layer, nn.Linear)][-1].out_features
