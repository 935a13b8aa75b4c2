import dataclasses
import math

import pytest
import torch
from conftest import image_case, smooth_images, table_case, true_gradients

from cafe_tutorial.attack import PRESETS, Hyperparameters, NestedLoopsCAFE, SingleLoopCAFE
from cafe_tutorial.metrics import score


def run(attack, vfl, rounds):
    for view in vfl.rounds(rounds):
        attack.observe(view)
    return attack


def test_step1_converges_to_the_truth():
    data = smooth_images(6, 1, 4, 4)
    _, model, vfl = image_case(data, (1, 1), batch_size=3, d2=8)
    V, _ = true_gradients(vfl)
    settings = Hyperparameters(lr_step1=1 / 6)  # 1 / (2K)
    attack = NestedLoopsCAFE(model, rows=6, iterations=300, settings=settings)
    run(attack, vfl, 300)
    assert (attack.V[0][0] * 3 - V[0]).norm() < 1e-2 * V[0].norm()
    assert math.isnan(attack.objectives[1]) and math.isnan(attack.objectives[2])


@pytest.mark.parametrize("schedule", ["random", "epochs"])
def test_single_loop_recovers_a_small_case(schedule):
    """Four rows of 4x4 pixels; epochs of 3 + 1 rows exercise the short batch."""
    data = smooth_images(4, 1, 4, 4)
    split, model, vfl = image_case(data, (1, 1), batch_size=3, schedule=schedule)
    settings = Hyperparameters(lr_step1=1 / 6, lr_step2=2e-2, lr_step3=2e-2, gamma=1.0, beta=0)
    attack = SingleLoopCAFE(model, rows=4, settings=settings)
    leaks = [run(attack, vfl, count).solve() for count in (50, 950)]
    before, after = (score(leak, data, split).summary() for leak in leaks)
    assert after["psnr_slice_median"] > before["psnr_slice_median"] + 10
    assert after["psnr_slice_median"] > 30 and after["label_accuracy"] == 1.0
    assert not leaks[1].certified.any() and leaks[1].rounds == 1000
    assert leaks[1].slices[0].min() >= 0 and leaks[1].slices[0].max() <= 1


def test_nested_loops_run_one_step_at_a_time():
    *_, model, vfl = table_case(dtype=torch.float32)
    attack = NestedLoopsCAFE(model, rows=20, iterations=4)
    state = lambda: [sum(float(v.sum()) for v in values) for values in (attack.V, attack.H, attack.x_hat)]
    seen, last = [], state()
    for view in vfl.rounds(12):
        attack.observe(view)
        now = state()
        seen.append([a != b for a, b in zip(now, last)])
        last = now
    assert seen == [[True, False, False]] * 4 + [[False, True, False]] * 4 + [[False, False, True]] * 4
    with pytest.raises(ValueError, match="iterations=0"):
        NestedLoopsCAFE(model, rows=20, iterations=0)


def test_switch_thresholds_hold_the_later_steps_back():
    *_, model, vfl = table_case(dtype=torch.float32)
    held = SingleLoopCAFE(model, rows=20, settings=Hyperparameters(switch_step2=1e-30, switch_step3=1e-30))
    run(held, vfl, 5)
    assert not math.isnan(held.objectives[0]) and math.isnan(held.objectives[1])
    free = SingleLoopCAFE(model, rows=20, settings=Hyperparameters(switch_step2=1e9, switch_step3=1e9))
    run(free, vfl, 1)
    assert math.isnan(free.objectives[1])  # no objective has fallen below anything yet
    run(free, vfl, 2)
    assert not any(math.isnan(v) for v in free.objectives)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_and_repeats_from_its_seed(preset):
    data = smooth_images(6, 3, 6, 4)
    leaks = []
    for seed in (3, 3, 4):
        _, model, vfl = image_case(data, batch_size=2, model_options={"double_softmax": preset == "released-code"})
        leaks.append(run(SingleLoopCAFE(model, rows=6, settings=PRESETS[preset], seed=seed), vfl, 5).solve())
    assert all(torch.equal(a, b) for a, b in zip(leaks[0].slices, leaks[1].slices))
    assert not torch.equal(leaks[0].slices[0], leaks[2].slices[0])
    assert all(s.isfinite().all() for s in leaks[0].slices)


def test_fused_and_plain_workers_attack_alike():
    data = smooth_images(6, 1, 4, 4)
    found = []
    for fuse in (True, False):
        _, model, vfl = image_case(data, (1, 2), batch_size=2, model_options={"fuse": fuse}, dtype=torch.float64)
        attack = SingleLoopCAFE(model, rows=6, dtype=torch.float64)
        for values in (attack.V, attack.H, attack.x_hat):  # one start for both
            for v in values:
                v.copy_(torch.linspace(0, 1, v[0].numel(), dtype=torch.float64).view(v[0].shape).expand_as(v) * 0.1)
        found.append(run(attack, vfl, 8).solve().slices)
    assert all(torch.allclose(a, b, atol=1e-8) for a, b in zip(*found))


def test_a_rate_that_cannot_converge_is_named():
    """2ηK is the relaxation of a projection: at ηK = 1 it reflects for ever, above it diverges."""
    data = smooth_images(6, 1, 4, 4)
    _, model, vfl = image_case(data, (1, 1), batch_size=4)
    V, _ = true_gradients(vfl)
    errors = []
    for rate in (0.125, 0.25):
        attack = SingleLoopCAFE(model, rows=6, settings=Hyperparameters(lr_step1=rate, alpha=0))
        leak = run(attack, vfl, 300).solve()
        errors.append(float((attack.V[0][0] * 4 - V[0]).norm() / V[0].norm()))
        assert any("cannot converge with lr_step1=0.25 and batches of 4: below 0.25" in n for n in leak.notes) == (rate == 0.25)
    assert errors[0] < 0.05 < errors[1]
    attack = SingleLoopCAFE(model, rows=6, settings=Hyperparameters(lr_step1=5.0))
    with pytest.raises(ValueError, match=r"diverged in round \d+.*lr_step1=5.0.*0.125 is best"):
        run(attack, vfl, 400)


def test_errors():
    *_, model, _ = table_case()
    for rows in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="rows="):
            SingleLoopCAFE(model, rows=rows)
    with pytest.raises(ValueError, match="observe"):
        SingleLoopCAFE(model, rows=3).solve()
    assert dataclasses.replace(Hyperparameters(), gamma=0).gamma == 0
