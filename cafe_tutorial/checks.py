"""The check that most arguments share."""

from __future__ import annotations


def at_least_one(name: str, value: int) -> int:
    """``value`` if it is a whole number of at least 1; else a ``ValueError`` that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    return value
