"""CAFE solved exactly: steps I and II as linear systems, step III from an exact H.

About N rounds suffice where the iterative schedules take thousands. The attacker also learns how far
each result can be trusted: the precision of V and H follows from the systems' own residuals.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import at_least_one
from ..model import VFLModel
from ..protocol import RoundView
from .invert import ATTEMPTS, Attempt
from .leak import Leak
from .slices import recover_slices
from .step1 import BiasEquations
from .step2 import WeightEquations

LIVE = 8.0  # ‖v̂_n‖ must exceed this many times its expected error
QUIET = 1e-3  # an expected error above this share of the rows' mean ‖v̂_n‖ tells nothing about silence
DRAWS = 8  # perturbations of V, to see how far H moves


class NotIdentifiable(ValueError):
    """The rounds observed do not determine V: the incidence matrix has too low a rank."""


class ExactCAFE:
    """The exact attack.

    Parameters
    ----------
    model : the public model
    rows : N, which the server knows since it draws the indices
    memory : bytes of weight gradients to keep for step II, at least a cover of the rows is kept
    attempts : step III's starts: see ``attack.invert``
    seed : chooses step III's starting values
    progress : show a progress bar over the slices of step III

    Attributes
    ----------
    missing : how many more rounds are needed at the least, N minus the rank
    ready : the rank is N, and 5 % more rounds have been seen since, for the sake of conditioning
    """

    method = "exact"

    def __init__(
        self, model: VFLModel, *, rows: int, memory: float = 2**30, attempts: tuple[Attempt, ...] = ATTEMPTS,
        seed: int = 0, progress: bool = False,
    ):  # fmt: skip
        self.model, self.rows, self.attempts, self.seed, self.progress = model, at_least_one("rows", rows), attempts, seed, progress
        self.bias = BiasEquations(rows)
        self.weight = WeightEquations(rows, memory=memory)
        self._parameters = None
        self._moved = False

    def observe(self, view: RoundView) -> None:
        """Use one round: its indices and the gradients of the first layers and of the head's bias."""
        view.check_rows(self.rows)
        if self._parameters is not None and view.parameters is not self._parameters:
            self._moved = self._moved or any(not torch.equal(v, self._parameters[k]) for k, v in view.parameters.items())
        self._parameters = view.parameters
        groups = range(len(self.model.groups))
        biases = self.model.unstack([view.gradients[f"group{g}.first.bias"] for g in groups])  # M x (d2,)
        self.bias.add(view.indices, torch.cat([*biases, view.gradients["head.bias"]]))
        self.weight.add(view.indices, [view.gradients[f"group{g}.first.weight"] for g in groups])

    @property
    def observed(self) -> int:
        return len(self.bias)

    @property
    def missing(self) -> int:
        return self.rows - self.bias.rank

    @property
    def stalled(self) -> bool:
        """Long without a new equation: the schedule repeats itself."""
        batch = len(self.bias._indices[-1]) if self.observed else 1
        patience = 50 + 20 * self.rows / max(1, min(batch, self.rows - batch))
        return self.missing > 0 and self.observed - self.bias.last_gain > patience

    @property
    def ready(self) -> bool:
        return not self.missing and self.observed >= self.bias.last_gain + math.ceil(0.05 * self.rows)

    def solve(self) -> Leak:
        """Steps I, II and III.

        Raises
        ------
        NotIdentifiable : the rank of the incidence matrix is below N; says how many rounds are missing
        """
        if self.missing:
            raise NotIdentifiable(self._why_not())
        eps = torch.finfo(self._parameters["head.bias"].dtype).eps
        generator = torch.Generator().manual_seed(self.seed)
        V, noise = self.bias.solve(eps=eps)  # (N, Σ d2 + classes), (Σ d2 + classes,)
        widths = [*self.model.d2, self.model.classes]
        *V_parts, head = V.split(widths, 1)
        error = self.bias.spread()[:, None] * torch.stack([e.norm() for e in noise.split(widths)])  # (N, M + 1)
        sizes = torch.stack([v.norm(dim=1) for v in V_parts], 1)  # (N, M)
        live = (sizes > LIVE * error[:, :-1]) | (error[:, :-1] > QUIET * sizes.mean(0))
        if self._moved:  # a row lost in the drift of Θ is not silent
            live = torch.ones_like(live)
        H, H_error = zip(*(self._representations(m, V_parts[m], live[:, m], noise, eps, generator) for m in range(self.model.workers)))
        slices, residual, certified = recover_slices(
            self.model, self._parameters, H, H_error, live, trusted=not self._moved, attempts=self.attempts, seed=self.seed, progress=self.progress
        )
        device = self._parameters["head.bias"].device
        return Leak(
            method=self.method,
            slices=slices,
            labels=head.argmin(1).to(device),  # v of the logits is p_n - y_n, negative at the label alone
            leaks=live.to(device),
            residual=residual,
            certified=certified,
            rounds=self.observed,
            notes=self._notes(head, error[:, -1]),
        )

    def _representations(self, m: int, V: Tensor, live: Tensor, noise: Tensor, eps: float, generator) -> tuple[Tensor, Tensor]:
        """Step II for one worker: H (N, d1) in float64, and the expected error of each row relative to its norm."""
        columns = slice(sum(self.model.d2[:m]), sum(self.model.d2[: m + 1]))
        moves = self.bias.perturbations(columns, noise[columns], DRAWS, generator)
        H, error = self.weight.solve(*self.model.place(m), V, live, eps=eps, perturbations=moves)
        return H, error / H.norm(dim=1).clamp_min(1e-300)

    def _why_not(self) -> str:
        if not self.observed:
            return "nothing was observed; call observe(view) for at least N rounds"
        message = (
            f"after {self.observed} rounds the incidence matrix has rank {self.bias.rank} of {self.rows} rows: "
            f"at least {self.missing} more rounds with new batches are needed"
        )
        if self.stalled:
            message += (
                f"; no round since number {self.bias.last_gain} has brought a new equation, so this schedule repeats "
                "its batches (fixed batches, or K = N) and will never identify the rows"
            )
        return message

    def _notes(self, head: Tensor, error: Tensor) -> list[str]:
        notes = []
        smallest = head.topk(min(2, head.shape[1]), dim=1, largest=False).values
        doubtful = int((smallest[:, -1] - smallest[:, 0] < LIVE * error).sum())
        if doubtful and head.shape[1] > 1:
            notes.append(f"{doubtful} labels rest on a gradient that is no larger than its own error")
        if self._moved:
            notes.append("Θ changed between the rounds; steps I and II assume it fixed, so the results are approximate and nothing is certified")
        if self.model.double_softmax:
            notes.append("the loss applies a second softmax, so the smallest entry of the head's gradient need not be the label")
        return notes
