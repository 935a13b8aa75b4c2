"""The exact attack for noisy uploads: it averages over many rounds and keeps none of them.

Noise with mean zero is drawn afresh each round, while Θ and the rows stay the same. So the first rounds give V alone,
by least squares. In the rounds after that each weight gradient is added into one sum a row, weighted with V, and given up.
Solved at the end, these sums are step II's least squares over all of these rounds, in the memory of one H a worker.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..checks import at_least_one
from ..model import VFLModel
from ..protocol import RoundView
from .exact import DRAWS, ExactCAFE
from .invert import ATTEMPTS, Attempt
from .leak import Leak
from .step2 import pooled


class WeightSums:
    """Step II's normal equations, summed round by round; nothing is added before :meth:`start`.

    Parameters
    ----------
    rows : N
    """

    def __init__(self, rows: int):
        self.rounds, self.V, self.right, self.power = 0, None, None, None
        self.together = torch.zeros(rows, rows, dtype=torch.float64)  # (N, N), in how many batches two rows meet

    def start(self, V: list[Tensor]) -> None:
        """V : (M_g, N, d2) a group of workers, gradients v_n of the rows' own losses."""
        self.V = V

    def add(self, indices: Tensor, gradients: list[Tensor]) -> None:
        """Add a round: its rows (|s|,) and one averaged weight gradient (M_g, d2, d1) a group of workers."""
        if self.V is None:
            return
        if self.right is None:
            self.V = [v.to(G.device) for v, G in zip(self.V, gradients)]
            self.right = [torch.zeros(*v.shape[:2], G.shape[2], dtype=torch.float64, device=G.device) for v, G in zip(self.V, gradients)]
            self.power = [torch.zeros(len(G), dtype=torch.float64, device=G.device) for G in gradients]
        for v, G, right, power in zip(self.V, gradients, self.right, self.power):
            total = G.detach().double() * len(indices)  # (M_g, d2, d1), Σ v_n h_nᵀ
            right[:, indices] += v[:, indices] @ total
            power += total.square().sum((1, 2))
        rows = indices.cpu()
        self.together[rows[:, None], rows] += 1
        self.rounds += 1

    def solve(self, g: int, i: int, live: Tensor, *, eps: float, perturbations: Tensor) -> tuple[Tensor, Tensor]:
        """Least squares over all rounds added, in float64, for the i-th worker of group g.

        live : (N,), the rows to solve for; perturbations : (draws, N, d2), how V may be wrong. Returns H (N, d1), zero
        where not live, and the expected error ‖ĥ_n - h_n‖, (N,), infinite where the rounds leave h_n open.
        """
        V, right = self.V[g][i], self.right[g][i]
        together, live = self.together.to(V.device), live.to(V.device)
        V, right, power = V * live[:, None], right * live[:, None], float(self.power[g][i])

        def miss(H: Tensor) -> float:
            return power - float((H * (2 * right - (together * (V @ V.T)) @ H)).sum())

        return pooled(V, right, together, rounds=self.rounds, power=power, miss=miss, eps=eps, perturbations=perturbations)


class PatientCAFE(ExactCAFE):
    """The exact attack over many rounds; its memory grows only by the bias gradients, d2 numbers a worker and round.

    Parameters
    ----------
    model : the public model
    rows : N, which the server knows since it draws the indices
    rounds : T, how many rounds to watch, 2N at the least
    learn : after how many rounds V is solved for, at the least; later where their rank is below N. When None, 3N/2 or T/10,
        whichever is more: the d1 numbers of h_n carry most of the noise, so that H needs most of the rounds
    attempts, seed, progress : as for :class:`ExactCAFE`

    Attributes
    ----------
    ready : V is known, and T - ``learn`` rounds have been seen since
    """

    method = "patient"

    def __init__(
        self, model: VFLModel, *, rows: int, rounds: int, learn: int | None = None, attempts: tuple[Attempt, ...] = ATTEMPTS,
        seed: int = 0, progress: bool = False,
    ):  # fmt: skip
        super().__init__(model, rows=rows, attempts=attempts, seed=seed, progress=progress)
        if at_least_one("rounds", rounds) < 2 * rows:
            raise ValueError(f"rounds={rounds} must be at least {2 * rows}, twice the number of rows")
        learn = min(rounds - 1, max(3 * rows // 2, rounds // 10)) if learn is None else at_least_one("learn", learn)
        if not rows <= learn < rounds:
            raise ValueError(f"learn={learn} must be from {rows}, the number of rows, to {rounds - 1}, one less than rounds={rounds}")
        self.rounds, self.learn, self.weight, self._learned = rounds, learn, WeightSums(rows), None

    def observe(self, view: RoundView) -> None:
        """Use one round, as :meth:`ExactCAFE.observe` does."""
        super().observe(view)
        if self._learned is None and self.observed >= self.learn and not self.missing:
            self._learned = copy.deepcopy(self.bias)
            V, self._noise = self._learned.solve(eps=torch.finfo(view.gradients["head.bias"].dtype).eps)
            self.weight.start(self.model.stack(V.split([*self.model.d2, self.model.classes], 1)[:-1]))

    @property
    def ready(self) -> bool:
        return self._learned is not None and self.weight.rounds >= self.rounds - self.learn

    def solve(self) -> Leak:
        """Steps I, II and III; labels, and which slices leak, from all rounds.

        Raises
        ------
        ValueError : too few rounds were observed; says how many more are needed
        NotIdentifiable : the rank of the incidence matrix is below N
        """
        if not self.ready and (self.observed < self.rounds or not self.missing):
            least = max(self.rounds - self.observed, self.rounds - self.learn - self.weight.rounds)
            raise ValueError(f"solve() after {self.observed} rounds, with rounds={self.rounds}: call observe(view) for {least} more rounds")
        return super().solve()

    def _representations(self, m: int, V: Tensor, live: Tensor, noise: Tensor, eps: float, generator) -> tuple[Tensor, Tensor]:
        columns = slice(sum(self.model.d2[:m]), sum(self.model.d2[: m + 1]))
        moves = self._learned.perturbations(columns, self._noise[columns], DRAWS, generator)
        H, error = self.weight.solve(*self.model.place(m), live, eps=eps, perturbations=moves)
        return H, error / H.norm(dim=1).clamp_min(1e-300)
