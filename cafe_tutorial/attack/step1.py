"""Step I: gradients at the first layer's outputs (Algorithm 1, eq. 6 and 7), and its exact solution.

The first layer's bias gradient of a batch s is b = Σ_{n∈s} v_n / |s|, where v_n = ∂ℓ_n/∂u_n is the
gradient of row n's own loss. Algorithm 1 follows the gradient of ‖Σ_{n∈s} V_n - b‖². The exact
solution treats all rounds at once: with A the 0/1 incidence matrix, A V = |s| b is a linear system.
"""

from __future__ import annotations

import torch
from torch import Tensor


def step1_update(V: Tensor, indices: Tensor, b: Tensor, *, learning_rate: float) -> Tensor:
    """One iteration of Algorithm 1, in place; returns the objective ‖Σ_{n∈s} V_n - b‖² (eq. 7).

    V : (…, N, d2), estimates of v_n / K; indices : (|s|,); b : (…, d2), the batch's bias gradients.
    """
    error = V[..., indices, :].sum(-2) - b  # (…, d2)
    V[..., indices, :] -= 2 * learning_rate * error[..., None, :]  # the same step for each row of the batch
    return error.square().sum()


class BiasEquations:
    """The linear system A V = B of step I, collected round by round, with its rank.

    Parameters
    ----------
    rows : N
    """

    def __init__(self, rows: int):
        self.rows, self.rank, self.last_gain = rows, 0, 0
        self._indices: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._basis = torch.zeros(0, rows, dtype=torch.float64)  # (capacity, N), orthonormal rows
        self._system: tuple[Tensor, Tensor] | None = None
        self._inverse: Tensor | None = None

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def incidence(self) -> Tensor:
        """A, shape (T, N), float64 of zeros and ones."""
        A = torch.zeros(len(self), self.rows, dtype=torch.float64)
        for t, s in enumerate(self._indices):
            A[t, s] = 1
        return A

    def add(self, indices: Tensor, b: Tensor) -> None:
        """Add a round: its rows (|s|,) and its averaged bias gradients b (D,), of all layers side by side."""
        self._indices.append(indices.cpu())
        self._sums.append(b.detach().double().cpu() * len(indices))
        self._system = self._inverse = None
        if self.rank < self.rows and self._enlarge(indices.cpu()):
            self.rank += 1
            self.last_gain = len(self)

    def _enlarge(self, indices: Tensor) -> bool:
        """Orthogonalize the new row of A against the basis, twice; keep it when something is left."""
        row = torch.zeros(self.rows, dtype=torch.float64)
        row[indices] = 1
        basis = self._basis[: self.rank]
        rest = row - (basis @ row) @ basis
        rest = rest - (basis @ rest) @ basis
        if rest.norm() < 1e-8 * row.norm():
            return False
        if self.rank == len(self._basis):
            room = torch.zeros(min(self.rows, max(64, self.rank)), self.rows, dtype=torch.float64)
            self._basis = torch.cat([self._basis, room])
        self._basis[self.rank] = rest / rest.norm()
        return True

    def condition(self) -> float:
        """Condition number of A: its largest over its N-th singular value, infinite while rank < N."""
        if self.rank < self.rows:
            return float("inf")
        values = torch.linalg.svdvals(self.incidence)
        return float(values[0] / values[-1])

    @property
    def system(self) -> tuple[Tensor, Tensor]:
        """A (T, N) and B (T, D) of the rounds so far, made once."""
        if self._system is None:
            self._system = self.incidence, torch.stack(self._sums)
        return self._system

    @property
    def inverse(self) -> Tensor:
        """(AᵀA)⁻¹, shape (N, N), made once."""
        if self._inverse is None:
            A, _ = self.system
            self._inverse = torch.linalg.inv(A.T @ A)
        return self._inverse

    def solve(self, *, eps: float) -> tuple[Tensor, Tensor]:
        """Least squares in float64: V (N, D), and the expected size of the errors in B by column, (D,).

        The latter follows from the rounding ``eps`` of the gradients that came in and from what the
        solution leaves over.
        """
        A, B = self.system  # (T, N), (T, D)
        V = torch.linalg.lstsq(A, B).solution
        noise = eps * B.square().mean(0).sqrt()  # (D,)
        freedom = len(self) - self.rows
        if freedom > 0:
            noise = torch.maximum(noise, ((A @ V - B).square().sum(0) / freedom).sqrt())
        return V, noise

    def spread(self) -> Tensor:
        """By what factor errors in B grow into errors of v_n, (N,): the root of the diagonal of (AᵀA)⁻¹."""
        return self.inverse.diagonal().clamp_min(0).sqrt()

    def perturbations(self, columns: slice, noise: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """How some columns of V move when B is perturbed by its own errors, ``count`` draws: (count, N, d).

        noise : (d,), as from :meth:`solve`. One half of each draw's power is independent from entry to
        entry; the other keeps the direction of a round's gradient, as the rounding of a row's loss does.
        """
        A, B = self.system
        B = B[:, columns]  # (T, d)
        independent = torch.randn(count, *B.shape, generator=generator, dtype=torch.float64) * noise
        relative = noise.norm() / B.square().sum(1).mean().sqrt().clamp_min(1e-300)
        along = torch.randn(count, len(B), 1, generator=generator, dtype=torch.float64) * relative * B
        return self.inverse @ (A.T @ (independent + along))
