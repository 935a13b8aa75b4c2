"""One round's gradients as uploads: each worker's own part, and that of the head's holder, under a defence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import grad, vmap

from .defense.base import Defense, flat
from .model import Parameters, VFLModel

CHUNK = 8  # rows whose own gradients are held at once


def uploads(model: VFLModel, gradients: Parameters) -> list[Parameters]:
    """A dict a party, M workers and the head's holder, under plain names."""
    head = {name: g for name, g in gradients.items() if name.startswith("head.")}
    return [*(model.of_worker(gradients, m) for m in range(model.workers)), head]


def together(model: VFLModel, parties: Sequence[Parameters]) -> Parameters:
    """The inverse of :func:`uploads`."""
    found: Parameters = {}
    for g, group in enumerate(model.groups):
        for name in parties[group[0]]:
            found[f"group{g}.{name}"] = torch.stack([parties[m][name] for m in group])
    return {**found, **parties[-1]}


def defended(model: VFLModel, gradients: Parameters, defenses: Sequence[Defense], rows: int) -> Parameters:
    """What the server receives: every party's upload through its own defence."""
    parties = uploads(model, gradients)
    return together(model, [defense(own, rows=rows) for defense, own in zip(defenses, parties)])


def row_norms(model: VFLModel, parameters: Parameters, stacked: Sequence[Tensor], labels: Tensor) -> Tensor:
    """The norm of each row's own gradient, party by party: (M + 1, n).

    stacked : one (M_g, n, …) tensor a group; labels : (n,)
    """

    def loss(weights, parts, label):
        return model.loss(model.forward(weights, [x[:, None] for x in parts])[1], label[None])

    def norms(weights, parts, label):
        return torch.stack([flat(own).norm() for own in uploads(model, grad(loss)(weights, parts, label))])

    weights = {k: v.detach() for k, v in parameters.items()}
    return vmap(norms, in_dims=(None, 1, 0), out_dims=1, chunk_size=CHUNK)(weights, list(stacked), labels)


def weighted_average(model: VFLModel, parameters: Parameters, stacked: Sequence[Tensor], labels: Tensor, factors: Tensor) -> Parameters:
    """The batch's averaged gradient with each row's part in it scaled, party by party.

    factors : (M + 1, n), the head's holder last. One backward pass: what flows back into a worker's outputs is scaled row by
    row, and the head has a loss of its own.
    """
    scale = [c[..., None] for c in model.stack(list(factors[:-1]))]  # (M_g, n, 1) a group
    outputs = model.outputs(parameters, stacked)  # (M_g, n, outputs) a group
    below = model.logits({k: v.detach() for k, v in parameters.items()}, [c * o + ((1 - c) * o).detach() for c, o in zip(scale, outputs)])
    above = model.logits(parameters, [o.detach() for o in outputs])
    loss = model.loss(below, labels) + model.loss(above, labels, factors[-1])
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()))))
