"""A representation taken apart into its layers, so that h and its derivatives cost less than through autograd.

It applies to chains of convolutions, ReLUs and max-pools with a Flatten at the end, as the released network is;
any other representation is used as the function that it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Layer = tuple[nn.Module, Tensor | None, Tensor | None]  # with the weight and the bias to use, where it has them
ENOUGH = 2.5  # entries of h a pixel
FEW = 256  # a convolution with no more entries a filter than this is turned round by one product and a fold


def layers_of(representation: Callable[[Tensor], Tensor]) -> list[Layer] | None:
    """The layers before the Flatten, a convolution first; None where the representation is anything else.

    A ReLU before a max-pool is put behind it: both orders give the same values and the same derivatives.
    """
    module, own = getattr(representation, "module", None), getattr(representation, "parameters", {})
    if type(module) is not nn.Sequential or len(module) < 2 or type(module[0]) is not nn.Conv2d or type(module[-1]) is not nn.Flatten:
        return None
    layers = [(layer, own.get(f"{i}.weight"), own.get(f"{i}.bias")) for i, layer in enumerate(module)]
    if not all(_plain(layer) for layer, *_ in layers[:-1]) or (module[-1].start_dim, module[-1].end_dim) != (1, -1):
        return None
    layers = layers[:-1]
    for i in range(len(layers) - 1):
        if type(layers[i][0]) is nn.ReLU and type(layers[i + 1][0]) is nn.MaxPool2d:
            layers[i], layers[i + 1] = layers[i + 1], layers[i]
    return layers


def _plain(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        padded = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return padded and layer.groups == 1 and pair(layer.stride) == pair(layer.dilation) == (1, 1)
    if type(layer) is nn.MaxPool2d:
        return pair(layer.padding) == (0, 0) and pair(layer.dilation) == (1, 1) and pair(layer.stride) == pair(layer.kernel_size)
    return type(layer) is nn.ReLU


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


def filters(layers: list[Layer]) -> int:
    """How many filters the last convolution has; its share of them is the share of h."""
    return len(layers[_last(layers)][1])


def thinned(layers: list[Layer], every: int) -> list[Layer]:
    """The same chain with every ``every``-th filter of its last convolution alone: its outputs are a part of h.

    A part of the equations determines less, so the smallest singular value of its Jacobian is never above that of h.
    """
    last = _last(layers)
    layer, weight, bias = layers[last]
    return [*layers[:last], (layer, weight[::every], None if bias is None else bias[::every]), *layers[last + 1 :]]


def _last(layers: list[Layer]) -> int:
    return max(i for i, (layer, *_) in enumerate(layers) if type(layer) is nn.Conv2d)


def spare(layers: list[Layer], width: int, pixels: int) -> int:
    """Every how many-th filter of the last convolution leaves enough of h's ``width`` entries for so many pixels; from 1 to 4."""
    return max(1, min(4, int(width / (ENOUGH * pixels)), filters(layers)))


def part(h: Tensor, layers: list[Layer], every: int) -> Tensor:
    """What :func:`thinned` leaves of h (n, d1)."""
    return h.unflatten(1, (filters(layers), -1))[:, ::every].flatten(1)


def pooled(layer: nn.MaxPool2d, value: Tensor) -> tuple[Tensor, Tensor]:
    """The maxima (n, c, y', x') and their numbers among the y x units; torch's CPU pooling wants channels last."""
    value, index = F.max_pool2d(value.contiguous(memory_format=torch.channels_last), layer.kernel_size, ceil_mode=layer.ceil_mode, return_indices=True)
    return value.contiguous(), index.contiguous()


def evaluate(layers: list[Layer], x: Tensor) -> Tensor:
    """h of images x (n, C, h, w), (n, d1), with the gradient in x alone."""
    return _Chain.apply(x, layers)


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers):
        tape, value = [], x
        for layer, weight, bias in layers:
            before = value
            if weight is not None:
                value, kept = F.conv2d(value, weight, bias, padding=layer.padding), None
            elif type(layer) is nn.MaxPool2d:
                value, kept = pooled(layer, value)
            else:
                value = kept = value.relu()
            tape.append((layer, weight, kept, before.shape))
        ctx.tape, ctx.shape = tape, value.shape
        return value.flatten(1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.view(ctx.shape)
        for layer, weight, kept, shape in reversed(ctx.tape):
            if weight is not None:
                gradient = _turned(layer, weight, gradient, shape)
            elif type(layer) is nn.MaxPool2d:
                gradient = gradient.new_zeros(shape).flatten(2).scatter_(2, kept.flatten(2), gradient.flatten(2)).view(shape)
            else:
                gradient = gradient * (kept > 0)
        return gradient, None


def _turned(layer: nn.Conv2d, weight: Tensor, gradient: Tensor, shape: torch.Size) -> Tensor:
    """The gradient at a convolution's input, of the given shape, from that at its output (n, f, y, x)."""
    if weight[0].numel() <= FEW:
        columns = weight.flatten(1).T @ gradient.flatten(2)  # (n, C k k, y x)
        return F.fold(columns, shape[2:], weight.shape[2:], padding=layer.padding)
    return torch.nn.grad.conv2d_input(shape, weight, gradient, padding=layer.padding)
