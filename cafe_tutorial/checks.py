"""The checks that most arguments share."""

from __future__ import annotations

import argparse


def at_least_one(name: str, value: int) -> int:
    """``value`` if it is a whole number of at least 1; else a ``ValueError`` that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    return value


def whole_numbers(text: str, example: str) -> list[int]:
    """Whole numbers with commas between them, from the command line; else an error that shows the example."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas, for example {example}") from None
