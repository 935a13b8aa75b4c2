"""Attacks: each takes round views and the public model, never data."""

from .cafe import NestedLoopsCAFE, SingleLoopCAFE
from .exact import ExactCAFE, NotIdentifiable
from .leak import Leak
from .presets import PRESETS, Hyperparameters

__all__ = ["PRESETS", "ExactCAFE", "Hyperparameters", "Leak", "NestedLoopsCAFE", "NotIdentifiable", "SingleLoopCAFE"]
