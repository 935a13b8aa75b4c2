"""Entries that were cut off and come back from the others: known answers, any rank, what cannot be solved, and the attack behind it."""

from dataclasses import replace

import pytest
import torch
from conftest import image_case, smooth_images, table_case

from cafe_tutorial.attack import OneRoundCAFE, from_clipped
from cafe_tutorial.attack.clipped import completed, uncut
from cafe_tutorial.data import load_images
from cafe_tutorial.defense import FakeGradients
from cafe_tutorial.metrics import score


def off(found, true):
    return float((found.double() - true.double()).norm() / true.double().norm())


def clip(sigma, **options):
    return FakeGradients(sigma=sigma, relative=True, candidates=2, **options)


def seen(data, *, seed=0, **options):
    """One round with the defence and the same round without it."""
    defense = options.pop("defense")
    cases = [image_case(data, d2=64, seed=seed, defense=d, **options) for d in (defense, None)]
    return cases[0][0], cases[0][1], *(next(c[2].rounds(1)) for c in cases)


@pytest.mark.parametrize("rank, seed", [(1, 0), (2, 1), (4, 2), (8, 3), (16, 4)])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_a_matrix_of_low_rank_comes_back_from_a_part_of_its_entries(rank, seed, share):
    g = torch.Generator().manual_seed(seed)
    v, h = torch.randn(64, rank, generator=g).double(), torch.randn(rank, 200, generator=g).double().relu()
    v[torch.randperm(64, generator=g)[:8]] = 0  # silent units
    true, sure = v @ h, torch.rand(64, 200, generator=g) >= share
    found, misfit, own = completed(torch.where(sure, true, true.sign() * 0.01), sure, rank)
    assert off(found, true) < 1e-8 and misfit < 1e-8 and own == rank and not found[v.eq(0).all(1)].any()


@pytest.mark.parametrize("sigma", [1.0, 3.0])
@pytest.mark.parametrize("data, size, seed", [("mnist-sample", 4, 0), ("mnist-sample", 7, 1), ("digits", 3, 2), ("photos", 4, 3)])
def test_every_workers_gradient_comes_back(data, size, seed, sigma):
    _, model, view, true = seen(load_images(data, rows=12, seed=seed), batch_size=size, seed=seed, defense=clip(sigma, seed=seed))
    found, _ = from_clipped(view, model)
    for m in range(model.workers):
        own, honest, upload = (model.of_worker(v.gradients, m) for v in (found, true, view))
        assert off(own["first.weight"], honest["first.weight"]) < 1e-6
        assert all(torch.equal(own[k], upload[k]) for k in own if not k.startswith("first"))
    assert torch.equal(found.gradients["head.weight"], view.gradients["head.weight"])


def test_bias_entries_that_were_cut_come_back_where_enough_are_left():
    _, model, view, true = seen(load_images("mnist-sample", rows=12, seed=0), batch_size=4, defense=clip(3.0))
    found, misfits = from_clipped(view, model)
    assert max(misfits) < 1e-5
    for m in range(model.workers):
        upload, own, honest = (model.of_worker(v.gradients, m)["first.bias"] for v in (view, found, true))
        assert off(upload, honest) > 0.3 and off(own, honest) < 1e-4


def test_entries_that_count_are_true_ones():
    for seed in range(4):
        _, model, view, true = seen(smooth_images(seed=seed), seed=seed, defense=clip(1.0, seed=seed))
        for m in range(model.workers):
            upload, honest = (model.of_worker(v.gradients, m) for v in (view, true))
            sure = uncut(upload)
            assert all(torch.equal(upload[k][sure[k]], honest[k][sure[k]]) for k in upload)
            assert sum(int(s.sum()) for s in sure.values()) > 0.5 * sum(s.numel() for s in sure.values())


def test_the_attack_behind_it_is_exact_and_certifies():
    data = load_images("mnist-sample", rows=12, seed=0)
    split, model, view, _ = seen(data, batch_size=4, defense=clip(3.0))
    attack = OneRoundCAFE(model, seed=0)
    attack.observe(from_clipped(view, model)[0])
    found = score(attack.solve(), data, split).summary()
    assert found["slices_certified"] > 0.8 * found["slices_leaking"] and found["psnr_slice_median"] > 100
    assert found["certified_false"] == 0 and found["label_accuracy"] == 1


def test_too_few_entries_show_by_the_misfit():
    true = torch.randn(64, 4).double() @ torch.randn(4, 200).double()
    few = torch.rand(64, 200) < 0.02
    assert completed(true, few, 4)[1] == 1
    assert completed(torch.zeros(64, 200).double(), few, 4)[1] == 1
    other = torch.randn(64, 200, generator=torch.Generator().manual_seed(0)).double()  # of full rank
    assert completed(other, torch.ones(64, 200, dtype=torch.bool), 4)[1] > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_below_the_batch_is_found(seed):
    """Rows alike, or silent, take directions away; one too many would fit rounding and leave the cut entries open."""
    g = torch.Generator().manual_seed(seed)
    true = (torch.randn(64, 3, generator=g).double() @ torch.randn(3, 200, generator=g).double()).float().double()
    sure = torch.ones(64, 200, dtype=torch.bool)
    sure[12:, :9] = False
    found, misfit, rank = completed(torch.where(sure, true, 0.01), sure, 6)
    assert rank == 3 and off(found, true) < 1e-5 and misfit < 1e-6


def test_a_bias_that_is_not_determined_stays_and_shows():
    _, model, view, true = seen(load_images("mnist-sample", rows=4, seed=3), batch_size=4, seed=3, defense=clip(1.0, seed=3))
    found, misfits = from_clipped(view, model)
    for m in range(model.workers):
        own, honest, upload = (model.of_worker(v.gradients, m)["first.bias"] for v in (found, true, view))
        assert off(own, honest) < 1e-4 if misfits[m] < 1e-5 else torch.equal(own, upload)
    assert max(misfits) > 1e-5


def test_under_the_other_reading_no_entry_counts():
    _, model, view, _ = seen(smooth_images(), defense=clip(1.0, reading="order"))
    found, misfits = from_clipped(view, model)
    assert misfits == [1.0] * model.workers and all(torch.equal(found.gradients[k], v) for k, v in view.gradients.items())


def test_bad_input_and_a_view_that_stays_as_it_is():
    _, model, view, _ = seen(smooth_images(), defense=clip(1.0))
    before = {k: v.clone() for k, v in view.gradients.items()}
    for steps in (0, True, 1.5):
        with pytest.raises(ValueError, match=f"steps={steps}"):
            from_clipped(view, model, steps=steps)
    with pytest.raises(ValueError, match="64 rows, worker 0's first layer is 64 x"):
        from_clipped(replace(view, indices=torch.arange(64)), model)
    _, _, small, vfl = table_case()
    with pytest.raises(ValueError, match="must be smaller than both"):
        from_clipped(next(vfl.rounds(1)), small)
    from_clipped(view, model, steps=2)
    assert all(torch.equal(before[k], view.gradients[k]) for k in before)
