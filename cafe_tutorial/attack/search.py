"""The search for images whose h̃ lies in given spans.

For an image x, let P h̃(x) be what of h̃(x) = [h(x); 1] lies outside the span of a batch. For the batch's rows it is zero,
so ρ(x) = ‖P h̃(x)‖² / ‖h̃(x)‖² is an objective that the server can evaluate anywhere, without knowing a single h_n.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model import full_precision
from .invert import project, start
from .spans import Span
from .step3 import total_variation

TINY = 1e-20  # keeps the logarithm of an exact fit finite


class Outside:
    """What of h̃(x) lies outside of spans, for images x.

    representation : x (n, …) to h (n, d1); spans : the spans that an image is to lie in, of one worker with one Θ;
    dtype : of the images. Called with x it returns (n, r (d1 + 1)), r the number of spans, the last row of each scaled
    as the span's is.
    """

    def __init__(self, representation: Callable[[Tensor], Tensor], spans: list[Span], dtype: torch.dtype = torch.float32):
        self.representation, self.scale = representation, spans[0].scale
        self.bases = [s.basis.to(dtype) for s in spans]

    def extended(self, x: Tensor) -> Tensor:
        """h̃ of the images, (n, d1 + 1), the last entry scaled."""
        h = self.representation(x)
        return torch.cat([h, torch.full_like(h[:, :1], self.scale)], 1)

    def __call__(self, x: Tensor) -> Tensor:
        h = self.extended(x)
        return torch.cat([h - (h @ U) @ U.T for U in self.bases], 1)

    def relative(self, x: Tensor) -> Tensor:
        """ρ(x), the mean over the spans, (n,)."""
        h = self.extended(x)
        outside = sum((h - (h @ U) @ U.T).square().sum(1) for U in self.bases)
        return outside / (len(self.bases) * h.square().sum(1))


@dataclass(frozen=True)
class Search:
    """One pass of starts: Adam at a rate falling from ``rate`` to zero in ``steps``, with noise added to the image up to
    55 % of them and a total-variation weight ``tv`` that vanishes half-way."""

    starts: int = 48
    steps: int = 300
    rate: float = 0.1
    noise: float = 0.03
    tv: float = 0.02


def seek(outside: Outside, known: Tensor, shape: tuple[int, ...], search: Search, generator: torch.Generator) -> Tensor:
    """Images (starts, *shape) near rows of the batch that are not known yet.

    Each start draws a direction w of the span that is orthogonal to the known h̃, and minimizes
    log(‖P h̃(x)‖² / (w · h̃(x))²): at a known row w · h̃ is zero, so that no start ends there.

    outside : of one span; known : (f, k), coordinates of the known h̃ in its basis
    """
    U = outside.bases[0]
    w = torch.randn(search.starts, U.shape[1], generator=generator, dtype=torch.float64)
    if len(known):
        directions = torch.linalg.qr(known.T)[0].cpu()
        w = w - (w @ directions) @ directions.T
    w = torch.nn.functional.normalize(w, dim=1).to(U)
    x = start("smooth", search.starts, shape, generator).to(U).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=search.rate)
    for i in range(search.steps):
        done = i / search.steps
        optimizer.param_groups[0]["lr"] = search.rate * 0.5 * (1 + math.cos(math.pi * done))
        with full_precision():
            h = outside.extended(x)
            inside = h @ U
            misses = (h - inside @ U.T).square().sum(1)
            loss = (misses + TINY).log().sum() - ((inside * w).sum(1).square() + TINY).log().sum()
            if done < 0.5:
                loss = loss + search.tv * (1 - 2 * done) * total_variation(x).sum() / x.shape[1]
            (x.grad,) = torch.autograd.grad(loss, x)
        optimizer.step()
        with torch.no_grad():
            noise = search.noise * max(0.0, 1 - done / 0.55)
            if noise:
                x.add_(noise * torch.randn(x.shape, generator=generator).to(x))
            x.copy_(project(x))
    return x.detach()
