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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

Parameters = dict[str, Tensor]


class BottomModel(nn.Module):
    """One worker's model: ``upper(first(representation(x)))``.

    Parameters
    ----------
    representation : module, one row's part to h, shape (n, d1); an identity for tables
    first : nn.Linear(d1, d2), the layer whose gradients leak h
    upper : module, (n, d2) to the worker's output (n, outputs)
    """

    def __init__(self, representation: nn.Module, first: nn.Linear, upper: nn.Module):
        super().__init__()
        self.representation, self.first, self.upper = representation, first, upper

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (n, …) to h (n, d1) and the output (n, outputs)."""
        h = self.representation(x)
        return h, self.upper(self.first(h))


def convolutional_bottom(part_shape: Sequence[int], *, d2: int = 256, outputs: int = 10) -> BottomModel:
    """The released network for a tile (C, h, w): two 5x5 convolutions of 64 and 128 filters, each with
    ReLU and 2x2 pooling ("same"), then fully connected layers of ``d2``, 64 and ``outputs`` units."""
    channels, height, width = part_shape
    flat = 128 * math.ceil(height / 4) * math.ceil(width / 4)
    representation = nn.Sequential(
        nn.Conv2d(channels, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(64, 128, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(),
    )  # fmt: skip
    upper = nn.Sequential(nn.ReLU(), nn.Linear(d2, 64), nn.ReLU(), nn.Linear(64, outputs), nn.ReLU())
    return BottomModel(representation, nn.Linear(flat, d2), upper)


def mlp_bottom(width: int, *, d2: int = 256, outputs: int = 10, activation: str = "tanh") -> BottomModel:
    """A bottom model for ``width`` table columns: h is the record itself, then ``d2``, 64 and ``outputs`` units."""
    kinds = {"tanh": nn.Tanh, "relu": nn.ReLU}
    if activation not in kinds:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(kinds)}")
    act = kinds[activation]
    upper = nn.Sequential(act(), nn.Linear(d2, 64), act(), nn.Linear(64, outputs), act())
    return BottomModel(nn.Identity(), nn.Linear(width, d2), upper)


def _glorot(module: nn.Module, generator: torch.Generator) -> None:
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)


@dataclass(frozen=True)
class Piece:
    """A part of a bottom model as a function: ``module`` with these ``parameters`` in place of its own."""

    module: nn.Module
    parameters: Parameters

    def __call__(self, x: Tensor) -> Tensor:
        return functional_call(self.module, self.parameters, (x,))


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
            known = all(type(part).__module__.startswith(("torch.nn", __name__)) for part in bottom.modules())
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
    def _seeded(cls, bottoms, part_shapes, classes, seed, options) -> VFLModel:
        if _positive("classes", classes) < 2:
            raise ValueError("classes=1 must be at least 2: with a single class the loss and every gradient are zero")
        head = nn.Linear(sum(b.upper[-2].out_features for b in bottoms), classes)
        generator = torch.Generator().manual_seed(seed)
        for module in [*bottoms, head]:
            _glorot(module, generator)
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

    def _grouped(self, g: int, parameters: Parameters, part: str, x: Tensor):
        """Apply one sub-module (or the whole bottom model) of group g to x (M_g, n, …)."""
        template = getattr(self._templates[g], part) if part else self._templates[g]
        prefix = f"group{g}.{part}." if part else f"group{g}."
        own = {k[len(prefix):]: v for k, v in parameters.items() if k.startswith(prefix)}
        if x.shape[0] == 1:
            out = functional_call(template, {k: v[0] for k, v in own.items()}, (x[0],))
            return tuple(o[None] for o in out) if isinstance(out, tuple) else out[None]
        if not own:
            return template(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return vmap(lambda p, z: functional_call(template, p, (z,)))(own, x)

    def hidden(self, parameters: Parameters, stacked: Sequence[Tensor]) -> list[Tensor]:
        """h(Θ_c, x) for every group, (M_g, n, …) to (M_g, n, d1)."""
        return [self._grouped(g, parameters, "representation", x) for g, x in enumerate(stacked)]

    def forward(self, parameters: Parameters, stacked: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """One (M_g, n, …) tensor a group to h, (M_g, n, d1) each, and the logits (n, classes)."""
        both = [self._grouped(g, parameters, "", x) for g, x in enumerate(stacked)]
        return [h for h, _ in both], self._logits(parameters, [o for _, o in both])

    def above(self, parameters: Parameters, hidden: Sequence[Tensor]) -> Tensor:
        """h of every group, (M_g, n, d1) each, to the logits (n, classes)."""
        first = [self._grouped(g, parameters, "first", h) for g, h in enumerate(hidden)]
        return self._logits(parameters, [self._grouped(g, parameters, "upper", u) for g, u in enumerate(first)])

    def _logits(self, parameters: Parameters, outputs: Sequence[Tensor]) -> Tensor:
        """The head on outputs (M_g, n, outputs) a group."""
        return F.linear(torch.cat(self.unstack(outputs), 1), parameters["head.weight"], parameters["head.bias"])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy (eq. 1) of logits (n, classes) and class numbers (n,) or probabilities (n, classes)."""
        return F.cross_entropy(logits.softmax(1) if self.double_softmax else logits, labels)


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
