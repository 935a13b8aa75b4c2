"""Earlier attacks by gradient matching, in the place of eq. 9: in the federated loop, or on one repeated batch.

The fake rows of a batch give a fake gradient; an objective (``attack.objectives``) compares it with the round's, and
the fake rows follow the objective's slope. A horizontal setting is a model with one worker and the same batch round
after round. Several settings run side by side; after an eighth of the rounds the better half goes on, after a half of
them the best, by their own distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..checks import at_least_one
from ..model import VFLModel, full_precision
from ..protocol import RoundView
from .adam import RowAdam
from .leak import Leak
from .objectives import DLG, OBJECTIVES, Batch, Statistics
from .step3 import slopes

HALVINGS = (1 / 8, 1 / 2)  # of the rounds, after each of which only the better half of the settings goes on
ASTRAY = 100.0  # times the smallest distance so far; L-BFGS, which has no line search, is then brought back
SHARPEN = 1e6  # L-BFGS has absolute limits below which it stands still; relative distances are enlarged above them


@dataclass
class Member:
    """One set of fake rows: x, a tensor (M_g, N, …) a group; y (N, classes), labels before their softmax; ``best`` holds
    the smallest distance that L-BFGS has reached and its x and y."""

    x: list[Tensor]
    y: Tensor
    adam: list[RowAdam] = field(default_factory=list)
    lbfgs: torch.optim.LBFGS | None = None
    best: tuple[float, list[Tensor]] | None = None


@dataclass
class Trial:
    """One setting of the objective, with its fake rows; ``history`` holds its distance, round by round."""

    objective: DLG
    members: list[Member]
    history: list[float] = field(default_factory=list)

    def recent(self) -> float:
        """Mean distance over the last quarter of the rounds, infinite once one was not finite."""
        last = self.history[-max(1, len(self.history) // 4):]
        return sum(last) / len(last) if all(map(math.isfinite, last)) else math.inf


class MatchingAttack:
    """A baseline: gradient matching with one of ``OBJECTIVES``.

    Parameters
    ----------
    model : the public model
    rows : N, which the server knows since it draws the indices
    objective : ``dlg``, ``idlg``, ``cosine``, ``sapag``, ``bn`` or ``gc``
    rounds : T, how many rounds will be observed; fixes when settings are given up and when a rate decays
    settings : tried side by side from the same start; None takes the objective's own grid. Where one batch repeats, DLG
        and iDLG use L-BFGS at rate 1 and try as many starts instead
    statistics : for ``bn``, what batch normalisation would publish: ``VerticalFL.statistics()``
    seed : chooses the starts: uniform in [0, 1) like CAFE's, or normal where one batch repeats, as in DLG
    device, dtype : those of the round views

    The attack takes one batch that holds all N rows for a repeated one; its rows have no order then
    (``Leak.exchangeable``). ``chosen`` is the setting that does best so far.
    """

    def __init__(
        self, model: VFLModel, *, rows: int, objective: str, rounds: int, settings: tuple[dict, ...] | None = None,
        statistics: Statistics | None = None, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        if objective not in OBJECTIVES:
            raise ValueError(f"objective={objective!r} must be one of {', '.join(OBJECTIVES)}")
        self.kind = OBJECTIVES[objective]
        if self.kind.statistics and statistics is None:
            raise ValueError(f"statistics=None: objective={objective!r} compares with published ones; give VerticalFL.statistics()")
        if settings is not None and not settings:
            raise ValueError("settings=() must hold at least one setting, for example {'rate': 0.1}")
        self.model, self.rows, self.method, self.seed = model, at_least_one("rows", rows), objective, seed
        self.rounds, self.settings, self.statistics = at_least_one("rounds", rounds), settings, statistics
        self._place = {"device": device, "dtype": dtype}
        self.trials: list[Trial] = []
        self.observed, self.objectives = 0, [math.nan] * 3
        self._seen = torch.zeros(self.rows, dtype=torch.int64)  # equal for rows that were always drawn together
        self._draw = torch.Generator().manual_seed(seed + 1)

    @property
    def chosen(self) -> DLG:
        """The setting with the smallest distance so far."""
        return self._best.objective

    @property
    def _best(self) -> Trial:
        return min(self.trials, key=Trial.recent)

    def observe(self, view: RoundView) -> None:
        """Use one round: one step of every setting that is still in the race."""
        view.check_rows(self.rows)
        if self.kind.one_row and len(view.indices) != 1:
            raise ValueError(f"view.indices holds {len(view.indices)} rows; iDLG's rule reads the label of a single one, use dlg for more")
        if not self.trials:
            self.trials = self._begin(repeated=len(view.indices) == self.rows)
        if self.kind.one_row:
            self._read_label(view)
        self._seen[view.indices.cpu()] += int(torch.randint(2**40, (1,), generator=self._draw))
        for trial in self.trials:
            distance = math.nan if trial.history and not math.isfinite(trial.history[-1]) else self._step(trial, view)
            trial.history.append(distance)
        self.observed += 1
        if any(self.observed == max(1, math.ceil(part * self.rounds)) for part in HALVINGS):
            self.trials = sorted(self.trials, key=Trial.recent)[: (len(self.trials) + 1) // 2]
        self.objectives[2] = self._best.history[-1]

    def _begin(self, *, repeated: bool) -> list[Trial]:
        newton = repeated and self.kind.quasi_newton
        settings = self.settings or (({"rate": 1.0},) * len(self.kind.grid) if newton else self.kind.grid)
        generator, trials = torch.Generator(), []

        def start(*shape):
            draw = torch.randn if repeated else torch.rand
            return draw(*shape, generator=generator).to(**self._place)

        for number, setting in enumerate(settings):
            generator.manual_seed(self.seed + number * newton)
            objective, members = self.kind(**setting), []
            for _ in range(self.kind.members):
                x = [start(len(group), self.rows, *self.model.part_shapes[group[0]]) for group in self.model.groups]
                member = Member(x, start(self.rows, self.model.classes))
                if newton:
                    member.lbfgs = _quasi_newton(member, objective.rate)
                else:
                    member.adam = [*(RowAdam(v, objective.rate, row_dim=1) for v in x), RowAdam(member.y, objective.rate)]
                members.append(member)
            trials.append(Trial(objective, members))
        return trials

    def _read_label(self, view: RoundView) -> None:
        """Of a single row, the head's bias gradient p - y is negative at the label alone."""
        for member in (m for trial in self.trials for m in trial.members):
            member.y[view.indices] = -50.0
            member.y[view.indices, view.gradients["head.bias"].argmin()] = 50.0

    def _step(self, trial: Trial, view: RoundView) -> float:
        """One step of each member; the mean of their distances before it, NaN where a step would leave the finite numbers."""
        s, total = view.indices, 0.0
        mean = [torch.stack(v).mean(0)[:, s] for v in zip(*(m.x for m in trial.members))] if trial.objective.members > 1 else None
        for member in trial.members:
            distance, gradients = self._slope(trial.objective, view, [x[:, s] for x in member.x], member.y[s], mean)
            finite = math.isfinite(distance) and all(bool(g.isfinite().all()) for g in gradients)
            if member.lbfgs and member.best and not (finite and distance < ASTRAY * member.best[0]):
                total += _bring_back(member, trial.objective.rate) / len(trial.members)
                continue
            if not finite:
                return math.nan
            total += distance / len(trial.members)
            if member.lbfgs:
                self._newton_step(member, distance, gradients, s)
                continue
            for adam, gradient in zip(member.adam, gradients):
                adam.learning_rate = trial.objective.rate * self._decay(trial.objective)
                adam.update(s, gradient.sign() if trial.objective.sign else gradient)
        return total

    def _newton_step(self, member: Member, distance: float, gradients: list[Tensor], s: Tensor) -> None:
        """One iteration of L-BFGS from the slope at hand."""
        values = [*member.x, member.y]
        for value, gradient, dim in zip(values, gradients, [1] * len(member.x) + [0]):
            value.grad = torch.zeros_like(value).index_copy_(dim, s, SHARPEN * gradient)
        if member.best is None or distance < member.best[0]:
            member.best = distance, [v.clone() for v in values]
        member.lbfgs.step(lambda: SHARPEN * distance)

    def _decay(self, objective: DLG) -> float:
        return 0.1 ** sum(8 * self.observed >= part * self.rounds for part in (3, 5, 7)) if objective.decay else 1.0

    def _slope(self, objective: DLG, view: RoundView, x: list[Tensor], y: Tensor, mean) -> tuple[float, list[Tensor]]:
        """The distance of the fake batch x (M_g, |s|, …) a group, y (|s|, classes), and the slope of the whole objective."""
        x, y, names = [v.detach().requires_grad_() for v in x], y.detach().requires_grad_(), list(view.parameters)
        leaves = {k: v.detach().requires_grad_() for k, v in view.parameters.items()}
        with full_precision():
            _, logits = self.model.forward(leaves, x)
            target = (y.detach() if objective.one_row else y).softmax(1)
            fake = torch.autograd.grad(self.model.loss(logits, target), [leaves[k] for k in names], create_graph=True)
            distance = objective.distance(fake, [view.gradients[k] for k in names])
            features = self.model.convolutions(view.parameters, x) if objective.statistics else []
            whole = distance + objective.prior(Batch(x, features, mean), self.statistics)
            gradients = slopes(whole, [*x, y])
        return float(distance.detach()), gradients

    @torch.no_grad()
    def solve(self) -> Leak:
        """The fake rows of the best setting, images clipped to [0, 1]; of a group of attacks their mean. L-BFGS gives those with
        the smallest distance, the others the last."""
        if not self.trials:
            raise ValueError("nothing was observed; call observe(view) for at least one round first")
        ends = [m.best[1] if m.best else [*m.x, m.y] for m in self._best.members]
        x = [torch.stack(v).mean(0) for v in zip(*(end[:-1] for end in ends))]
        y = torch.stack([end[-1].softmax(1) for end in ends]).mean(0)  # (N, classes)
        shape = (self.rows, self.model.workers)
        return Leak(
            method=self.method,
            slices=self.model.unstack([v.clamp(0, 1) if v.dim() == 5 else v for v in x]),
            labels=y.argmax(1),
            leaks=torch.ones(shape, dtype=torch.bool, device=y.device),
            residual=torch.full(shape, math.nan, device=y.device),
            certified=torch.zeros(shape, dtype=torch.bool, device=y.device),
            rounds=self.observed,
            notes=[f"chosen by the attack's own distance: {self.chosen}", "gradient matching bounds no error, so nothing is certified"],
            exchangeable=self._together(),
        )

    def _together(self) -> Tensor | None:
        """Equal numbers (N,) for rows that were always drawn together; None where each row was once without any other."""
        seen, never = self._seen.clone(), self._seen == 0
        seen[never] = -1 - torch.arange(int(never.sum()))  # a row that was never drawn has no company
        together = seen.unique(return_inverse=True)[1]
        return together if int(together.max()) + 1 < self.rows else None


def _bring_back(member: Member, rate: float) -> float:
    """Put x and y where L-BFGS had the smallest distance, with an empty memory; that distance."""
    distance, values = member.best
    for value, old in zip([*member.x, member.y], values):
        value.copy_(old)
    member.lbfgs = _quasi_newton(member, rate)
    return distance


def _quasi_newton(member: Member, rate: float) -> torch.optim.LBFGS:
    """L-BFGS that takes one iteration a call and never stands still."""
    return torch.optim.LBFGS([*member.x, member.y], lr=rate, max_iter=1, tolerance_grad=0, tolerance_change=0)
