"""What real systems do to a gradient to send less of it: half precision, the largest entries alone, few bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model import Parameters
from .base import Defense, flat, one_of, positive, unflat

KINDS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class HalfPrecision(Defense):
    """Every entry rounded to 16 bits; kind : ``float16`` (10 bits of fraction) or ``bfloat16`` (7)."""

    def __init__(self, *, kind: str = "float16", seed: int = 0):
        super().__init__(seed=seed)
        self.kind = one_of("kind", kind, tuple(KINDS))

    def __call__(self, gradient: Parameters, *, rows: int) -> Parameters:
        return {name: g.to(KINDS[self.kind]).to(g) for name, g in gradient.items()}


class TopK(Defense):
    """Only the largest entries of the whole upload by absolute value, zeros elsewhere; share : of all entries, above 0 to 1."""

    def __init__(self, *, share: float = 0.01, seed: int = 0):
        super().__init__(seed=seed)
        self.share = positive("share", share, most=1.0)

    def __call__(self, gradient: Parameters, *, rows: int) -> Parameters:
        true = flat(gradient)
        kept = true.abs().topk(max(1, round(self.share * len(true))), sorted=False).indices
        return unflat(torch.zeros_like(true).index_copy_(0, kept, true[kept]), gradient)


class Quantization(Defense):
    """Each tensor on 2^bits - 1 evenly spaced values from its largest entry's negative to it, rounded up or down at random so
    that the mean is right (QSGD); bits : 2 to 16."""

    def __init__(self, *, bits: int = 8, seed: int = 0):
        super().__init__(seed=seed)
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16:
            raise ValueError(f"bits={bits!r} must be a whole number from 2 to 16")
        self.bits = bits

    def __call__(self, gradient: Parameters, *, rows: int) -> Parameters:
        return {name: self._quantized(g) for name, g in gradient.items()}

    def _quantized(self, g: Tensor) -> Tensor:
        most = 2 ** (self.bits - 1) - 1
        step = g.abs().max() / most
        if step == 0:
            return g.clone()
        return step * (g / step + torch.rand(g.shape, generator=self.generator).to(g)).floor().clamp(-most, most)
