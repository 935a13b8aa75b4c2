"""A start for step III: what a linear map reads from h, fitted to random images and their h.

The server knows h, so it can make as many pairs (x, h(x)) as it likes. The map is ridge regression on them, solved in its
dual form; it knows nothing about the private data but the size of a slice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

DRAWS = 512
GRAINS = (2, 3, 4, 7)  # sizes of the noise that is enlarged to an image
RIDGE = 1e-3  # of the mean of the Gram matrix' diagonal
AT_ONCE = 64


def linear_decoder(representation: Callable[[Tensor], Tensor], shape: tuple[int, int, int], *, like: Tensor, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """The map from h (n, d1) to images (n, *shape) in [0, 1].

    representation : (n, *shape) to (n, d1), public; shape : (C, h, w); like : a tensor of the device and precision to work
    with; generator : draws the images
    """
    x = random_images(DRAWS, shape, generator=generator).to(like)
    with torch.no_grad():
        h = torch.cat([representation(part) for part in x.split(AT_ONCE)]).double()  # (n, d1)
    mean_x, mean_h = x.flatten(1).double().mean(0), h.mean(0)
    h = h - mean_h
    gram = h @ h.T  # (n, n)
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    fitted = torch.linalg.solve(gram, x.flatten(1).double() - mean_x)  # (n, pixels)

    def decode(target: Tensor) -> Tensor:
        read = mean_x + (target.double() - mean_h) @ h.T @ fitted  # (m, pixels)
        return read.clamp(0, 1).view(len(target), *shape).to(target)

    return decode


def random_images(n: int, shape: tuple[int, int, int], *, generator: torch.Generator) -> Tensor:
    """Images (n, *shape) in [0, 1]: uniform noise of a few grains, enlarged, of random contrast and brightness."""
    images = torch.cat([enlarged_noise(-(-n // len(GRAINS)), shape, k, generator=generator) for k in GRAINS])[:n]
    contrast, brightness = torch.rand(2, len(images), 1, 1, 1, generator=generator)
    return ((images - 0.5) * 2 * contrast + brightness).clamp(0, 1)


def enlarged_noise(n: int, shape: tuple[int, int, int], grain: int, *, generator: torch.Generator) -> Tensor:
    """Uniform noise of ``grain`` x ``grain`` pixels, bicubic to full size, (n, *shape); a little outside [0, 1] in places."""
    noise = torch.rand(n, shape[0], grain, grain, generator=generator)
    return F.interpolate(noise, size=shape[1:], mode="bicubic", align_corners=False)
