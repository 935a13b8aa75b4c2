"""One round's gradients as uploads: each worker's own part, and that of the head's holder, under a defence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

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

    stacked : one (M_g, n, …) tensor a group; labels : (n,). A linear layer's gradient of one row is δ aᵀ, with the norm ‖δ‖ ‖a‖, so
    that one pass over all rows does; models with other layers than linear ones and plain convolutions are done row by row.
    """
    if not all(_known(layer) for m in range(model.workers) for layer in _with_weights(model.template(m))):
        return _norms_of_rows(model, parameters, stacked, labels)
    weights = {k: v.detach().requires_grad_() for k, v in parameters.items()}
    outputs, taps = zip(*(_tapped(model.template(m), model.of_worker(weights, m), x) for m, x in enumerate(model.unstack(stacked))))
    joined = torch.cat(outputs, 1)  # (n, Σ outputs)
    logits = model.logits(weights, model.stack(outputs))
    deltas = iter(torch.autograd.grad(len(labels) * model.loss(logits, labels), [*(out for own in taps for *_, out in own), logits]))
    squares = [sum(_squares(layer, given, next(deltas)) for layer, given, _ in own) for own in taps]
    return torch.stack([*squares, next(deltas).square().sum(1) * (joined.square().sum(1) + 1)]).sqrt().detach()


def _with_weights(module: nn.Module) -> list[nn.Module]:
    """The layers that have parameters of their own."""
    return [layer for layer in module.modules() if list(layer.parameters(recurse=False))]


def _known(layer: nn.Module) -> bool:
    """Whether :func:`_squares` knows the layer."""
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and layer.bias is not None
    return isinstance(layer, nn.Linear)


def _tapped(module: nn.Module, own: Parameters, x: Tensor) -> tuple[Tensor, list[tuple[nn.Module, Tensor, Tensor]]]:
    """A worker's output, and each of its layers with what went in and what came out."""
    taps: list[tuple[nn.Module, Tensor, Tensor]] = []
    hooks = [layer.register_forward_hook(lambda layer, given, out: taps.append((layer, given[0].detach(), out))) for layer in _with_weights(module)]
    try:
        return functional_call(module, own, (x,))[1], taps
    finally:
        for hook in hooks:
            hook.remove()


def _squares(layer: nn.Module, given: Tensor, delta: Tensor) -> Tensor:
    """Squared norm of each row's gradient of the layer's weight and bias, (n,)."""
    if isinstance(layer, nn.Linear):
        return delta.square().sum(1) * (given.square().sum(1) + 1)
    patches = F.unfold(given, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # (n, C k², positions)
    delta = delta.flatten(2)  # (n, filters, positions)
    return (delta @ patches.mT).square().sum((1, 2)) + delta.sum(2).square().sum(1)


def _norms_of_rows(model: VFLModel, parameters: Parameters, stacked: Sequence[Tensor], labels: Tensor) -> Tensor:
    """:func:`row_norms` for any layers, from every row's whole gradient."""

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
