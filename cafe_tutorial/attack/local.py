"""The Jacobian of a chain of convolutions, ReLUs and max-pools, built from each unit's window of pixels.

A unit of the first convolution sees 5x5 pixels, and the window grows from layer to layer; outside it the
derivatives are zero. Only the windows are computed, at a fraction of the cost of a forward pass a pixel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Layer, pair, pooled

TOGETHER = 8  # images, within a CPU's cache


def at_once(width: int, pixels: int, device: torch.device) -> int:
    """How many Jacobians (pixels, width) to build together: a few on a CPU, on a GPU what fits into 200 MB of float64."""
    return TOGETHER if device.type == "cpu" else max(1, 25_000_000 // (width * pixels))


@dataclass(frozen=True)
class _Windows:
    """Derivatives of the units (c, y, x) of one layer, of n images.

    D : (c, C, v, w, y, x, n), for the C channels of a window of v x w pixels; the window of unit (y, x) begins at pixel
    ``origin`` + ``stride`` * (y, x), which may lie outside the image
    """

    D: Tensor
    origin: tuple[int, int]
    stride: tuple[int, int]


def local_jacobian(layers: list[Layer], x: Tensor) -> Tensor:
    """The Jacobian at each image x (n, C, h, w), transposed: (n, pixels, d1), in the images' precision.

    layers : as from :func:`~cafe_tutorial.attack.layers.layers_of`
    """
    windows, value = None, x
    for layer, weight, bias in layers:
        if weight is not None:
            value = F.conv2d(value, weight, bias, padding=layer.padding)
            windows = _first(layer, weight, value) if windows is None else _convolved(layer, weight, windows, value)
        elif type(layer) is nn.MaxPool2d:
            windows, value = _pooled(layer, windows, value)
        else:
            value = value.relu()
            windows = _Windows(windows.D * _images_last(value).sign()[:, None, None, None], windows.origin, windows.stride)
    return _whole(windows, x)


def _images_last(value: Tensor) -> Tensor:
    """(n, c, y, x) to (c, y, x, n), so that all that follows runs over the images."""
    return value.permute(1, 2, 3, 0).contiguous()


def _first(layer: nn.Conv2d, weight: Tensor, value: Tensor) -> _Windows:
    """A first convolution's derivatives are its weights, the same at every unit."""
    n, _, height, width = value.shape
    D = weight[..., None, None, None].expand(*weight.shape, height, width, n)
    return _Windows(D, tuple(-p for p in pair(layer.padding)), (1, 1))


def _convolved(layer: nn.Conv2d, weight: Tensor, old: _Windows, value: Tensor) -> _Windows:
    """For each entry of the kernel its weights (f, c) times the windows, put where the entry looks."""
    (c, C, v, w, height, width, n), (sy, sx), (py, px) = old.D.shape, old.stride, pair(layer.padding)
    ky, kx = weight.shape[2:]
    D = value.new_zeros(len(weight), C, v + sy * (ky - 1), w + sx * (kx - 1), *value.shape[2:], n)
    for i in range(ky):
        for j in range(kx):
            (to_y, from_y), (to_x, from_x) = _overlap(i - py, height, value.shape[2]), _overlap(j - px, width, value.shape[3])
            seen = old.D[..., from_y, from_x, :]
            moved = (weight[:, :, i, j] @ seen.reshape(c, -1)).view(len(weight), *seen.shape[1:])
            D[:, :, sy * i : sy * i + v, sx * j : sx * j + w, to_y, to_x] += moved
    return _Windows(D, (old.origin[0] - sy * py, old.origin[1] - sx * px), old.stride)


def _overlap(shift: int, size: int, out: int) -> tuple[slice, slice]:
    """Which of the places 0 … out - 1 have their counterpart, ``shift`` further on, within 0 … size - 1; and these counterparts."""
    begin = min(max(0, -shift), out)
    end = max(begin, min(out, size - shift))
    return slice(begin, end), slice(begin + shift, end + shift) if end > begin else slice(0, 0)


def _pooled(layer: nn.MaxPool2d, old: _Windows, value: Tensor) -> tuple[_Windows, Tensor]:
    """Each unit has the window of the unit that is its maximum."""
    (c, C, v, w, height, width, n), (sy, sx), (ky, kx) = old.D.shape, old.stride, pair(layer.kernel_size)
    value, index = pooled(layer, value)
    index = _images_last(index)
    D = value.new_zeros(c, C, v + sy * (ky - 1), w + sx * (kx - 1), *value.shape[2:], n)
    number = torch.arange(height * width, device=value.device).view(height, width, 1)
    for i in range(ky):
        for j in range(kx):
            here = number[i::ky, j::kx][: value.shape[2], : value.shape[3]]  # the last windows may be cut off, or left out
            ys, xs = here.shape[:2]
            chosen = (index[:, :ys, :xs] == here).to(D)[:, None, None, None]
            place = D[:, :, sy * i : sy * i + v, sx * j : sx * j + w, :ys, :xs]
            place.addcmul_(old.D[..., i::ky, j::kx, :][..., :ys, :xs, :], chosen)
    return _Windows(D, old.origin, (sy * ky, sx * kx)), value


def _whole(windows: _Windows, x: Tensor) -> Tensor:
    """The windows at their place in the image: (n, pixels, d1)."""
    D, (oy, ox), (sy, sx) = windows.D, windows.origin, windows.stride
    c, _, v, w, height, width, n = D.shape
    J = x.new_zeros(n, *x.shape[1:], c, height, width)
    for i in range(height):
        to_y, from_y = _overlap(-(oy + sy * i), v, x.shape[2])
        for j in range(width):
            to_x, from_x = _overlap(-(ox + sx * j), w, x.shape[3])
            J[:, :, to_y, to_x, :, i, j] = D[:, :, from_y, from_x, i, j].permute(4, 1, 2, 3, 0)
    return J.flatten(1, 3).flatten(2)
