"""What the theorems predict: Hessians, rates and ranks of steps I and II, and why a convolution's gradients do not tell its input.

A batch is a uniform K-subset of N rows, its indicator a ∈ {0,1}^N. A row is in it with probability
p1 = K/N, two rows together with p2 = K(K-1)/(N(N-1)), and E[a aᵀ] = μ I + p2 1 1ᵀ with μ = p1 - p2.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import at_least_one
from .protocol import SCHEDULES


def probabilities(rows: int, batch_size: int) -> tuple[float, float]:
    """p1 and p2: that a batch holds a given row, and a given pair of rows."""
    at_least_one("rows", rows)
    if at_least_one("batch_size", batch_size) > rows:
        raise ValueError(f"batch_size={batch_size} must be from 1 to {rows}, the number of rows")
    return batch_size / rows, batch_size * (batch_size - 1) / (rows * max(rows - 1, 1))


def step1_hessian(rows: int, batch_size: int) -> Tensor:
    """Theorem 1: the Hessian 2 E[a aᵀ] of step I's expected objective (eq. 7) in one column of V, (N, N), float64."""
    p1, p2 = probabilities(rows, batch_size)
    return 2 * ((p1 - p2) * torch.eye(rows, dtype=torch.float64) + p2)


def step1_eigenvalues(rows: int, batch_size: int) -> tuple[float, float]:
    """The two eigenvalues of :func:`step1_hessian`: 2μ, N - 1 times, and 2K²/N for the constant vector."""
    p1, p2 = probabilities(rows, batch_size)
    return 2 * (p1 - p2), 2 * batch_size**2 / rows


def _transition(rows: int, batch_size: int, learning_rate: float) -> np.ndarray:
    """One round of Algorithm 1 in expectation, on (‖e‖², (1ᵀe)²) for the error e of a column of V: a 2x2 matrix."""
    p1, p2 = probabilities(rows, batch_size)
    step = 2 * learning_rate  # e moves by -step · a (aᵀe)
    c = 2 * step - step**2 * batch_size
    k = step * batch_size
    return np.array([[1 - c * (p1 - p2), -c * p2], [k**2 * (p1 - p2), 1 - 2 * k * p1 + k**2 * p2]])


def step1_error(error: Tensor, batch_size: int, learning_rate: float, rounds: int) -> Tensor:
    """The expected ‖V̂ - V‖² of Algorithm 1 after 0 … ``rounds`` rounds of random batches, exactly: (rounds + 1,).

    error : V̂ - V at the start, (N, d), on the scale that the iteration keeps
    """
    matrix = _transition(len(error), batch_size, learning_rate)
    state = np.array([float(error.double().square().sum()), float(error.double().sum(0).square().sum())])
    history = [state]
    for _ in range(rounds):
        history.append(matrix @ history[-1])
    return torch.from_numpy(np.array(history)[:, 0])


def step1_rate(rows: int, batch_size: int, learning_rate: float) -> float:
    """The factor by which Algorithm 1's root-mean-square error shrinks a round in the long run."""
    return math.sqrt(max(abs(np.linalg.eigvals(_transition(rows, batch_size, learning_rate)))))


def best_learning_rate(rows: int, batch_size: int) -> float:
    """The constant learning rate with the smallest :func:`step1_rate`."""
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(lambda eta: step1_rate(rows, batch_size, eta), bounds=(0, 1 / batch_size), method="bounded", options={"xatol": 1e-9})
    return float(found.x)


