"""Hyperparameters of the paper's attack: table 9 and the released code."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Hyperparameters:
    """The settings of steps I, II and III; the defaults are table 9's for MNIST.

    Attributes
    ----------
    lr_step1, lr_step2, lr_step3 : learning rates of the three steps
    alpha, beta, gamma : weights of the gradient, total-variation and representation terms of eq. 9
    xi : threshold ξ of the truncated total variation
    init_V, init_H : V starts uniform in [-init_V, init_V], Ĥ uniform in [0, init_H). The paper gives no
        ranges; these are the released code's
    switch_step2, switch_step3 : step II begins once step I's objective has fallen below the first,
        step III once step II's has fallen below the second (section 4.2 names 1e-9 and 5e-9).
        None runs all three steps from the first iteration, as Algorithm 4 is written
    double_bias_correction : correct Adam's moments twice, as the released code does
    global_step_count : correct by the iteration number, as the released code does, and not by how
        often the row itself was drawn
    """

    lr_step1: float = 1e-2
    lr_step2: float = 1e-2
    lr_step3: float = 1e-2
    alpha: float = 1e-2
    beta: float = 1e-4
    gamma: float = 1e-3
    xi: float = 25.0
    init_V: float = 8e-4
    init_H: float = 8e-2
    switch_step2: float | None = None
    switch_step3: float | None = None
    double_bias_correction: bool = False
    global_step_count: bool = False

    def __post_init__(self):
        for name in ("lr_step1", "lr_step2", "lr_step3", "init_V", "init_H"):
            if not (self._number(name) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number above 0")
        for name in ("alpha", "beta", "gamma", "xi"):
            if not (self._number(name) and getattr(self, name) >= 0):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number, and not negative")
        for name in ("switch_step2", "switch_step3"):
            if getattr(self, name) is not None and not (self._number(name) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number above 0, or None to start at once")
        for name in ("double_bias_correction", "global_step_count"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")

    def _number(self, name: str) -> bool:
        value = getattr(self, name)
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


PRESETS = {
    "mnist": Hyperparameters(),
    "cifar10": Hyperparameters(lr_step1=5e-3, lr_step2=8e-3, lr_step3=2e-2, xi=90.0),
    "linnaeus5": Hyperparameters(lr_step1=5e-3, lr_step2=5e-3, lr_step3=1e-2, xi=110.0),
    "yale": Hyperparameters(xi=32.0),
    "released-code": Hyperparameters(lr_step1=5e-3, double_bias_correction=True, global_step_count=True),
}
