"""Fixed batches against noise: the same batch comes back, so the attacker averages what it sees of it."""

from __future__ import annotations

import dataclasses

import torch

from ..model import Parameters
from ..protocol import RoundView


class Repeats:
    """Views of the same batch, averaged as they come; Θ must stand still.

    Noise with mean zero shrinks as one over the root of the number of repeats. What the batch itself says stays.
    """

    def __init__(self):
        self._seen: dict[tuple[int, ...], tuple[RoundView, Parameters, int]] = {}

    def observe(self, view: RoundView) -> None:
        """Use one round. Raises ``ValueError`` when Θ is another one than in the rounds before."""
        first, total, count = self._seen.get(key := tuple(sorted(view.indices.tolist())), (view, {}, 0))
        known = next(iter(self._seen.values()))[0].parameters if self._seen else view.parameters
        if known is not view.parameters and any(not torch.equal(v, known[k]) for k, v in view.parameters.items()):
            raise ValueError(f"view.parameters of round {view.round} differ from those of the rounds before; gradients of different Θ have no common mean")
        new = {k: total.get(k, 0) + g.double() for k, g in view.gradients.items()}
        self._seen[key] = first, new, count + 1

    def views(self) -> list[RoundView]:
        """One view a batch, with the mean of its gradients, in the order in which the batches first came."""
        return [dataclasses.replace(view, gradients={k: (g / count).to(view.gradients[k]) for k, g in total.items()}) for view, total, count in self._seen.values()]

    @property
    def counts(self) -> list[int]:
        """How often each batch came."""
        return [count for *_, count in self._seen.values()]
