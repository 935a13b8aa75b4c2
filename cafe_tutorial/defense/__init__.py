"""Defences: what a worker can upload in place of its gradient."""

from __future__ import annotations

import inspect

from .base import Defense
from .compression import HalfPrecision, Quantization, TopK
from .fake_gradients import FakeGradients
from .privacy import GaussianMechanism

DEFENSES: dict[str, type[Defense]] = {"fake": FakeGradients, "dp": GaussianMechanism, "half": HalfPrecision, "top-k": TopK, "quantized": Quantization}

__all__ = ["DEFENSES", "Defense", "FakeGradients", "GaussianMechanism", "HalfPrecision", "Quantization", "TopK", "defense_from"]


def defense_from(text: str, *, seed: int = 0) -> Defense:
    """The defence that ``NAME[:option=value,…]`` names, for example ``fake:sigma=3,relative=true``.

    Options are the keyword arguments of the classes in ``DEFENSES``; seed : where the text gives none.
    """
    name, _, rest = text.partition(":")
    if name not in DEFENSES:
        raise ValueError(f"defense={text!r}: {name!r} must be one of {', '.join(DEFENSES)}")
    known = {k: p for k, p in inspect.signature(DEFENSES[name].__init__).parameters.items() if k != "self"}
    options = {"seed": seed}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known or not equals:
            raise ValueError(f"defense={text!r}: {part!r} must be OPTION=VALUE with OPTION one of {', '.join(known)}")
        options[key] = _value(text, key, value, str(known[key].annotation))
    return DEFENSES[name](**options)


def _value(text: str, key: str, value: str, annotation: str) -> object:
    kind = annotation.removesuffix(" | None")
    try:
        if kind == "bool":
            return {"true": True, "false": False}[value.lower()]
        return {"float": float, "int": int}.get(kind, str)(value)
    except (ValueError, KeyError):
        what = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind]
        raise ValueError(f"defense={text!r}: {key}={value!r} must be {what}") from None
