"""Step III from an exact H: how far it gets, and what it starts again or gives up."""

import sys

import pytest
import torch
from conftest import image_case, smooth_images

from cafe_tutorial.attack.invert import Attempt, invert
from cafe_tutorial.data import load_images


def test_inversion_reaches_float_precision_and_restarts_only_what_missed():
    data = smooth_images(6, 1, 8, 8)
    _, model, _ = image_case(data, (1, 1))
    h = model.representation(0, model.parameters)
    ticks = []
    x, rho = invert(h, h(data.images), (1, 8, 8), generator=torch.Generator().manual_seed(0), goal=1e-10, tick=ticks.append)
    assert ((h(x) - h(data.images)).square().sum(1) / h(data.images).square().sum(1) - rho).abs().max() < 1e-9
    assert (rho < 1e-10).all() and sum(ticks) == 6
    assert (x - data.images).abs().max() < 1e-3 and x.min() >= 0 and x.max() <= 1


@pytest.mark.parametrize("some_true", [False, True])
def test_targets_that_are_no_representation_are_given_up_early(some_true, monkeypatch):
    """Two starts show that none of many targets is any image's h: the longer ones are left out, and the count of rows adds up."""
    data = load_images("digits", rows=40, seed=0)
    _, model, vfl = image_case(data, (1, 1), d2=32)
    h, ticks, tried = model.representation(0, vfl.parameters), [], []
    true = h(data.images).detach()
    targets = true + true.roll(1, 0)  # sums of two rows' are none
    if some_true:
        targets[::10] = true[::10]
    module = sys.modules["cafe_tutorial.attack.invert"]
    plain = module._attempt
    monkeypatch.setattr(module, "_attempt", lambda *given: tried.append(given[3].start) or plain(*given))
    attempts = (Attempt("decoded", 20), Attempt("decoded", 100), Attempt("smooth", 2), Attempt("grey", 2))
    _, rho = invert(h, targets, (1, 8, 8), attempts=attempts, goal=1e-10, generator=torch.Generator().manual_seed(0), tick=ticks.append)
    assert sum(ticks) == len(targets) and (float(rho.min()) < 1e-3) == some_true
    assert tried == ["decoded", "decoded", "smooth", "grey"][: 4 if some_true else len(tried)] and len(tried) >= 1 + 3 * some_true
    assert some_true or len(tried) <= 2
