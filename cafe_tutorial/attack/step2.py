"""Step II: the inputs of the first layer (Algorithm 2, eq. 8), and their exact solution.

The first layer's weight gradient of a batch s is G = Σ_{n∈s} h_n v_nᵀ / |s|. Once V is known this
is linear in H. PyTorch stores the transpose, Gᵀ of shape (d2, d1).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def step2_gradient(H_s: Tensor, V_s: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """The objective ‖V_sᵀ H_s - Gᵀ‖² of eq. 8 and its gradient in H_s.

    H_s : (…, |s|, d1), estimates of h_n; V_s : (…, |s|, d2), estimates of v_n / |s|;
    G : (…, d2, d1), weight gradients as PyTorch stores them. Returns (objective, (…, |s|, d1)).
    """
    error = V_s.transpose(-2, -1) @ H_s - G  # (…, d2, d1)
    return error.square().sum(), 2 * (V_s @ error)


class WeightEquations:
    """The weight gradients of a cover of the rows, for all workers, and their exact solution.

    Every batch is kept while ``memory`` lasts; after that the batches whose rows are all held twice
    are given up first, so that each row seen stays in at least one batch that is held.

    Parameters
    ----------
    rows : N
    memory : bytes for weight gradients
    """

    def __init__(self, rows: int, *, memory: float = 2**30):
        self.rows, self.memory = rows, memory
        self.held: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self.cover = torch.zeros(rows, dtype=torch.int64)  # in how many held batches each row is
        self._next = 0
        self._bytes = 0

    def add(self, indices: Tensor, gradients: list[Tensor]) -> None:
        """Add a round: its rows (|s|,) and one averaged weight gradient (M_g, d2, d1) a group of workers."""
        rows = indices.cpu()
        size = _bytes(gradients)
        if self._bytes + size > self.memory and bool((self.cover[rows] > 0).all()):
            return
        self.held[self._next] = (rows, [g.detach().clone() for g in gradients])
        self._next += 1
        self._bytes += size
        self.cover[rows] += 1
        if self._bytes > self.memory:
            self._give_up()

    def _give_up(self) -> None:
        """Drop batches that the cover does not need, oldest first, until the memory suffices."""
        for key in list(self.held):
            if self._bytes <= self.memory:
                return
            rows, gradients = self.held[key]
            if bool((self.cover[rows] > 1).all()):
                self.cover[rows] -= 1
                self._bytes -= _bytes(gradients)
                del self.held[key]

    def solve(
        self, g: int, i: int, V: Tensor, live: Tensor, *, eps: float, perturbations: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Least squares over all held batches at once, in float64, for the i-th worker of group g.

        V : (N, d2), gradients v_n of the rows' own losses; live : (N,), the rows to solve for;
        perturbations : (draws, N, d2), how V may be wrong. Returns H (N, d1), zero where not live, and
        the expected error ‖ĥ_n - h_n‖, (N,), infinite where the batches leave h_n open. With A the
        incidence of the held batches, the normal matrix is (AᵀA) ∘ (VVᵀ), and a change δV of V moves H
        by -((AᵀA) ∘ (VVᵀ))⁻¹ ((AᵀA) ∘ (V δVᵀ)) H to first order.
        """
        batches = [(rows, gradients[g][i]) for rows, gradients in self.held.values()]
        device = batches[0][1].device
        V = (V.cpu() * live.cpu()[:, None]).to(device, torch.float64)
        d1 = batches[0][1].shape[1]
        A = torch.zeros(len(batches), self.rows, dtype=torch.float64, device=device)
        right = torch.zeros(self.rows, d1, dtype=torch.float64, device=device)
        power = 0.0
        for t, (rows, G) in enumerate(batches):
            total = G.double() * len(rows)  # (d2, d1), Σ v_n h_nᵀ
            A[t, rows] = 1
            right[rows] += V[rows] @ total
            power += float(total.square().sum())

        def miss(H: Tensor) -> float:
            return sum(float((G.double() * len(rows) - V[rows].T @ H[rows]).square().sum()) for rows, G in batches)

        return pooled(V, right, A.T @ A, rounds=len(batches), power=power, miss=miss, eps=eps, perturbations=perturbations)


def pooled(
    V: Tensor, right: Tensor, together: Tensor, *, rounds: int, power: float, miss: Callable[[Tensor], float], eps: float, perturbations: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The pooled least-squares solution and its expected errors: see :meth:`WeightEquations.solve`.

    V : (N, d2), zero for the rows that are not solved for; right : (N, d1), Σ_t diag(a_t) V |s| G_t; together : (N, N), in how many
    of the ``rounds`` batches two rows meet; power : Σ ‖|s| G_t‖²; miss : from H to Σ ‖|s| G_t - Σ_n v_n h_nᵀ‖²
    """
    (d2, d1), seen = (V.shape[1], right.shape[1]), (V.abs().amax(1) > 0) & (together.diagonal() > 0)
    inverse, scale, null = _invert_gram(together * (V @ V.T) + torch.diag((~seen).double()))
    H = inverse @ right * seen[:, None]  # (N, d1)
    equations, unknowns = rounds * d2, int(seen.sum())
    noise = eps * (power / (equations * d1)) ** 0.5
    if equations > unknowns:
        noise = max(noise, (max(miss(H), 0.0) / ((equations - unknowns) * d1)) ** 0.5)
    variance = noise**2 * d1 * inverse.diagonal().clamp_min(0)
    if perturbations is not None:
        moved = [inverse @ ((together * (V @ dV.to(V).T)) @ H) for dV in perturbations]
        variance = variance + torch.stack(moved).square().sum(2).mean(0)
    hidden = null * (H.square().sum(1) / scale.square()).sum() * scale.square()  # what the null space may hide
    return H, torch.where((null > 1e-6) | ~seen, torch.inf, (variance + hidden).sqrt())


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _invert_gram(normal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of a positive semi-definite matrix (N, N), pseudo-inverse where it is singular.

    Returns also the scale (N,) that gives the matrix a unit diagonal, and each row's share (N,) of the
    scaled matrix's null space.
    """
    scale = normal.diagonal().clamp_min(1e-300).rsqrt()
    scaled = normal * scale[:, None] * scale
    factor, failed = torch.linalg.cholesky_ex(scaled)
    null = torch.zeros_like(scale)
    inverse = torch.cholesky_inverse(factor) if not failed else None
    if inverse is None or not inverse.abs().sum(1).max() * scaled.abs().sum(1).max() < 1e10:
        values, vectors = torch.linalg.eigh(scaled)
        kept = values > 1e-12 * values[-1]
        inverse = (vectors[:, kept] / values[kept]) @ vectors[:, kept].T
        null = vectors[:, ~kept].square().sum(1)
    return inverse * scale[:, None] * scale, scale, null