def incidence_rank(schedule: str, rows: int, batch_size: int, rounds: int) -> float:
    """The rank of the incidence matrix after ``rounds`` rounds: N, the number of equations, or what the schedule allows.

    ``fixed``: B = ⌈N/K⌉ batches return. ``epochs``: each complete epoch but the first repeats one equation,
    for the batches of every epoch add up to all rows; an upper bound, reached unless K is close to 1 or to N.
    ``random``: no more than the expected number of rows that were drawn at least once, or left out at least
    once; exact for K = 1 and K = N - 1, an upper bound otherwise.
    """
    p1, _ = probabilities(rows, batch_size)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} must be one of {', '.join(SCHEDULES)}")
    batches = -(-rows // batch_size)
    if batch_size == rows:
        return float(min(rounds, 1))
    if schedule == "fixed":
        return float(min(rounds, batches))
    if schedule == "epochs":
        return float(min(rounds - max(0, rounds // batches - 1), rows))
    return min(rounds, rows * (1 - max(1 - p1, p1) ** rounds))


def step2_hessian(V: Tensor, batch_size: int) -> Tensor:
    """Theorem 2: the Hessian 2 E[a aᵀ] ∘ VVᵀ of step II's expected objective (eq. 8) in one column of H, (N, N), float64.

    V : (N, d2), on the scale that the objective uses
    """
    p1, p2 = probabilities(len(V), batch_size)
    gram = V.double() @ V.double().T
    return 2 * (p2 * gram + (p1 - p2) * torch.diag(gram.diagonal()))


def step2_bounds(V: Tensor, batch_size: int) -> tuple[float, float]:
    """Between which values the smallest eigenvalue of :func:`step2_hessian` lies: 2μ min‖v_n‖² and 2 p1 min‖v_n‖²."""
    p1, p2 = probabilities(len(V), batch_size)
    least = float(V.double().square().sum(1).min())
    return 2 * (p1 - p2) * least, 2 * p1 * least


def patient_errors(V: Tensor, H: Tensor, batch_size: int, noise: float, rounds: int, learn: int) -> tuple[float, Tensor]:
    """The expected errors when every entry of each averaged gradient carries noise of standard deviation ``noise``.

    V : (N, d2), H : (N, d1), the true ones. Step I's (AᵀA)⁻¹ is 1 / ((T - N) μ) on average, apart from the constant
    vector. Returns the standard deviation of an entry of V̂ after ``learn`` rounds, and ‖ĥ_n - h_n‖ / ‖h_n‖, (N,), after
    ``rounds``, to first order: the noise of the rounds since, and v̂_n's part along v_n.
    """
    p1, p2 = probabilities(len(V), batch_size)
    entry = batch_size * noise / math.sqrt(max(learn - len(V), 1e-300) * (p1 - p2))
    own = batch_size * noise * math.sqrt(H.shape[1] / ((rounds - learn) * p1)) / H.double().norm(dim=1)
    return entry, (own.square() + entry**2).sqrt() / V.double().norm(dim=1)


def output_gradient_for(
    other: Tensor, weight_gradient: Tensor, bias_gradient: Tensor, padding: int, *, allowed: Tensor | None = None
) -> Tensor:  # fmt: skip
    """An output gradient with which another image has the same gradients at a convolution of stride 1.

    With δ = ∂ℓ/∂Y at the layer's output, the weight gradient is Σ_ij δ_g(i, j) x(i + ·, j + ·) and the bias
    gradient Σ_ij δ_g(i, j). For a given image both are linear in δ, Ck² + 1 equations a filter, and solvable
    as soon as the image's patches are independent.

    other : (C, H, W); weight_gradient : (G, C, k, k); bias_gradient : (G,). Returns the smallest such δ, (G, H', W').

    allowed : bool, (G, H', W'): where δ may differ from zero. The equations need not have a solution then; the δ
    that comes closest is returned.

    Raises
    ------
    ValueError : the image's patches are dependent, as those of a blank image are, or outnumber the positions
    """
    channels, height, width = other.shape
    kernel = weight_gradient.shape[-1]
    patches = F.unfold(other[None].double(), kernel, padding=padding)[0]  # (C k², H'W')
    patches = torch.cat([patches, torch.ones_like(patches[:1])])
    if allowed is None and int(torch.linalg.matrix_rank(patches, rtol=1e-10)) < len(patches):
        equations, unknowns = patches.shape
        why = f"{equations} equations a filter for {unknowns} positions" if equations > unknowns else "use an image with more structure"
        raise ValueError(f"other has dependent {kernel}x{kernel} patches, so not every gradient can be had from it: {why}")
    wanted = torch.cat([weight_gradient.double().flatten(1), bias_gradient.double()[:, None]], 1)  # (G, C k² + 1)
    if allowed is None:
        delta = torch.linalg.lstsq(patches, wanted.T, driver="gelsd").solution.T  # (G, H'W')
    else:
        masked = patches * allowed.flatten(1)[:, None]  # (G, C k² + 1, H'W')
        delta = torch.linalg.lstsq(masked, wanted[:, :, None], driver="gelsd").solution[..., 0]
    return delta.reshape(len(delta), height + 2 * padding - kernel + 1, width + 2 * padding - kernel + 1)
