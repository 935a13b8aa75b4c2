"""The gradient that an order tells: known answers, both readings of fake gradients, and what cannot be solved."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import image_case, smooth_images

from cafe_tutorial.attack.ranks import from_order, low_rank_in_order
from cafe_tutorial.data import load_images
from cafe_tutorial.defense import FakeGradients


def off(found, true):
    """The relative distance of the direction of one matrix to another's."""
    factor = (found * true).sum() / (found * found).sum()
    return float(abs(factor * found - true).max() / abs(true).max()) if factor > 0 else 1.0


def seen(data, defense=None, **options):
    _, model, vfl = image_case(data, d2=64, defense=defense, **options)
    return model, next(vfl.rounds(1))


def order_only(reading="order", sigma=1.0):
    return FakeGradients(sigma=sigma, relative=True, reading=reading, candidates=2)


def low_rank(rank=4, size=(64, 1000), silent=10, seed=0):
    """Rows v_n (d2) times nonnegative h_n (d1), some units silent in all."""
    g = np.random.default_rng(seed)
    v = g.standard_normal((size[0], rank))
    v[g.permutation(size[0])[:silent]] = 0
    return v @ np.maximum(g.standard_normal((rank, size[1])), 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ranks_alone_tell_a_matrix_of_low_rank(seed):
    true = low_rank(seed=seed)
    ranks = true.ravel().argsort(kind="stable").argsort().reshape(true.shape).astype(float)
    found, misfit = low_rank_in_order(ranks, 4)
    assert off(found, true) < 1e-3 and misfit < 1e-3


@pytest.mark.parametrize("reading", ["order", "clip"])
def test_every_workers_gradient_comes_back_from_fake_gradients(reading):
    digits = load_images("mnist-sample", rows=12, seed=0)
    model, view = seen(digits, order_only(reading), batch_size=4)
    true = seen(digits, batch_size=4)[1]
    found, misfits = from_order(view, model)
    for m in range(model.workers):
        own, honest = (model.of_worker(found.gradients, m), model.of_worker(true.gradients, m))
        assert off(own["first.weight"], honest["first.weight"]) < 1e-3 and misfits[m] < 1e-3
        assert off(model.of_worker(view.gradients, m)["first.weight"], honest["first.weight"]) > 0.01
    assert torch.equal(found.gradients["head.weight"], view.gradients["head.weight"])


def test_a_shuffled_upload_shows_by_its_misfit():
    model, view = seen(smooth_images(), order_only())
    g = torch.Generator().manual_seed(0)
    shuffled = {k: v.flatten()[torch.randperm(v.numel(), generator=g)].view_as(v) for k, v in view.gradients.items()}
    assert min(from_order(replace(view, gradients=shuffled), model, steps=100)[1]) > 0.1


def test_it_looks_at_the_order_alone():
    upload = low_rank().astype(np.float32).astype(float)
    once, again = (low_rank_in_order(x, 4, steps=40)[0] for x in (upload, np.arctan(3 * upload) + 5))
    assert np.allclose(once, again, rtol=0, atol=1e-9 * abs(once).max())


@pytest.mark.parametrize("options, text", [({"steps": 0}, "steps=0"), ({"steps": True}, "steps=True"), ({"steps": 1.5}, "steps=1.5")])
def test_steps_must_be_a_whole_number(options, text):
    model, view = seen(smooth_images(), order_only())
    with pytest.raises(ValueError, match=text):
        from_order(view, model, **options)


def test_a_batch_as_large_as_the_first_layer_is_refused():
    model, view = seen(smooth_images(), order_only())
    with pytest.raises(ValueError, match="64 rows, worker 0's first layer is 64 x"):
        from_order(replace(view, indices=torch.arange(64)), model)


def test_it_takes_a_view_and_the_model_and_leaves_the_view_as_it_is():
    parameters = inspect.signature(from_order).parameters
    assert list(parameters) == ["view", "model", "steps"]
    model, view = seen(smooth_images(), order_only())
    before = {k: v.clone() for k, v in view.gradients.items()}
    found, misfits = from_order(view, model, steps=2)
    assert all(torch.equal(before[k], view.gradients[k]) for k in before) and len(misfits) == model.workers
    assert {k: v.shape for k, v in found.gradients.items()} == {k: v.shape for k, v in before.items()}
