"""Jacobians of h: formed, and what their smallest singular value says about an image.

As far as h is linear, an error ‖δh‖ of h allows an error of x of up to ‖δh‖ / σ_min.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp, vmap

from ..model import full_precision
from .layers import evaluate, layers_of, spare, thinned
from .local import at_once, local_jacobian

COLUMNS = 64  # of Jacobians in forward mode, formed in one batch


def gains(representation: Callable[[Tensor], Tensor], x: Tensor, *, inset: float = 1e-3) -> tuple[Tensor, Tensor]:
    """By how much h changes at the least and at the most for a unit change of x: σ_min and σ_max of its Jacobian, (n,) each.

    σ_min is zero where part of x does not reach h. Images are first moved ``inset`` inside [0, 1], for at a black pixel
    ReLUs stand at their kink and autograd's slope there is zero.
    """
    width = representation(x[:1]).shape[1]
    parts = x.split(jacobians_at_once(width, x[0].numel()))
    values = torch.cat([torch.linalg.eigvalsh(_gram(jacobian(representation, _inside(p, inset)))) for p in parts])
    values = values.clamp_min(0).sqrt().to(x)
    return values[:, 0], values[:, -1]


def tells_apart(representation: Callable[[Tensor], Tensor], x: Tensor, least: Tensor, *, inset: float = 1e-3) -> Tensor:
    """Whether σ_min, as for :func:`gains`, is above ``least`` (n,), positive; (n,), bool.

    JᵀJ - least² 1 is then positive definite, which a Cholesky factorization shows. A part of h's entries is tried first: its
    σ_min is never above that of all of them, so it can say yes but not no.
    """
    layers, width = layers_of(representation), representation(x[:1]).shape[1]
    every = spare(layers, width, x[0].numel()) if layers else 1
    passed = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for share in {every: 0, 1: 0}:
        left = (~passed).nonzero()[:, 0]
        for rows in left.split(jacobians_at_once(width // share, x[0].numel())) if len(left) else ():
            A = _gram(jacobian(representation, _inside(x[rows], inset), every=share))
            A.diagonal(dim1=1, dim2=2).sub_(least[rows].double().square()[:, None])
            passed[rows] = torch.linalg.cholesky_ex(A)[1] == 0
    return passed


def jacobians_at_once(width: int, pixels: int) -> int:
    """How many Jacobians, (pixels, width) each, fit into 200 MB of float64."""
    return max(1, 25_000_000 // (width * pixels))


def _inside(x: Tensor, inset: float) -> Tensor:
    return x.clamp(inset, 1 - inset) if x.dim() == 4 else x


def _gram(J: Tensor) -> Tensor:
    return J @ J.mT


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor, *, every: int = 1) -> Tensor:
    """The Jacobian at each x (n, *shape), transposed: (n, pixels, D), float64.

    From windows of pixels where the function allows it, then with every ``every``-th filter of its last convolution alone
    if so asked; else in forward mode, COLUMNS images at once.
    """
    layers = layers_of(function)
    if layers is not None:
        with full_precision(), torch.no_grad():
            few = thinned(layers, every)
            size = at_once(evaluate(few, x[:1]).shape[1], x[0].numel(), x.device)
            return torch.cat([local_jacobian(few, part).double() for part in x.split(size)])
    units = torch.eye(x[0].numel(), dtype=x.dtype, device=x.device).view(-1, *x.shape[1:])

    columns = vmap(lambda unit: forward(function, x, unit.expand_as(x)), chunk_size=max(1, COLUMNS // len(x)))(units)  # (pixels, n, D)
    return columns.transpose(0, 1).double()


def forward(function: Callable[[Tensor], Tensor], x: Tensor, d: Tensor) -> Tensor:
    """The Jacobian at each x times d: J d, (n, D)."""
    with full_precision(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)  # torch's own, at its first forward mode
        return jvp(function, (x,), (d,))[1]
