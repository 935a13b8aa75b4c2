"""The public model: one bottom model a worker, and the server's head.

A bottom model is h(Θ_c, ·), then the first fully connected layer u = Θ_1ᵀ h + b_1, then the
upper layers (section 3.1 of the paper). The server's head maps the workers' concatenated
outputs to logits. :class:`VFLModel` keeps the weights of workers whose shapes agree in one
stacked tensor, so that all of them run in one batched call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .bottoms import BottomModel, Parameters, Piece, Taps, convolutional_bottom, glorot, mlp_bottom, outputs_of, smooth_bottom, uniform

__all__ = ["BottomModel", "Parameters", "VFLModel", "convolutional_bottom", "full_precision", "mlp_bottom", "smooth_bottom"]


class VFLModel:
    """M bottom models and the server's head, public to every party.

    Parameters
    ----------
    bottoms : one :class:`BottomModel` a worker
    part_shapes : the shape of one row's part at each worker, (C, h, w) or (D_m,)
    head : nn.Linear from the concatenated outputs to ``classes`` logits
    fuse : run workers of one shape and architecture in a single batched call, as long as they are made of
        torch.nn's own modules (the plain form, one after another, when False)
    double_softmax : apply a softmax to the logits before the loss applies its own, as the released code does

    Attributes
    ----------
    parameters : the initial weights, a dict; ``group0.first.weight`` has shape (M_g, d2, d1), one
        slice for each of the M_g workers of group 0; ``head.weight`` has shape (classes, Σ outputs)
    groups : worker numbers by group
    """

    def __init__(
        self, bottoms: Sequence[BottomModel], head: nn.Linear, part_shapes: Sequence[Sequence[int]], *,
        fuse: bool = True, double_softmax: bool = False,
    ):  # fmt: skip
        if not bottoms or len(part_shapes) != len(bottoms):
            raise ValueError(f"bottoms holds {len(bottoms)} bottom models, part_shapes {len(part_shapes)}; one of each a worker is needed")
        self.part_shapes = [tuple(shape) for shape in part_shapes]
        self.workers, self.classes, self.double_softmax = len(bottoms), head.out_features, double_softmax
        self.d1 = [b.first.in_features for b in bottoms]
        self.d2 = [b.first.out_features for b in bottoms]
        kinds: dict = {}
        for m, bottom in enumerate(bottoms):
            known = all(type(part).__module__.startswith(("torch.nn", BottomModel.__module__)) for part in bottom.modules())
            kinds.setdefault((str(bottom), self.part_shapes[m]) if fuse and known else m, []).append(m)
        self.groups = list(kinds.values())
        self._place = {m: (g, i) for g, group in enumerate(self.groups) for i, m in enumerate(group)}
        self._templates = [bottoms[group[0]] for group in self.groups]
        self.parameters: Parameters = {}
        for g, group in enumerate(self.groups):
            states = [dict(bottoms[m].named_parameters()) for m in group]
            for name in states[0]:
                self.parameters[f"group{g}.{name}"] = torch.stack([s[name].detach() for s in states])
        for name, value in head.named_parameters():
            self.parameters[f"head.{name}"] = value.detach().clone()

    @classmethod
    def convolutional(cls, part_shapes, *, classes: int, d2: int = 256, seed: int = 0, **options) -> VFLModel:
        """The released network for tiles of the given shapes (C, h, w), Glorot weights, zero biases."""
        return cls._seeded([convolutional_bottom(shape, d2=_positive("d2", d2)) for shape in part_shapes], part_shapes, classes, seed, options)

    @classmethod
    def mlp(cls, part_shapes, *, classes: int, d2: int = 256, activation: str = "tanh", seed: int = 0, **options) -> VFLModel:
        """Fully connected bottom models for table parts of the given shapes (D_m,)."""
        bottoms = [mlp_bottom(math.prod(s), d2=_positive("d2", d2), activation=activation) for s in part_shapes]
        return cls._seeded(bottoms, part_shapes, classes, seed, options)

    @classmethod
    def smooth(cls, part_shapes, *, classes: int, d2: int = 64, seed: int = 0, **options) -> VFLModel:
        """Sigmoid networks for tiles of the given shapes (C, h, w), all weights and biases uniform in [-0.5, 0.5]."""
        bottoms = [smooth_bottom(shape, d2=_positive("d2", d2)) for shape in part_shapes]
        return cls._seeded(bottoms, part_shapes, classes, seed, options, uniform)

    @classmethod
    def _seeded(cls, bottoms, part_shapes, classes, seed, options, initialize=glorot) -> VFLModel:
        if _positive("classes", classes) < 2:
            raise ValueError("classes=1 must be at least 2: with a single class the loss and every gradient are zero")
        head = nn.Linear(sum(outputs_of(b) for b in bottoms), classes)
        generator = torch.Generator().manual_seed(seed)
        for module in [*bottoms, head]:
            initialize(module, generator)
        return cls(bottoms, head, part_shapes, **options)

    def to(self, *args, **kwargs) -> VFLModel:
        """Move the initial weights to a device or dtype, in place; returns the model."""
        self.parameters = {k: v.to(*args, **kwargs) for k, v in self.parameters.items()}
        return self

    def stack(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """M parts (N, …) to one tensor (M_g, N, …) a group."""
        return [torch.stack([parts[m] for m in group]) for group in self.groups]

    def unstack(self, stacked: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`stack`: one tensor a worker, in worker order."""
        return [stacked[g][i] for g, i in map(self._place.__getitem__, range(self.workers))]

    def of_worker(self, tensors: Parameters, m: int) -> Parameters:
        """Worker m's own entries of a dict of parameters or gradients, under their plain names."""
        g, i = self._place[m]
        prefix = f"group{g}."
        return {k[len(prefix):]: v[i] for k, v in tensors.items() if k.startswith(prefix)}

    def bottom(self, m: int, parameters: Parameters | None = None):
        """Worker m's bottom model as a function x -> (h, output), with the given parameters."""
        own = self.of_worker(self.parameters if parameters is None else parameters, m)
        return lambda x: functional_call(self.template(m), own, (x,))

    def representation(self, m: int, parameters: Parameters):
        """h(Θ_c, ·) of worker m as a function x (n, …) -> h (n, d1)."""
        return self._piece(m, "representation", parameters)

    def upper(self, m: int, parameters: Parameters):
        """Worker m's upper layers as a function u (n, d2) -> output (n, outputs)."""
        return self._piece(m, "upper", parameters)

    def _piece(self, m: int, name: str, parameters: Parameters):
        own = {k.removeprefix(f"{name}."): v for k, v in self.of_worker(parameters, m).items() if k.startswith(f"{name}.")}
        return Piece(getattr(self.template(m), name), own)

    def holds_records(self, m: int) -> bool:
        """Whether worker m's h is its part of the record itself, as for tables."""
        return isinstance(self.template(m).representation, nn.Identity)

    def place(self, m: int) -> tuple[int, int]:
        """Worker m's group and its position in it."""
        return self._place[m]

    def template(self, m: int) -> BottomModel:
        """A module of worker m's architecture; its weights mean nothing."""
        return self._templates[self._place[m][0]]

    def _grouped(self, g: int, parameters: Parameters, part: str, x: Tensor, wrap=None):
        """Apply one sub-module (or the whole bottom model) of group g to x (M_g, n, …), ``wrap`` around it where given."""
        template = getattr(self._templates[g], part) if part else self._templates[g]
        prefix = f"group{g}.{part}." if part else f"group{g}."
        inner, template = (f"{part}.", wrap(template)) if wrap else ("", template)
        own = {inner + k[len(prefix):]: v for k, v in parameters.items() if k.startswith(prefix)}
        if x.shape[0] == 1:
            out = functional_call(template, {k: v[0] for k, v in own.items()}, (x[0],))
            return tuple(o[None] for o in out) if isinstance(out, tuple) else out[None]
        if not own:
            return template(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return vmap(lambda p, z: functional_call(template, p, (z,)))(own, x)

    def convolutions(self, parameters: Parameters, stacked: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The outputs of every convolution, (M_g, n, …) to a tuple of (M_g, n, channels, h, w) a group."""
        return [self._grouped(g, parameters, "representation", x, Taps) for g, x in enumerate(stacked)]

    def hidden(self, parameters: Parameters, stacked: Sequence[Tensor]) -> list[Tensor]:
        """h(Θ_c, x) for every group, (M_g, n, …) to (M_g, n, d1)."""
        return [self._grouped(g, parameters, "representation", x) for g, x in enumerate(stacked)]

    def hidden_of_all(self, parameters: Parameters, stacked: Sequence[Tensor], *, chunk: int) -> list[Tensor]:
        """As :meth:`hidden`, for many rows: ``chunk`` of them at a time."""
        pieces = [self.hidden(parameters, [x[:, i : i + chunk] for x in stacked]) for i in range(0, stacked[0].shape[1], chunk)]
        return [torch.cat(group, 1) for group in zip(*pieces)]

    def forward(self, parameters: Parameters, stacked: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """One (M_g, n, …) tensor a group to h, (M_g, n, d1) each, and the logits (n, classes)."""
        both = [self._grouped(g, parameters, "", x) for g, x in enumerate(stacked)]
        return [h for h, _ in both], self.logits(parameters, [o for _, o in both])

    def above(self, parameters: Parameters, hidden: Sequence[Tensor]) -> Tensor:
        """h of every group, (M_g, n, d1) each, to the logits (n, classes)."""
        first = [self._grouped(g, parameters, "first", h) for g, h in enumerate(hidden)]
        return self.logits(parameters, [self._grouped(g, parameters, "upper", u) for g, u in enumerate(first)])

    def outputs(self, parameters: Parameters, stacked: Sequence[Tensor]) -> list[Tensor]:
        """What the workers hand to the head, (M_g, n, …) to (M_g, n, outputs) for every group."""
        return [self._grouped(g, parameters, "", x)[1] for g, x in enumerate(stacked)]

    def logits(self, parameters: Parameters, outputs: Sequence[Tensor]) -> Tensor:
        """The head on outputs (M_g, n, outputs) a group."""
        return F.linear(torch.cat(self.unstack(outputs), 1), parameters["head.weight"], parameters["head.bias"])

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean cross-entropy (eq. 1) of logits (n, classes) and class numbers (n,) or probabilities (n, classes).

        weights : (n,), factors of the rows' losses before the mean
        """
        logits = logits.softmax(1) if self.double_softmax else logits
        return F.cross_entropy(logits, labels) if weights is None else (weights * F.cross_entropy(logits, labels, reduction="none")).mean()


@contextmanager
def full_precision():
    """Keep a GPU's convolutions and products in float32 proper: TF32 keeps ten bits of the fraction."""
    backends = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [b.allow_tf32 for b in backends] if torch.cuda.is_available() else []
    try:
        for backend, _ in zip(backends, before):
            backend.allow_tf32 = False
        yield
    finally:
        for backend, value in zip(backends, before):
            backend.allow_tf32 = value


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        raise ValueError(f"{name}={value!r} must be a whole number from 1 to 1,000,000")
    return value
