"""What one batch's gradient says about its rows without any other round: a linear span.

With the bias gradient as a last row, K G̃ = K [G; bᵀ] = Σ_{n∈s} h̃_n v_nᵀ with h̃_n = [h_n; 1]. Its column space
is spanned by the h̃_n of the batch's rows, as long as their v_n are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CUT = 4.0  # a singular value counts when it exceeds the noise floor this many times


@dataclass(frozen=True)
class Span:
    """The column space of one worker's K G̃ in one round, its last row multiplied by ``scale``.

    Attributes
    ----------
    rows : Tensor, shape (|s|,), the batch, on the CPU
    basis : Tensor, shape (d1 + 1, k), float64, orthonormal; k ≤ |s|, less where a row adds nothing or the v_n of rows are dependent
    values : Tensor, shape (k,), the singular values, largest first
    core : Tensor, shape (k, d2): K G̃ = basis @ core
    noise : standard deviation of an entry's error, from the singular values beyond |s|
    scale : what the last row was multiplied by
    """

    rows: Tensor
    basis: Tensor
    values: Tensor
    core: Tensor
    noise: float
    scale: float

    def blur(self, direction: Tensor) -> Tensor:
        """The expected distance from the span of unit vectors that truly lie in it, (…, d1 + 1) to (…,).

        An error E of K G̃ turns the basis by E W S⁻¹, so a vector U c leaves the span by about σ √(d1 + 1) ‖S⁻¹ c‖.
        """
        coefficients = direction @ self.basis / self.values
        return self.noise * len(self.basis) ** 0.5 * coefficients.norm(dim=-1)


def balance(weight: Tensor, bias: Tensor) -> float:
    """The scale with which the last row weighs as much as the others together; 1 where either gradient is zero."""
    sizes = float(weight.double().norm()), float(bias.double().norm())
    return sizes[0] / sizes[1] if min(sizes) > 0 else 1.0


def span(rows: Tensor, weight: Tensor, bias: Tensor, *, scale: float) -> Span:
    """The span of one round.

    rows : (|s|,); weight : (d2, d1) and bias : (d2,), the averaged gradients; scale : for the last row, so
    that it weighs about as much as the others
    """
    G = torch.cat([weight.T.double(), scale * bias[None].double()]) * len(rows)  # (d1 + 1, d2)
    squares, vectors = torch.linalg.eigh(G.T @ G)
    values, vectors = squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1)
    beyond = values[len(rows) :]  # of a matrix of rank |s| these are noise alone
    eps = torch.finfo(weight.dtype).eps
    floor = float(beyond[0]) if len(beyond) else 0.0
    floor = max(floor, 0.25 * eps * float(values[0]))
    kept = int((values[: len(rows)] > CUT * floor).sum())
    if len(beyond):
        noise = float(beyond.square().sum() / ((len(G) - len(rows)) * len(beyond))) ** 0.5
    else:
        noise = floor / (len(G) ** 0.5 + G.shape[1] ** 0.5)
    basis, triangle = torch.linalg.qr((G @ vectors[:, :kept]) / values[:kept])  # weak directions are not orthogonal before
    core = triangle @ (values[:kept, None] * vectors[:, :kept].T)
    return Span(rows.cpu(), basis, values[:kept], core, noise, scale)


def common(spans: list[Span]) -> tuple[Tensor, Tensor]:
    """Where the spans meet: directions (d1 + 1, k) of unit length and, for each, how far it misses, smallest first.

    With W = [U_1 … U_r], the eigenvectors of W Wᵀ with eigenvalue r lie in every span; the defect r - λ of the
    others is the sum of their squared distances from the spans.
    """
    W = torch.cat([s.basis for s in spans], 1)
    values, vectors = torch.linalg.eigh(W.T @ W)
    return (W @ vectors.flip(1)) / values.flip(0).clamp_min(1e-30).sqrt(), (len(spans) - values.flip(0)).clamp_min(0)


def apart(one: Tensor, others: Tensor) -> float:
    """How far a unit vector (k,) is from the span of others (f, k)."""
    if not len(others):
        return 1.0
    directions = torch.linalg.qr(others.T)[0]
    return float((one - directions @ (directions.T @ one)).norm())
