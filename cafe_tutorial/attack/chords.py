"""The last steps of an inversion: Gauss-Newton with one Jacobian for several steps.

h is linear in pieces. Near the solution most ReLUs and maxima are chosen as they are there, so a Jacobian formed
once leads to it in a few steps, each of which costs one evaluation of h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layers import Layer, evaluate
from .local import at_once, local_jacobian

STEPS = 4  # with one Jacobian
RIDGE = 1e-6  # of the mean square of a Jacobian's column, added to each


def chords(layers: list[Layer], target: Tensor, x: Tensor) -> Tensor:
    """Images (n, C, h, w) near x, in [0, 1], whose h is nearer to the target (n, d1), or x where there is none.

    Pixels that stand at 0 or 1 and that the gradient holds there are left alone.
    """
    size = at_once(target.shape[1], x[0].numel(), x.device)
    return torch.cat([_chords(layers, *both) for both in zip(target.split(size), x.split(size))])


@torch.no_grad()
def _chords(layers, target, x) -> Tensor:
    J = local_jacobian(layers, x)  # (n, pixels, d1)
    miss = evaluate(layers, x) - target
    best, least, factor = x, miss.square().sum(1), None
    for _ in range(STEPS):
        gradient = J @ miss[:, :, None]  # (n, pixels, 1)
        if factor is None:
            flat = x.flatten(1)[:, :, None]
            free = (((flat > 0) | (gradient < 0)) & ((flat < 1) | (gradient > 0))).to(J)
            factor = _factor(J * free)
        x = (x - (free * torch.cholesky_solve(gradient * free, factor)).view_as(x)).clamp(0, 1)
        miss = evaluate(layers, x) - target
        now = miss.square().sum(1)
        best = torch.where((now < least).view(-1, 1, 1, 1), x, best)
        least = torch.minimum(now, least)
    return best


def _factor(J: Tensor) -> Tensor:
    """The Cholesky factor of J Jᵀ (n, pixels, pixels), a little added to its diagonal; where J has a row of zeros, the mean."""
    A = J @ J.mT
    diagonal = A.diagonal(dim1=1, dim2=2)  # a view
    mean = diagonal.mean(1, keepdim=True)
    diagonal += torch.where(diagonal > 0, RIDGE, 1.0) * mean.clamp_min(1e-30)
    return torch.linalg.cholesky_ex(A)[0]
