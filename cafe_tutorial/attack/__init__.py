"""Attacks: each takes round views and the public model, never data."""

from .cafe import NestedLoopsCAFE, SingleLoopCAFE
from .exact import ExactCAFE, NotIdentifiable
from .few_rounds import FewRoundsCAFE
from .leak import Leak
from .matching import MatchingAttack
from .objectives import OBJECTIVES
from .one_round import OneRoundCAFE
from .presets import PRESETS, Hyperparameters

__all__ = [
    "OBJECTIVES", "PRESETS", "ExactCAFE", "FewRoundsCAFE", "Hyperparameters", "Leak", "MatchingAttack", "NestedLoopsCAFE", "NotIdentifiable",
    "OneRoundCAFE", "SingleLoopCAFE",
]  # fmt: skip
