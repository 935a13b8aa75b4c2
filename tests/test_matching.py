"""The baselines' objectives against closed forms and differences, and the loop around them."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import image_case, smooth_images, table_case

from cafe_tutorial.attack import OBJECTIVES, MatchingAttack
from cafe_tutorial.attack.objectives import Batch
from cafe_tutorial.metrics import score
from cafe_tutorial.model import VFLModel
from cafe_tutorial.partition import GridPartition
from cafe_tutorial.protocol import VerticalFL


def tensors(seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g, dtype=dtype) for shape in ((3, 4), (5,), (2, 1, 3))]


def build(name, model, vfl, **options):
    """The attack with its published statistics where it needs them."""
    return MatchingAttack(model, objective=name, statistics=vfl.statistics() if name == "bn" else None, **options)


def horizontal(rows, *, seed=0, size=8, channels=1, dtype=torch.float32):
    """One worker with a smooth network and one batch of all rows."""
    data, split = smooth_images(rows, channels, size, size, seed=seed), GridPartition(1, 1)
    model = VFLModel.smooth(split.part_shapes(data), classes=data.classes, seed=seed)
    return data, split, model, VerticalFL(model, split.split(data.images), data.labels, batch_size=rows, schedule="fixed", seed=seed, dtype=dtype)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_distance_is_zero_at_the_truth_alone(name, seed):
    objective, real, other = OBJECTIVES[name](), tensors(seed), tensors(seed + 10)
    assert abs(float(objective.distance(real, real))) < 1e-12
    assert float(objective.distance(other, real)) > 0.1


def test_distances_are_the_published_ones():
    fake, real = tensors(1), tensors(2)
    a, b = (torch.cat([v.flatten() for v in side]) for side in (fake, real))
    for name in ("dlg", "idlg", "bn", "gc"):
        assert float(OBJECTIVES[name]().distance(fake, real)) == pytest.approx(float((a - b).square().sum() / b.square().sum()))
    assert float(OBJECTIVES["cosine"]().distance(fake, real)) == pytest.approx(float(1 - F.cosine_similarity(a, b, dim=0)))
    layers = [1 - math.exp(-float((f - r).square().mean()) / (2 * float(r.square().mean()))) for f, r in zip(fake, real)]
    assert float(OBJECTIVES["sapag"](width=2.0).distance(fake, real)) == pytest.approx(sum(layers))
    scaled = [3 * f for f in real]
    assert abs(float(OBJECTIVES["cosine"]().distance(scaled, real))) < 1e-12  # the angle alone


def test_the_prior_on_statistics_vanishes_for_the_rows_they_come_from():
    data = smooth_images(6, 3, 6, 6)
    _, model, vfl = image_case(data, (1, 2), batch_size=3, dtype=torch.float64)
    features, statistics = model.convolutions(vfl.parameters, vfl._stacked), vfl.statistics()
    prior = OBJECTIVES["bn"](weight=1.0).prior
    assert float(prior(Batch(vfl._stacked, features, None), statistics).detach()) < 1e-4  # each norm is at least 1e-6
    half = [x[:, :3] for x in vfl._stacked]
    some = model.convolutions(vfl.parameters, half)
    expected = 0.0
    for m in range(2):
        for z, (mean, variance) in zip(some[0], statistics[0]):
            own = z[m].detach()
            expected += float((own.mean((0, 2, 3)) - mean[m]).norm() + (own.var((0, 2, 3), unbiased=False) - variance[m]).norm()) / 2
    assert float(prior(Batch(half, some, None), statistics).detach()) == pytest.approx(expected, rel=1e-6)


def test_statistics_and_convolutions_are_those_of_the_network():
    data = smooth_images(300, 1, 4, 4)  # more than one chunk
    _, model, vfl = image_case(data, (2, 2), batch_size=3, dtype=torch.float64)
    for m in range(4):
        first = model.template(m).representation[0]
        own = model.of_worker(vfl.parameters, m)
        z = torch.func.functional_call(first, {"weight": own["representation.0.weight"], "bias": own["representation.0.bias"]}, (vfl.parts[m],))
        mean, variance = vfl.statistics()[0][0]
        assert torch.allclose(mean[m], z.mean((0, 2, 3))) and torch.allclose(variance[m], z.var((0, 2, 3), unbiased=False))
    *_, vfl = table_case()
    with pytest.raises(ValueError, match="no convolution"):
        vfl.statistics()


def test_the_other_priors():
    x = [torch.rand(2, 3, 1, 4, 4, dtype=torch.float64)]
    tv = float((x[0][..., 1:] - x[0][..., :-1]).abs().mean() + (x[0][..., 1:, :] - x[0][..., :-1, :]).abs().mean())
    assert float(OBJECTIVES["cosine"](tv=2.0).prior(Batch(x, [], None), None)) == pytest.approx(2 * tv)
    assert float(OBJECTIVES["cosine"](tv=2.0).prior(Batch([x[0], x[0][:1]], [], None), None)) < 2 * 2 * tv  # a mean over workers
    assert float(OBJECTIVES["cosine"](tv=2.0).prior(Batch([torch.rand(1, 2, 1, 1, 1)], [], None), None)) == 0
    assert float(OBJECTIVES["gc"](weight=1.0).prior(Batch(x, [], x), None)) < 1e-5
    shifted = [x[0] + 0.5]
    assert float(OBJECTIVES["gc"](weight=1.0).prior(Batch(shifted, [], x), None)) == pytest.approx(0.5 * 4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_slopes_agree_with_differences(name):
    """In the fake rows and in the fake labels, on a smooth network in float64."""
    data, rows = smooth_images(6, 1, 6, 6), 1 if name == "idlg" else 3
    split = GridPartition(1, 2)
    model = VFLModel.smooth(split.part_shapes(data), classes=data.classes, d2=8)
    vfl = VerticalFL(model, split.split(data.images), data.labels, batch_size=rows, dtype=torch.float64)
    attack = build(name, model, vfl, rows=6, rounds=8, dtype=torch.float64, settings=({},))
    view = next(vfl.rounds(1))
    attack.observe(view)
    trial = attack.trials[0]
    x, y = [v[:, view.indices].detach() for v in trial.members[0].x], trial.members[0].y[view.indices].detach()
    mean = [v + 0.1 for v in x] if name == "gc" else None

    def whole(x, y):
        objective, leaves = trial.objective, {k: v.detach().requires_grad_() for k, v in view.parameters.items()}
        _, logits = model.forward(leaves, x)
        fake = torch.autograd.grad(model.loss(logits, y.softmax(1)), list(leaves.values()))
        features = model.convolutions(view.parameters, x) if name == "bn" else []
        prior = objective.prior(Batch(x, features, mean), attack.statistics)
        return float(objective.distance(fake, list(view.gradients.values())) + prior)

    _, gradients = attack._slope(trial.objective, view, x, y, mean)
    start = [*x, y]
    for moving in ([0], [] if name == "idlg" else [1]):  # iDLG's label is read, not fitted
        direction = [torch.randn_like(v) if i in moving else torch.zeros_like(v) for i, v in enumerate(start)]
        ends = [[v + sign * 1e-6 * d for v, d in zip(start, direction)] for sign in (1, -1)]
        slope = (whole(ends[0][:-1], ends[0][-1]) - whole(ends[1][:-1], ends[1][-1])) / 2e-6
        assert slope == pytest.approx(sum(float((g * d).sum()) for g, d in zip(gradients, direction)), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_idlg_reads_the_label_and_both_recover_one_row(seed):
    data, split, model, vfl = horizontal(1, seed=seed)
    view = next(vfl.rounds(1))
    for name in ("dlg", "idlg"):
        attack = build(name, model, vfl, rows=1, rounds=120)
        for _ in range(120):
            attack.observe(view)
        figures = score(attack.solve(), data, split).summary()
        assert figures["label_accuracy"] == 1.0 and figures["psnr_slice_mean"] > 30


def test_idlg_refuses_more_than_one_row():
    *_, model, vfl = table_case(dtype=torch.float32)
    with pytest.raises(ValueError, match="holds 4 rows"):
        build("idlg", model, vfl, rows=20, rounds=4).observe(next(vfl.rounds(1)))


@pytest.mark.parametrize("schedule", ["random", "epochs"])
def test_idlg_in_the_loop_of_single_rows(schedule):
    """K = 1: the rule reads the label of the row that was drawn, round by round."""
    *_, model, vfl = table_case(rows=8, batch_size=1, schedule=schedule, dtype=torch.float32)
    attack, drawn = build("idlg", model, vfl, rows=8, rounds=60), set()
    for view in vfl.rounds(60):
        attack.observe(view)
        drawn |= set(view.indices.tolist())
    assert drawn == set(range(8)) and torch.equal(attack.solve().labels, vfl.labels)


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n != "idlg"])
@pytest.mark.parametrize("grid, channels, batch_size", [((1, 1), 1, 5), ((1, 3), 3, 2), ((2, 2), 1, 1)])
def test_every_objective_falls_in_the_loop(name, grid, channels, batch_size):
    """Any number of workers, K from 1 to N with a short last batch, grey and colour."""
    data = smooth_images(5, channels, 6, 6)
    split, model, vfl = image_case(data, grid, batch_size=batch_size, d2=16, schedule="epochs")
    attack = build(name, model, vfl, rows=5, rounds=80, settings=({"rate": 0.03},))
    for view in vfl.rounds(80):
        attack.observe(view)
    history = attack.trials[0].history
    assert sum(history[-10:]) < 0.8 * sum(history[:10])
    leak = attack.solve()
    assert leak.rounds == 80 and not leak.certified.any() and leak.residual.isnan().all()
    assert all(0 <= float(s.min()) and float(s.max()) <= 1 for s in leak.slices)
    assert (leak.exchangeable is not None) == (batch_size == 5)
    score(leak, data, split)


def test_rows_that_were_always_drawn_together_are_exchangeable():
    *_, model, vfl = table_case(rows=6, batch_size=2, schedule="fixed", dtype=torch.float32)
    attack, batches = build("dlg", model, vfl, rows=6, rounds=9), {}
    for view in vfl.rounds(9):
        attack.observe(view)
        batches |= {int(n): view.round % 3 for n in view.indices}
    together = attack.solve().exchangeable
    assert all((together[a] == together[b]) == (batches[a] == batches[b]) for a in range(6) for b in range(6))
    attack = build("dlg", model, vfl, rows=9, rounds=9)  # three rows that are never drawn
    for view in vfl.rounds(3):
        attack.observe(view)
    assert attack.solve().exchangeable[6:].unique().numel() == 3


def test_the_better_half_of_the_settings_goes_on():
    """By the mean of the last quarter of their own distances, after an eighth and after a half of the rounds."""
    *_, model, vfl = table_case(rows=6, batch_size=3, dtype=torch.float32)
    attack = build("dlg", model, vfl, rows=6, rounds=80, settings=tuple({"rate": r} for r in (0.01, 0.001, 0.03, 0.02)))
    for count, left in ((9, 4), (1, 2), (29, 2), (1, 1), (40, 1)):
        before = list(attack.trials)
        for view in vfl.rounds(count):
            attack.observe(view)
        assert len(attack.trials) == left
        if before and len(before) > left:
            ranked = sorted(before, key=lambda t: sum(t.history[-max(1, len(t.history) // 4):]) / max(1, len(t.history) // 4))
            assert attack.trials == ranked[:left]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e9])
def test_l_bfgs_is_brought_back_from_a_bad_step(value):
    """A step to numbers that are not finite, or far astray: the best fake rows so far return, and the attack goes on from there."""
    data, split, model, vfl = horizontal(2)
    attack = build("dlg", model, vfl, rows=2, rounds=60, settings=({"rate": 1.0},))
    view = next(vfl.rounds(1))
    for _ in range(10):
        attack.observe(view)
    member, trial = attack.trials[0].members[0], attack.trials[0]
    best, memory = member.best[0], member.lbfgs
    member.x[0].fill_(value)
    attack.observe(view)
    if value != 1e9:  # sigmoids saturate there, and the distance may stay moderate
        assert trial.history[-1] == best and torch.equal(member.x[0], member.best[1][0]) and member.lbfgs is not memory
    for _ in range(40):
        attack.observe(view)
    assert all(math.isfinite(d) for d in trial.history) and member.best[0] <= best
    assert math.isfinite(score(attack.solve(), data, split).summary()["psnr_slice_mean"])


def test_l_bfgs_does_not_stand_still_above_the_rounding():
    """Absolute limits of the optimizer, met by small relative distances, must not stop it."""
    data, split, model, vfl = horizontal(1)
    attack = build("dlg", model, vfl, rows=1, rounds=300, settings=({"rate": 1.0},))
    view = next(vfl.rounds(1))
    for _ in range(300):
        attack.observe(view)
    assert attack.trials[0].members[0].best[0] < 1e-11
    assert score(attack.solve(), data, split).summary()["psnr_slice_mean"] > 80


def test_a_setting_that_left_the_finite_numbers_is_given_up():
    *_, model, vfl = table_case(rows=6, batch_size=3, dtype=torch.float32)
    attack, slope = build("dlg", model, vfl, rows=6, rounds=64, settings=({"rate": 0.03}, {"rate": 0.01})), MatchingAttack._slope
    broken = lambda objective, *rest: slope(attack, objective, *rest) if objective.rate == 0.01 else (math.nan, slope(attack, objective, *rest)[1])  # noqa: E731
    attack._slope = broken
    for view in vfl.rounds(8):
        attack.observe(view)
    assert [t.objective.rate for t in attack.trials] == [0.01] and math.isfinite(attack.objectives[2])


def test_all_settings_begin_at_the_same_place_unless_they_are_restarts():
    *_, model, vfl = table_case(rows=6, batch_size=3, dtype=torch.float32)
    attack = build("sapag", model, vfl, rows=6, rounds=64)
    starts = [t.members[0].x[0] for t in attack._begin(repeated=False)]
    assert len(starts) == 4 and all(torch.equal(x, starts[0]) for x in starts)
    restarts = [t.members[0].x[0] for t in build("dlg", model, vfl, rows=6, rounds=64)._begin(repeated=True)]
    assert not any(torch.equal(x, restarts[0]) for x in restarts[1:])


def test_repeatable_from_a_seed():
    leaks = []
    for seed in (3, 3, 4):
        *_, model, vfl = table_case(rows=6, batch_size=2, dtype=torch.float32)
        attack = build("gc", model, vfl, rows=6, rounds=10, seed=seed)
        for view in vfl.rounds(10):
            attack.observe(view)
        leaks.append(attack.solve().slices[0])
    assert torch.equal(leaks[0], leaks[1]) and not torch.equal(leaks[0], leaks[2])


def test_bad_input_is_named():
    *_, model, vfl = table_case(dtype=torch.float32)
    for options, message in (
        ({"objective": "dgl"}, "objective='dgl' must be one of dlg, idlg"),
        ({"objective": "bn"}, "statistics=None"),
        ({"objective": "dlg", "settings": ()}, "settings=\\(\\)"),
        ({"objective": "dlg", "rounds": 0}, "rounds=0"),
        ({"objective": "dlg", "rows": 0}, "rows=0"),
    ):
        with pytest.raises(ValueError, match=message):
            MatchingAttack(model, **{"rows": 20, "rounds": 5, **options})
    attack = MatchingAttack(model, rows=20, objective="dlg", rounds=5)
    with pytest.raises(ValueError, match="nothing was observed"):
        attack.solve()
    small = MatchingAttack(model, rows=2, objective="dlg", rounds=5)
    with pytest.raises(ValueError, match="view.indices reach"):
        small.observe(next(vfl.rounds(1)))
