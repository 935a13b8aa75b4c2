"""Adam whose moments and step count belong to a row, for unknowns of which each round touches a few."""

from __future__ import annotations

import torch
from torch import Tensor


class RowAdam:
    """Adam over the rows of a tensor (…, N, d): a round updates only the rows of its batch.

    Parameters
    ----------
    value : the unknowns, updated in place
    learning_rate : η
    row_dim : which dimension counts the N rows
    double_bias_correction, global_step_count : the released code's choices: see ``Hyperparameters``
    """

    def __init__(
        self, value: Tensor, learning_rate: float, *, row_dim: int = 0, betas=(0.9, 0.999), eps: float = 1e-7,
        double_bias_correction: bool = False, global_step_count: bool = False,
    ):  # fmt: skip
        self.value, self.learning_rate, self.row_dim, self.betas, self.eps = value, learning_rate, row_dim, betas, eps
        self.twice, self.global_count = double_bias_correction, global_step_count
        self.first, self.second = torch.zeros_like(value), torch.zeros_like(value)
        self.count = torch.zeros(value.shape[row_dim], dtype=torch.int64, device=value.device)  # steps of each row
        self.steps = 0

    @torch.no_grad()
    def update(self, indices: Tensor, gradient: Tensor) -> None:
        """Step the rows ``indices`` (|s|,) along ``gradient``, shaped as ``value`` with |s| rows."""
        dim, (beta1, beta2) = self.row_dim, self.betas
        self.steps += 1
        self.count[indices] += 1
        shape = [1] * gradient.dim()
        shape[dim] = -1
        t = (torch.full_like(indices, self.steps) if self.global_count else self.count[indices]).double()
        correct1, correct2 = 1 - beta1**t, 1 - beta2**t  # (|s|,)
        rate = self.learning_rate * correct2.sqrt() / correct1
        if self.twice:
            rate = rate * correct2.sqrt() / correct1
        first = self.first.index_select(dim, indices).lerp_(gradient, 1 - beta1)
        second = self.second.index_select(dim, indices).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self.first.index_copy_(dim, indices, first)
        self.second.index_copy_(dim, indices, second)
        floor = (self.eps * correct2.sqrt()).to(gradient).reshape(shape)
        step = first.mul_(rate.to(gradient).reshape(shape)).div_(second.sqrt_().add_(floor))
        self.value.index_copy_(dim, indices, self.value.index_select(dim, indices).sub_(step))
