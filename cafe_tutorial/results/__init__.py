"""Measured results that take too long to repeat on a page, as JSON with their provenance."""

from __future__ import annotations

import json
from importlib import resources


def names() -> list[str]:
    """The results at hand."""
    return sorted(f.name.removesuffix(".json") for f in resources.files(__name__).iterdir() if f.name.endswith(".json"))


def load(name: str) -> dict:
    """One results file: what was measured, and the command, seed, device, versions and date that gave it."""
    if name not in names():
        raise ValueError(f"name={name!r} is not among the results: {', '.join(names())}")
    return json.loads((resources.files(__name__) / f"{name}.json").read_text())
