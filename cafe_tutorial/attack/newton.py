"""The last step of an image into spans that hardly tell it from its neighbours: Gauss-Newton with bounds.

h is linear in pieces. Within the right one a single least-squares problem over [0, 1] leads to the solution, however badly
conditioned it is; the number of gradient steps grows with the square of the condition number.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import lsq_linear
from torch import Tensor
from torch.func import vjp

from .invert import GOAL
from .jacobians import forward, jacobian, jacobians_at_once

STEPS = 6  # at most
LENGTHS = (1.0, 0.5, 0.1)  # of a step, the best of them is taken
GAIN = 0.5  # a step that leaves more of ρ than this is the last one
LARGE = 1024  # pixels above which a least-squares problem with bounds takes too long
CONJUGATE = 200  # conjugate gradients for a step then
TOGETHER = 16  # large images at a time
ROOM = 1e-9  # a pixel's interval has at least this width, for the solver


def gauss_newton(outside, x: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Images (n, C, h, w) with smaller ρ near x, and their ρ (n,).

    outside : an :class:`~cafe_tutorial.attack.search.Outside` for the images; x : in [0, 1]; rho : ρ(x)
    """
    x, rho, left = x.clone(), rho.clone(), torch.arange(len(x), device=x.device)
    large = x[0].numel() > LARGE
    chunk = TOGETHER if large else jacobians_at_once(len(outside.bases) * outside.bases[0].shape[-2], x[0].numel())
    step = _conjugate if large else _moves
    for _ in range(STEPS):
        if not len(left):
            break
        moves = torch.cat([step(outside.at(rows), x[rows]) for rows in left.split(chunk)])
        tried = torch.stack([(x[left] + length * moves).clamp(0, 1) for length in LENGTHS])
        best, which = torch.stack([outside.at(left).relative(t) for t in tried]).min(0)
        go_on = (best < GAIN * rho[left]) & (best > GOAL)
        better = best < rho[left]
        x[left[better]], rho[left[better]] = tried[which, torch.arange(len(left), device=x.device)][better], best[better]
        left = left[go_on]
    return x, rho


def _moves(outside, x: Tensor) -> Tensor:
    """What to add to each image for the linearized P h̃ to be smallest within [0, 1]; shaped like x."""
    r = outside(x).double()
    Q, R = torch.linalg.qr(jacobian(outside, x).mT)  # (n, D, pixels), (n, pixels, pixels)
    right = -(Q.mT @ r[:, :, None])[:, :, 0]
    moves = [_bounded(*one) for one in zip(R.cpu().numpy(), right.cpu().numpy(), x.flatten(1).double().cpu().numpy())]
    return torch.from_numpy(np.array(moves)).to(x).view_as(x)


def _bounded(A: np.ndarray, b: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """argmin ‖A d - b‖ for 0 ≤ pixels + d ≤ 1, solved in units in which A and b have length one: the solver's tolerances are absolute."""
    size, length = np.linalg.norm(A, 2), np.linalg.norm(b)
    if size == 0 or length == 0:
        return np.zeros_like(b)
    unit = length / size
    bounds = np.minimum(-pixels, -ROOM) / unit, np.maximum(1 - pixels, ROOM) / unit
    return unit * lsq_linear(A / size, b / length, bounds=bounds, tol=1e-14, method="bvls").x


def _conjugate(outside, x: Tensor) -> Tensor:
    """As :func:`_moves`, by conjugate gradients over the pixels that are not held at 0 or 1."""
    def dot(a, b):
        return (a * b).flatten(1).sum(1).view(-1, *[1] * (a.dim() - 1))

    residual, pull = vjp(outside, x)
    gradient = pull(residual)[0]
    free = ((x > 0) | (gradient < 0)) & ((x < 1) | (gradient > 0))
    left, moves, downhill = -residual, torch.zeros_like(x), -gradient * free
    direction, size = downhill, dot(downhill, downhill)
    for _ in range(CONJUGATE):
        along = forward(outside, x, direction)
        length = size / dot(along, along)[..., None, None].clamp_min(1e-30)
        moves, left = moves + length * direction, left - length.flatten(1) * along
        downhill = pull(left)[0] * free
        old, size = size, dot(downhill, downhill)
        direction = downhill + size / old.clamp_min(1e-30) * direction
    return moves.detach()
