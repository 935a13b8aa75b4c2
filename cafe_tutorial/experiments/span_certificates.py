"""The same for the few-rounds and one-round attacks, whose certificates rest on spans: see ``certificates``."""

from __future__ import annotations

import torch

from .certificates import Setting
from .certificates import run as count

SETTINGS = (
    Setting("breast-cancer", 100, 10, columns=(5, 10, 15), method="few-rounds", epochs=4),
    Setting("digits", 100, 5, workers=4, method="few-rounds", epochs=2, seeds=2),
    Setting("digits", 100, 10, workers=4, method="few-rounds", epochs=4, seeds=2),
    Setting("mnist-sample", 60, 6, workers=4, method="few-rounds", epochs=2, seeds=2),
    Setting("mnist-sample", 60, 6, workers=16, method="few-rounds", epochs=3),
    Setting("mnist-sample", 60, 6, workers=4, pretrain=60, method="few-rounds", epochs=3),
    Setting("photos", 24, 4, workers=4, method="few-rounds", epochs=3),
    Setting("mnist-sample", 60, 6, workers=4, method="few-rounds", epochs=3, schedule="random"),
    Setting("digits", 100, 10, workers=4, method="one-round", seeds=2),
    Setting("mnist-sample", 100, 10, workers=1, method="one-round", seeds=2),
    Setting("mnist-sample", 100, 20, workers=4, method="one-round"),
    Setting("mnist-sample", 100, 10, workers=16, method="one-round"),
    Setting("mnist-sample", 100, 20, workers=4, pretrain=60, method="one-round"),
    Setting("photos", 24, 8, workers=4, method="one-round"),
)


def run(*, device: torch.device, seed: int = 0, progress: bool = True, settings: tuple[Setting, ...] = SETTINGS) -> dict:
    """As :func:`~cafe_tutorial.experiments.certificates.run`."""
    return count(device=device, seed=seed, progress=progress, settings=settings)
