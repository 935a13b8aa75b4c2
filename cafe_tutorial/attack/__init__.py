"""Attacks: each takes round views and the public model, never data."""

from .cafe import NestedLoopsCAFE, SingleLoopCAFE
from .clipped import from_clipped
from .exact import ExactCAFE, NotIdentifiable
from .few_rounds import FewRoundsCAFE
from .leak import Leak
from .matching import MatchingAttack
from .objectives import OBJECTIVES
from .one_round import OneRoundCAFE
from .patient import PatientCAFE
from .presets import PRESETS, Hyperparameters
from .ranks import from_order
from .repeats import Repeats

__all__ = [
    "OBJECTIVES", "PRESETS", "ExactCAFE", "FewRoundsCAFE", "Hyperparameters", "Leak", "MatchingAttack", "NestedLoopsCAFE", "NotIdentifiable",
    "OneRoundCAFE", "PatientCAFE", "Repeats", "SingleLoopCAFE", "from_clipped", "from_order",
]  # fmt: skip
