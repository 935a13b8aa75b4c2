"""What stands between a worker and the server: a defence changes what one worker uploads in one round, and nothing else."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..model import Parameters


class Defense:
    """A callable on one party's upload.

    Each party works on a copy of its own, :meth:`for_party`, with its own generator and state, so that no party's upload
    depends on another's data or draws.

    Attributes
    ----------
    per_row : whether :meth:`factors` scales the gradient of every row before they are averaged
    """

    per_row = False

    def __init__(self, *, seed: int = 0):
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def for_party(self, party: int, *, rows: int, batch_size: int) -> Defense:
        """The copy of one worker, 0 to M - 1, or of the head's holder, M; rows : N; batch_size : K."""
        own = copy.copy(self)
        own.generator = torch.Generator().manual_seed(self.seed * 65_537 + party)
        return own

    def factors(self, norms: Tensor) -> Tensor:
        """From the norms of this party's gradients of each row's own loss, (n,), to what each is multiplied by before the average."""
        raise NotImplementedError

    def __call__(self, gradient: Parameters, *, rows: int) -> Parameters:
        """What is uploaded in place of the averaged gradient of a batch of ``rows`` rows, the same names and shapes."""
        raise NotImplementedError


def flat(gradient: Parameters) -> Tensor:
    """All entries of one party's gradient, (D,)."""
    return torch.cat([g.flatten() for g in gradient.values()])


def unflat(vector: Tensor, like: Parameters) -> Parameters:
    """The inverse of :func:`flat`, with the names and shapes of ``like``."""
    parts = vector.split([g.numel() for g in like.values()])
    return {name: part.view_as(g) for part, (name, g) in zip(parts, like.items())}


def positive(name: str, value: float, *, most: float = float("inf")) -> float:
    """The value, if it is a number above 0 and at most ``most``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise ValueError(f"{name}={value!r} must be a number above 0" + (f" and at most {most:g}" if most < float("inf") else ""))
    return float(value)


def one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")
    return value
