"""Recovery from a handful of epochs: rows as intersections of spans.

A row that was in batches t_1 … t_r has its h̃_n in the column space of each of their gradients (see
``attack.spans``). Where it shares all these batches with no other row, the spans meet in h̃_n alone, and
dividing by its last entry gives h_n. v_n drops out, so the layers above the first may train meanwhile; the
layers below must stand still.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from ..checks import at_least_one
from ..model import Parameters, VFLModel
from ..protocol import RoundView
from .invert import ATTEMPTS, Attempt
from .leak import Leak
from .slices import recover_slices
from .spans import Span, common, span
from .step2 import WeightEquations

MEETS = 1e-8  # a direction whose squared distances from the spans add up to less lies in all of them


class FewRoundsCAFE:
    """The attack from a few epochs of rounds.

    Parameters
    ----------
    model : the public model
    rows : N
    attempts, seed, progress : as for :class:`~cafe_tutorial.attack.ExactCAFE`

    A row is *ambiguous* when it shares every batch it was in with another row. Its spans then meet in more than
    one direction; it is counted in a note, and not recovered.
    """

    method = "few-rounds"

    def __init__(self, model: VFLModel, *, rows: int, attempts: tuple[Attempt, ...] = ATTEMPTS, seed: int = 0, progress: bool = False):
        self.model, self.rows, self.attempts, self.seed, self.progress = model, at_least_one("rows", rows), attempts, seed, progress
        self.spans: list[list[Span]] = [[] for _ in range(model.workers)]
        self.observed = 0
        self._scale: list[float] = []
        self._first: Parameters | None = None
        self._head: list[tuple[Tensor, Tensor]] = []  # rows (|s|,) and the head's gradient [W; b]ᵀ, (outputs + 1, classes)
        self._moved = self._trained = False

    def observe(self, view: RoundView) -> None:
        """Use one round: its indices and the gradients of the first layers."""
        if view.indices.min() < 0 or view.indices.max() >= self.rows:
            raise ValueError(f"view.indices reach from {view.indices.min()} to {view.indices.max()}; rows={self.rows} allows 0 to {self.rows - 1}")
        below = {k for k in view.parameters if ".representation." in k}
        self._first = self._first or dict(view.parameters)
        changed = {k for k, v in view.parameters.items() if v is not self._first[k] and not torch.equal(v, self._first[k])}
        self._trained, self._moved = self._trained or bool(changed), self._moved or bool(changed & below)
        for m in range(self.model.workers):
            own = self.model.of_worker(view.gradients, m)
            weight, bias = own["first.weight"], own["first.bias"]
            if len(self._scale) == m:
                self._scale.append(float(weight.norm() / bias.norm().clamp_min(1e-30)) or 1.0)
            self.spans[m].append(span(view.indices, weight, bias, scale=self._scale[m]))
        self._head.append((view.indices.cpu(), torch.cat([view.gradients["head.weight"].T, view.gradients["head.bias"][None]])))
        self.observed += 1

    def memberships(self) -> dict[tuple[int, ...], list[int]]:
        """Rows by the rounds they were in; rows that share all of them are listed together."""
        rounds: list[list[int]] = [[] for _ in range(self.rows)]
        for t, s in enumerate(self.spans[0]):
            for n in s.rows.tolist():
                rounds[n].append(t)
        groups: dict[tuple[int, ...], list[int]] = {}
        for n, own in enumerate(rounds):
            groups.setdefault(tuple(own), []).append(n)
        return groups

    def solve(self) -> Leak:
        """Intersect, invert, read the labels; a label that these rounds do not determine is -1."""
        if not self.observed:
            raise ValueError("nothing was observed; call observe(view) for at least two epochs of rounds")
        groups = self.memberships()
        H, error, silent = zip(*(self._representations(m, groups) for m in range(self.model.workers)))
        silent, known = torch.stack(silent, 1), torch.stack([e.isfinite() for e in error], 1)
        slices, residual, certified = recover_slices(
            self.model, self._first, H, error, known, trusted=not self._moved, attempts=self.attempts, seed=self.seed, progress=self.progress
        )
        alone = torch.tensor(sorted(rows[0] for rounds, rows in groups.items() if len(rows) == 1 and len(rounds) > 1), dtype=torch.int64)
        open_spans = int((~known & ~silent)[alone.to(known.device)].sum())
        labels = self._labels(H, (known | silent).all(1)) if not self._trained else torch.full((self.rows,), -1)
        return Leak(
            self.method, slices, labels.to(slices[0].device), ~silent, residual, certified, self.observed, self._notes(groups, labels, open_spans)
        )

    def _representations(self, m: int, groups: dict) -> tuple[Tensor, Tensor, Tensor]:
        """For worker m: H (N, d1), each row's expected relative error (N,), infinite where unknown, and which rows are silent (N,)."""
        device = self.spans[m][0].basis.device
        H = torch.zeros(self.rows, self.model.d1[m], dtype=torch.float64, device=device)
        error = torch.full((self.rows,), math.inf, dtype=torch.float64, device=device)
        silent = torch.zeros(self.rows, dtype=torch.bool, device=device)
        for rounds, rows in groups.items():
            own = [self.spans[m][t] for t in rounds]
            if len(own) < 2 or min(len(s.values) for s in own) == 0:
                continue
            directions, defects = common(own)
            if defects[0] > MEETS:
                silent[rows] = True
            elif len(rows) == 1 and len(defects) > 1 and defects[1] > max(10 * MEETS, 100 * float(defects[0])):
                found = directions[:, 0]
                blur = torch.stack([s.blur(found) for s in own]).norm()
                spread = (1 / len(own) ** 2 + (1 / defects[1:].square()).sum() / len(found)).sqrt()  # of errors in and out of the spans
                H[rows[0]] = found[:-1] / found[-1] * own[0].scale
                error[rows[0]] = blur * spread / torch.minimum(found[:-1].norm(), found[-1].abs())
        return H, error, silent

    def _labels(self, H: tuple[Tensor, ...], known: Tensor) -> Tensor:
        """From the head's gradients Σ (p_n - y_n) õ_nᵀ over batches whose rows are all known, with õ_n the workers' outputs and 1.

        Linear in p_n - y_n, whose smallest entry is the label's. A silent slice counts as a zero h_n.
        """
        outputs = []
        for m, h in enumerate(H):
            own = {k: v.double() for k, v in self.model.of_worker(self._first, m).items()}
            upper = {k.removeprefix("upper."): v for k, v in own.items() if k.startswith("upper.")}
            outputs.append(functional_call(self.model.template(m).upper, upper, (F.linear(h, own["first.weight"], own["first.bias"]),)))
        extended = torch.cat([*outputs, torch.ones_like(outputs[0][:, :1])], 1)  # (N, Σ outputs + 1)
        equations = WeightEquations(self.rows)
        for rows, gradient in self._head:
            if bool(known.cpu()[rows].all()):
                equations.add(rows, [gradient[None]])
        labels = torch.full((self.rows,), -1)
        if equations.held:
            eps = torch.finfo(self._first["head.bias"].dtype).eps
            e, error = equations.solve(0, 0, extended, known, eps=eps)
            sure = error.isfinite().cpu()
            labels[sure] = e.argmin(1).cpu()[sure]
        return labels

    def _notes(self, groups: dict, labels: Tensor, open_spans: int) -> list[str]:
        notes = []
        ambiguous = sum(len(rows) for rows in groups.values() if len(rows) > 1)
        if ambiguous:
            notes.append(f"{ambiguous} of {self.rows} rows share all their batches with another row and were not told from it")
        if open_spans:
            notes.append(f"the spans of {open_spans} more slices meet in more than one direction: batches too large for the first layer, or equal rows")
        if self._moved:
            notes.append("the layers below the first moved between the rounds, so the spans need not meet and nothing is certified")
        if bool((labels < 0).any()):
            notes.append(f"{int((labels < 0).sum())} labels are not determined by these rounds")
        return notes
