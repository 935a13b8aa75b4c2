"""The paper's schedules: nested loops (Algorithm 3) and single loop (Algorithm 4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import at_least_one
from ..model import VFLModel
from ..protocol import RoundView
from .adam import RowAdam
from .leak import Leak
from .presets import Hyperparameters
from .step1 import step1_update
from .step2 import step2_gradient
from .step3 import step3_gradients


class SingleLoopCAFE:
    """CAFE, single loop (Algorithm 4): each round makes one update of each step.

    Parameters
    ----------
    model : the public model
    rows : N, which the server knows since it draws the indices
    settings : table 9's hyperparameters: see ``PRESETS``
    seed : chooses the uniform starting values of V, Ĥ, x̂ and ŷ
    device, dtype : those of the round views

    ``objectives`` holds the last value of each step's objective, NaN for a step that has not run.
    """

    method = "single-loop"

    def __init__(
        self, model: VFLModel, *, rows: int, settings: Hyperparameters | None = None, seed: int = 0,
        device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        self.model, self.rows, self.settings = model, at_least_one("rows", rows), settings or Hyperparameters()
        generator = torch.Generator().manual_seed(seed)
        own = self.settings

        def uniform(*shape):
            return torch.rand(*shape, generator=generator).to(device, dtype)

        self.V, self.H, self.x_hat = [], [], []  # one tensor a group
        for group in model.groups:
            m = group[0]
            self.V.append((2 * uniform(len(group), rows, model.d2[m]) - 1) * own.init_V)
            self.H.append(uniform(len(group), rows, model.d1[m]) * own.init_H)
            self.x_hat.append(uniform(len(group), rows, *model.part_shapes[m]))
        self.y_hat = uniform(rows, model.classes)
        adam = {"double_bias_correction": own.double_bias_correction, "global_step_count": own.global_step_count}
        self._adam_H = [RowAdam(h, own.lr_step2, row_dim=1, **adam) for h in self.H]
        self._adam_x = [RowAdam(x, own.lr_step3, row_dim=1, **adam) for x in self.x_hat]
        self._adam_y = RowAdam(self.y_hat, own.lr_step3, **adam)
        self.objectives = [float("nan")] * 3
        self.observed = 0
        self._active, self._full = 1, 0
        self._notes: list[str] = []
        self._parameters = None

    def observe(self, view: RoundView) -> None:
        """Use one round."""
        for step in self._steps():
            value = (self._step1, self._step2, self._step3)[step](view)
            self.objectives[step] = float(value)
            if not math.isfinite(self.objectives[step]):
                rate = f"lr_step{step + 1}={getattr(self.settings, f'lr_step{step + 1}')}"
                hints = [f"step {'I' * (step + 1)} diverged in round {self.observed}: {rate} may be too large", self._rate_note(view)]
                raise ValueError("; ".join(filter(None, hints)))
        self._parameters = view.parameters
        self._notes = self._notes or [note for note in [self._rate_note(view)] if note]
        self.observed += 1

    def _rate_note(self, view: RoundView) -> str:
        """Algorithm 1 is a relaxed projection onto one equation a round, with relaxation 2ηK: it needs ηK < 1."""
        rate, size = self.settings.lr_step1, len(view.indices)
        if rate * size < 1:
            return ""
        return f"step I cannot converge with lr_step1={rate} and batches of {size}: below {1 / size:g} it can, and {1 / (2 * size):g} is best"

    def _steps(self) -> range:
        """The steps this round runs; a switch threshold, once passed, stays passed."""
        for active, threshold in ((1, self.settings.switch_step2), (2, self.settings.switch_step3)):
            passed = threshold is None or self.objectives[active - 1] < threshold
            if self._active == active and passed:
                self._active = active + 1
        return range(self._active)

    def _scale(self, view: RoundView) -> float:
        """|s| / K turns a short batch's average into the scale of a full one's, v_n / K."""
        self._full = max(self._full, len(view.indices))
        return len(view.indices) / self._full

    def _step1(self, view: RoundView) -> Tensor:
        total = 0.0
        for g, V in enumerate(self.V):
            b = view.gradients[f"group{g}.first.bias"] * self._scale(view)  # (M_g, d2)
            total = total + step1_update(V, view.indices, b, learning_rate=self.settings.lr_step1)
        return total

    def _step2(self, view: RoundView) -> Tensor:
        total = 0.0
        for g, (V, H) in enumerate(zip(self.V, self.H)):
            G = view.gradients[f"group{g}.first.weight"] * self._scale(view)  # (M_g, d2, d1)
            objective, gradient = step2_gradient(H[:, view.indices], V[:, view.indices], G)
            self._adam_H[g].update(view.indices, gradient)
            total = total + objective
        return total

    def _step3(self, view: RoundView) -> Tensor:
        s = view.indices
        objective, x_grads, y_grad = step3_gradients(
            self.model, view.parameters, view.gradients, [x[:, s] for x in self.x_hat], self.y_hat[s],
            [h[:, s] for h in self.H], self.settings,
        )  # fmt: skip
        for adam, gradient in zip(self._adam_x, x_grads):
            adam.update(s, gradient)
        self._adam_y.update(s, y_grad)
        return objective

    @torch.no_grad()
    def solve(self) -> Leak:
        """The fake data as they stand, clipped to [0, 1] where they are images."""
        if self._parameters is None:
            raise ValueError("nothing was observed; call observe(view) for at least one round first")
        x_hat = [x.clamp(0, 1) if x.dim() == 5 else x.clone() for x in self.x_hat]  # images in [0, 1]
        hidden = self.model.hidden_of_all(self._parameters, x_hat, chunk=128)  # (M_g, N, d1) a group
        residual = [(h - H).square().sum(2) / H.square().sum(2) for h, H in zip(hidden, self.H)]
        shape = (self.rows, self.model.workers)
        return Leak(
            method=self.method,
            slices=self.model.unstack(x_hat),
            labels=self.y_hat.argmax(1),
            leaks=torch.ones(shape, dtype=torch.bool, device=self.y_hat.device),
            residual=torch.stack(self.model.unstack(residual), 1),
            certified=torch.zeros(shape, dtype=torch.bool, device=self.y_hat.device),
            rounds=self.observed,
            notes=["an iterative estimate of h_n bounds no error, so nothing is certified", *self._notes],
        )


class NestedLoopsCAFE(SingleLoopCAFE):
    """CAFE, nested loops (Algorithm 3): all iterations of step I, then all of step II, then all of step III.

    ``iterations`` counts each step's own, so that 3 × ``iterations`` rounds are observed.
    """

    method = "nested-loops"

    def __init__(self, model: VFLModel, *, iterations: int, **options):
        self.iterations = at_least_one("iterations", iterations)
        super().__init__(model, **options)

    def _steps(self) -> range:
        step = min(self.observed // self.iterations, 2)
        return range(step, step + 1)
