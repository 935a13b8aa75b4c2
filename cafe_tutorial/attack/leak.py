"""What an attack hands back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass
class Leak:
    """The attacker's result, with what the attacker itself knows about its quality.

    Attributes
    ----------
    method : name of the attack
    slices : M tensors (N, …): the recovered part of every row, worker by worker
    labels : Tensor, shape (N,), int64: the recovered class numbers
    leaks : bool Tensor, shape (N, M): False where the attack found the slice's gradient v_n to be zero
        within the precision of its solve, so that nothing of the slice can be known from it
    residual : Tensor, shape (N, M): ‖h(x̂) - ĥ‖² / ‖ĥ‖², NaN where it is not defined
    certified : bool Tensor, shape (N, M): slices that the attacker itself can vouch for
    rounds : how many rounds were observed
    notes : what a reader of the result should know
    exchangeable : Tensor, shape (N,), or None: rows with the same number cannot be told apart by what was seen,
        and may stand in each other's place
    numbers : Tensor, shape (N,), or None: the row numbers that the leak is about, where these are not all rows
    """

    method: str
    slices: list[Tensor]
    labels: Tensor
    leaks: Tensor
    residual: Tensor
    certified: Tensor
    rounds: int
    notes: list[str] = field(default_factory=list)
    exchangeable: Tensor | None = None
    numbers: Tensor | None = None

    def to(self, device: torch.device | str) -> Leak:
        """The same leak with its tensors on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("labels", "leaks", "residual", "certified")}
        return replace(self, slices=[s.to(device) for s in self.slices], notes=list(self.notes), **moved)
