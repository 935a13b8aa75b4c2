"""The protocol of section 3.1: index alignment, workers' and server's gradients, and what the server sees.

Each round the server sends a list of row indices to every worker; the parties compute the
batch-averaged gradient of eq. 2; the server receives it. :class:`RoundView` is all that an
attack may ever see of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .defense.base import Defense
from .model import Parameters, VFLModel, full_precision
from .uploads import defended, row_norms, weighted_average

SCHEDULES = ("random", "epochs", "fixed")


@dataclass(frozen=True)
class RoundView:
    """What the server sees of one round.

    Attributes
    ----------
    round : round number, from 0
    indices : Tensor, shape (|s|,), int64: the rows of the batch s, which the server itself sent out
    parameters : Θ in this round, as in ``VFLModel.parameters``
    gradients : the averaged gradient (eq. 2), the same names and shapes as ``parameters``; those of the first layers and
        above alone where the protocol was told so
    """

    round: int
    indices: Tensor
    parameters: Parameters
    gradients: Parameters

    def check_rows(self, rows: int) -> None:
        """Raise ``ValueError`` when a row number lies outside a table of ``rows`` rows."""
        if self.indices.min() < 0 or self.indices.max() >= rows:
            raise ValueError(f"view.indices reach from {self.indices.min()} to {self.indices.max()}; rows={rows} allows 0 to {rows - 1}")


def index_batches(schedule: str, rows: int, batch_size: int, *, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless batches of row indices, shape (|s|,) each.

    ``random``: a fresh uniform K-subset each round, the paper's S. ``epochs``: a fresh permutation
    cut into ⌈N/K⌉ batches, again and again; the last one is short when K does not divide N.
    ``fixed``: one such permutation, repeated.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} must be one of {', '.join(SCHEDULES)}")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or not 1 <= batch_size <= rows:
        raise ValueError(f"batch_size={batch_size!r} must be a whole number from 1 to {rows}, the number of rows")

    def draw():
        order = torch.randperm(rows, generator=generator)
        while True:
            yield from order[:batch_size][None] if schedule == "random" else order.split(batch_size)
            if schedule != "fixed":
                order = torch.randperm(rows, generator=generator)

    return draw()


class VerticalFL:
    """M workers and a server in training: the private side of the protocol.

    Parameters
    ----------
    model : the public model
    parts : M tensors (N, …), worker m's private part of every row
    labels : Tensor, shape (N,), class numbers, private to the server's label holder
    batch_size : K
    schedule : ``random``, ``epochs`` or ``fixed``: see :func:`index_batches`
    optimizer : None keeps Θ fixed; else a function of the list of parameters that returns a torch
        optimizer, for example ``lambda p: torch.optim.Adam(p, lr=1e-6)``, stepped after each round
    below : whether the gradients of the layers below the first are computed and shown; without them these layers must
        stand still, each party computes its h once, and a round costs a fraction
    stale : the layers below the first as the server believes them to be, for workers that keep these to themselves: their
        gradients are not shown either; names as in ``VFLModel.parameters``
    defense : changes what each worker and the head's holder upload, each for itself; the server updates Θ with what it gets
    seed : chooses the batches
    device, dtype : where and in which precision the rounds are computed

    ``parameters`` holds Θ as it is now; the model's own initial weights are never changed.
    """

    def __init__(
        self,
        model: VFLModel,
        parts: Sequence[Tensor],
        labels: Tensor,
        *,
        batch_size: int = 40,
        schedule: str = "random",
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        below: bool = True,
        stale: Parameters | None = None,
        defense: Defense | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        if len(parts) != model.workers:
            raise ValueError(f"parts holds {len(parts)} tensors, the model has {model.workers} workers; one part a worker is needed")
        rows = len(labels)
        if rows == 0 or any(len(p) != rows for p in parts):
            raise ValueError(f"parts have {[len(p) for p in parts]} rows, labels {rows}; all must be equal and above 0")
        if labels.dtype != torch.int64 or labels.min() < 0 or labels.max() >= model.classes:
            raise ValueError(f"labels must be int64 class numbers from 0 to {model.classes - 1}, got {labels.dtype} from {labels.min()} to {labels.max()}")
        if defense and not below:
            raise ValueError("below=False leaves out part of what a defence acts on; use below=True")
        self.model, self.rows, self.batch_size, self.round = model, rows, batch_size, 0
        self._batches = index_batches(schedule, rows, batch_size, generator=torch.Generator().manual_seed(seed))
        self._stacked = model.stack([p.to(device, dtype) for p in parts])
        self._labels = labels.to(device)
        self.parameters: Parameters = {k: v.to(device, dtype, copy=True).requires_grad_() for k, v in model.parameters.items()}
        self._optimizer = optimizer(list(self.parameters.values())) if optimizer else None
        self._public: Parameters | None = None
        self._stale = {} if stale is None else {k: v.to(device, dtype) for k, v in stale.items()}
        if any(".representation." not in k or k not in self.parameters or v.shape != self.parameters[k].shape for k, v in self._stale.items()):
            raise ValueError(f"stale holds {', '.join(f'{k} {tuple(v.shape)}' for k, v in self._stale.items())}; it may only hold weights of the layers below the first, in their shapes")
        self._shown = [k for k in self.parameters if below or ".representation." not in k]
        self._hidden: list[Tensor] | None = None  # h of every row, (M_g, N, d1) a group, where it stays as it is
        self._clipping: Tensor | None = None  # a defence's factors of every row, (M + 1, N), as long as Θ is fixed
        self._defenses = defense and [defense.for_party(m, rows=rows, batch_size=batch_size) for m in range(model.workers + 1)]
        if not below:
            self._keep_below()

    def _keep_below(self) -> None:
        """Compute every row's h once; raises ``ValueError`` where the optimizer would change it."""
        still = {id(v) for k, v in self.parameters.items() if k not in self._shown}
        if self._optimizer and any(id(v) in still for group in self._optimizer.param_groups for v in group["params"]):
            raise ValueError("below=False leaves the layers below the first without gradients, and the optimizer was given some of them; use below=True")
        with torch.no_grad(), full_precision():
            self._hidden = self.model.hidden_of_all(self.parameters, self._stacked, chunk=64)

    @property
    def parts(self) -> list[Tensor]:
        """The workers' private parts, M tensors (N, …); private like ``labels``."""
        return self.model.unstack(self._stacked)

    @property
    def hidden(self) -> list[Tensor] | None:
        """h of every row, M tensors (N, d1), where it stays as it is (``below=False``); private."""
        return None if self._hidden is None else self.model.unstack(self._hidden)

    @property
    def labels(self) -> Tensor:
        return self._labels

    def _snapshot(self) -> Parameters:
        """Θ of this round; one shared copy as long as Θ is fixed."""
        if self._public is None:
            self._public = {k: self._stale.get(k, v).detach().clone() for k, v in self.parameters.items()}
        return self._public

    def rounds(self, count: int) -> Iterator[RoundView]:
        """Run ``count`` more rounds and yield what the server sees of each."""
        for _ in range(count):
            s = next(self._batches).to(self._labels.device)  # (|s|,)
            with full_precision():
                gradients = self._gradients(s)
            view = RoundView(self.round, s, self._snapshot(), {k: g for k, g in gradients.items() if k not in self._stale})
            self.round += 1
            self._update(gradients)
            yield view

    def _gradients(self, s: Tensor) -> Parameters:
        """The averaged gradient of batch s as the server receives it."""
        labels = self._labels[s]
        batch = [x[:, s] for x in (self._stacked if self._hidden is None else self._hidden)]  # x or h of the batch's rows, a group
        if self._defenses and self._defenses[0].per_row:
            gradients = weighted_average(self.model, self.parameters, batch, labels, self._factors(s))
        else:
            logits = self.model.forward(self.parameters, batch)[1] if self._hidden is None else self.model.above(self.parameters, batch)
            loss = self.model.loss(logits, labels)
            gradients = dict(zip(self._shown, torch.autograd.grad(loss, [self.parameters[k] for k in self._shown])))
        return defended(self.model, gradients, self._defenses, len(s)) if self._defenses else gradients

    def _factors(self, s: Tensor) -> Tensor:
        """By how much each party scales down its own gradient of each row of batch s, (M + 1, |s|); all rows' at once while Θ stands still."""
        if self._optimizer:
            return self._clipped(s)
        if self._clipping is None:
            self._clipping = self._clipped(torch.arange(self.rows, device=s.device))
        return self._clipping[:, s]

    def _clipped(self, rows: Tensor) -> Tensor:
        norms = row_norms(self.model, self.parameters, [x[:, rows] for x in self._stacked], self._labels[rows])
        return torch.stack([d.factors(own) for d, own in zip(self._defenses, norms)])

    def _update(self, gradients: Parameters) -> None:
        if self._optimizer is None:
            return
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient.clone()
        self._optimizer.step()
        self._public = None

    @torch.no_grad()
    def statistics(self) -> list[list[tuple[Tensor, Tensor]]]:
        """What batch normalisation behind every convolution would publish: mean and variance of its outputs over all rows.

        By group and convolution, (M_g, channels) each. With these statistics frozen, such a layer is a fixed affine map; the map
        that scales back by the same numbers makes the network the one that is there. Not part of a round: it is for the
        one baseline that needs it, and gives the server more than the gradients do; where one batch is all there is, the
        statistics of that very batch.
        """
        if any(self.model.holds_records(m) for m in range(self.model.workers)):
            raise ValueError("the model has no convolution whose statistics could be published; use images")
        with full_precision():
            parts = [self.model.convolutions(self.parameters, [x[:, i : i + 256] for x in self._stacked]) for i in range(0, self.rows, 256)]
        found = []
        for chunks in zip(*parts):  # a group's, chunk by chunk
            layers = [torch.cat([z.flatten(3).transpose(2, 3).flatten(1, 2) for z in layer], 1) for layer in zip(*chunks)]  # (M_g, N h w, channels)
            found.append([(z.mean(1), z.var(1, unbiased=False)) for z in layers])
        return found

    @torch.no_grad()
    def evaluate(self, parts: Sequence[Tensor] | None = None, labels: Tensor | None = None) -> tuple[float, float]:
        """Mean loss and accuracy of the present Θ on the given rows, or on the training rows."""
        stacked = self._stacked if parts is None else self.model.stack([p.to(self._stacked[0]) for p in parts])
        target = self._labels if labels is None else labels.to(self._labels.device)
        logits = torch.cat([self.model.forward(self.parameters, [x[:, i : i + 512] for x in stacked])[1] for i in range(0, len(target), 512)])
        return float(self.model.loss(logits, target)), float((logits.argmax(1) == target).double().mean())
