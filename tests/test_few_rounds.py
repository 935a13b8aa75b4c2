import pytest
import torch
from conftest import image_case, smooth_images, table_case, true_gradients

from cafe_tutorial.attack import FewRoundsCAFE, Leak
from cafe_tutorial.attack.cones import extreme_rays
from cafe_tutorial.attack.invert import Attempt
from cafe_tutorial.attack.join import join, worker_terms
from cafe_tutorial.attack.spans import common, span
from cafe_tutorial.data import load_images
from cafe_tutorial.metrics import score
from cafe_tutorial.options import AttackOptions
from cafe_tutorial.run import run_attack

SHORT = (Attempt("grey", 30), Attempt("smooth", 160, 1e-3))


def watched(model, vfl, rounds, **options):
    attack = FewRoundsCAFE(model, rows=vfl.rows, **options)
    for view in vfl.rounds(rounds):
        attack.observe(view)
    return attack


def product(rows, d1, d2, seed, dtype=torch.float64):
    """h̃_n with a last entry of 1, v_n, and the averaged gradients of a batch of all of them."""
    g = torch.Generator().manual_seed(seed)
    H, V = torch.rand(rows, d1, generator=g, dtype=torch.float64), torch.randn(rows, d2, generator=g, dtype=torch.float64)
    return H, V, (V.T @ H / rows).to(dtype), V.mean(0).to(dtype)


@pytest.mark.parametrize("rows, d1, d2", [(1, 30, 20), (6, 30, 20), (20, 30, 20)])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_span_holds_its_rows_and_no_others(rows, d1, d2, scale):
    H, V, weight, bias = product(rows, d1, d2, seed=rows)
    found = span(torch.arange(rows), weight, bias, scale=scale)
    extended = torch.cat([H, scale * torch.ones(rows, 1, dtype=torch.float64)], 1)
    unit = extended / extended.norm(dim=1, keepdim=True)
    assert len(found.values) == rows
    assert ((unit - (unit @ found.basis) @ found.basis.T).norm(dim=1) < 1e-9).all()
    G = torch.cat([weight.T, scale * bias[None]]) * rows
    assert torch.allclose(found.basis @ found.core, G, atol=1e-9)
    other = torch.rand(d1 + 1, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    assert (other - found.basis @ (found.basis.T @ other)).norm() > 0.1


@pytest.mark.parametrize("seed", range(4))
def test_rows_leave_the_span_of_a_rounded_gradient_as_far_as_predicted(seed):
    H, V, weight, bias = product(12, 300, 64, seed=seed)
    V[3] *= 1e-3  # a row that the model has nearly learned
    weight, bias = (V.T @ H / 12).float(), V.mean(0).float()
    found = span(torch.arange(12), weight, bias, scale=1.0)
    extended = torch.cat([H, torch.ones(12, 1, dtype=torch.float64)], 1)
    unit = extended / extended.norm(dim=1, keepdim=True)
    distance, predicted = (unit - (unit @ found.basis) @ found.basis.T).norm(dim=1), found.blur(unit)
    assert (distance < 3 * predicted).all() and (distance > predicted / 100).all()
    assert distance[3] > 20 * distance[[0, 1, 2, 4]].median()


def test_spans_of_batches_that_share_rows_meet_in_them():
    H, V, *_ = product(9, 40, 16, seed=0)
    batches = [torch.tensor(s) for s in ([0, 1, 2, 3], [0, 1, 4, 5], [0, 6, 7, 8])]
    spans = [span(s, V[s].T @ H[s] / 4, V[s].mean(0), scale=1.0) for s in batches]
    assert int((common(spans[:2])[1] < 1e-9).sum()) == 2  # rows 0 and 1
    directions, defects = common(spans)
    assert int((defects < 1e-9).sum()) == 1
    assert torch.allclose(directions[:-1, 0] / directions[-1, 0], H[0], atol=1e-7)


@pytest.mark.parametrize("rows, size, epochs", [(12, 3, 4), (13, 4, 4), (10, 1, 2), (11, 2, 5)])
def test_rows_come_back_from_a_few_epochs(rows, size, epochs):
    data = smooth_images(rows=rows, height=8, width=8)
    split, model, vfl = image_case(data, batch_size=size, d2=64, schedule="epochs")
    attack = watched(model, vfl, epochs * -(-rows // size), attempts=SHORT)
    leak = attack.solve()
    result = score(leak, data, split)
    alone = torch.tensor([len(group) == 1 for group in attack.memberships().values() for _ in group])
    order = [n for group in attack.memberships().values() for n in group]
    certified = leak.certified[order]
    assert not (leak.certified & (result.psnr_slice < 60)).any()
    assert certified[alone].double().mean() > 0.8
    named = leak.labels >= 0
    assert result.label_accuracy == float(named.double().mean()) > 0.5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("c", [2, 3, 6])
def test_rays_of_a_cone(c, seed):
    """c non-negative vectors, four in ten entries zero, from an arbitrary basis of what they span, with some noise."""
    g = torch.Generator().manual_seed(seed)
    H = torch.rand(c, 2000, generator=g, dtype=torch.float64) * (torch.rand(c, 2000, generator=g) > 0.4)
    H[:, -1] = 1
    basis = torch.linalg.qr(H.T @ torch.randn(c, c, generator=g, dtype=torch.float64))[0]
    rays, errors = extreme_rays(basis + 1e-8 * torch.randn(basis.shape, generator=g, dtype=torch.float64))
    apart = torch.cdist(H / H.norm(dim=1, keepdim=True), rays)
    assert (apart.min(1).values < 1e-6).all() and apart.argmin(1).unique().numel() == c
    assert (apart.min(0).values < 5 * errors + 1e-7).all() and (errors < 1e-5).all()


def test_no_cone_no_rays():
    """Vectors of both signs, as a table's records are, have no extreme rays to be found."""
    H = torch.randn(3, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert extreme_rays(torch.linalg.qr(H.T)[0]) is None


@pytest.mark.parametrize("workers, count", [(1, 3), (2, 4), (4, 3)])
def test_slices_are_joined_whatever_their_order(workers, count):
    data = smooth_images(rows=count, height=8, width=8, classes=4)
    _, model, vfl = image_case(data, grid=(1, workers), batch_size=1, d2=64, dtype=torch.float64)
    V, H = true_gradients(vfl)
    g = torch.Generator().manual_seed(0)
    orders = [torch.randperm(count, generator=g) for _ in range(workers)]
    parameters = {k: v.detach() for k, v in vfl.parameters.items()}
    parts, slopes = zip(*(worker_terms(model, parameters, m, H[m][order]) for m, order in enumerate(orders)))
    choice, labels, residual = join(list(parts), list(slopes), [v[o] for v, o in zip(V, orders)], parameters["head.bias"], count)
    rows = torch.stack([order[choice[:, m]] for m, order in enumerate(orders)], 1)
    assert (rows == rows[:, :1]).all() and torch.equal(labels, data.labels[rows[:, 0]]) and (residual < 1e-15).all()


def test_too_many_combinations_are_left_alone():
    many = torch.zeros(120, 2, dtype=torch.float64)
    assert join([many] * 4, [many[:, :, None]] * 4, [many] * 4, many[0], 120) is None


@pytest.mark.parametrize("epochs", [2, 3])
def test_rows_that_share_all_their_batches(epochs):
    """Batches so large that most rows have company: found as cones, joined, right up to an exchange."""
    data = load_images("mnist-sample", rows=24, seed=1)
    split, model, vfl = image_case(data, batch_size=8, d2=64, schedule="epochs")
    attack = watched(model, vfl, 3 * epochs, attempts=SHORT[:1])
    leak = attack.solve()
    company = leak.exchangeable.bincount()[leak.exchangeable] > 1
    result = score(leak, data, split)
    assert company.any() and leak.certified[company].double().mean() > 0.5
    assert not (result.certified & (result.psnr_slice < 60)).any()


def test_score_matches_exchangeable_rows_and_no_others():
    data = smooth_images(rows=4)
    split, *_ = image_case(data)
    swapped = torch.tensor([1, 0, 3, 2])
    flags = torch.ones(4, 4, dtype=torch.bool)
    slices = [s[swapped] for s in split.split(data.images)]
    leak = Leak("x", slices, data.labels[swapped], flags, flags.double(), flags, 1, exchangeable=torch.tensor([0, 0, 1, 2]))
    result = score(leak, data, split)
    assert (result.psnr_image[:2] == 150).all() and (result.psnr_image[2:] < 100).all()


def test_h_is_known_as_well_as_predicted(digits):
    _, model, vfl = image_case(digits, batch_size=3, d2=64, schedule="epochs")
    attack = watched(model, vfl, 20)
    _, true = true_gradients(vfl)
    for m in range(4):
        pool = attack._pool(m, attack.memberships(), attack._member())
        H, error = pool.H[:12], pool.error[:12]
        known = error.isfinite()
        off = (H - true[m]).norm(dim=1) / true[m].norm(dim=1)
        ratio = off[known] / error[known]
        assert known.sum() >= 8 and (ratio < 5).all() and 0.3 < ratio.median() < 3


def test_layers_above_may_train_meanwhile():
    data = smooth_images(rows=12, height=8, width=8)
    _, model, _ = image_case(data, d2=64)
    above = [i for i, name in enumerate(model.parameters) if "representation" not in name]
    split, model, vfl = image_case(
        data, batch_size=3, d2=64, schedule="epochs", optimizer=lambda p: torch.optim.Adam([p[i] for i in above], lr=1e-3)
    )
    leak = watched(model, vfl, 16, attempts=SHORT).solve()
    result = score(leak, data, split)
    assert leak.certified.double().mean() > 0.7 and result.psnr_slice[leak.certified].min() > 60


def test_silent_slices_are_named():
    """Blank tiles of an untrained network have v = 0: they lie in no span, alone or in a group."""
    data = load_images("mnist-sample", rows=24, seed=1)
    for size in (4, 8):
        split, model, vfl = image_case(data, grid=(4, 4), batch_size=size, d2=64, schedule="epochs")
        leak = watched(model, vfl, 3 * -(-24 // size), attempts=SHORT[:1]).solve()
        silent = torch.stack([v.norm(dim=1) == 0 for v in true_gradients(vfl)[0]], 1)
        alone = leak.exchangeable.bincount()[leak.exchangeable] == 1
        assert silent.sum() > 50 and not (~leak.leaks & ~silent)[alone].any()
        assert not leak.certified[silent & alone[:, None]].any()
    assert (~leak.leaks).any()


@pytest.mark.parametrize("schedule, rounds", [("random", 8), ("random", 12), ("epochs", 8), ("epochs", 10)])
def test_no_false_certificate_when_rounds_are_not_whole_epochs(schedule, rounds):
    """A row may have been in all rounds of another and in more: then it is what the spans of the other meet in."""
    data = load_images("mnist-sample", rows=24, seed=1)
    split, model, vfl = image_case(data, grid=(4, 4), batch_size=8, d2=64, schedule=schedule)
    result = score(watched(model, vfl, rounds, attempts=SHORT[:1]).solve(), data, split)
    assert not (result.certified & (result.psnr_slice < 60)).any()


def test_no_false_certificate_where_rows_share_a_tile():
    data = smooth_images(rows=12, height=8, width=8)
    data.images[1:, :, :4, :4] = data.images[1, :, :4, :4]
    data.images[0, :, :4, :4] = 0  # silent, among rows that all have the same tile
    split, model, vfl = image_case(data, batch_size=3, d2=64, schedule="epochs")
    result = score(watched(model, vfl, 16, attempts=SHORT[:1]).solve(), data, split)
    assert not (result.certified & (result.psnr_slice < 60)).any() and not result.certified[0, 0]


def test_a_row_is_not_called_silent_because_the_spans_do_not_meet():
    data = smooth_images(rows=12, height=8, width=8)
    for options in ({"optimizer": lambda p: torch.optim.Adam(p, lr=1e-3)}, {"batch_size": 12}):
        _, model, vfl = image_case(data, **{"batch_size": 3, "d2": 8, "schedule": "epochs", **options})
        assert watched(model, vfl, 12, attempts=SHORT[:1]).solve().leaks.all()


def test_nothing_is_certified_when_the_layers_below_train():
    data = smooth_images(rows=12, height=8, width=8)
    _, model, vfl = image_case(data, batch_size=3, d2=64, schedule="epochs", optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    leak = watched(model, vfl, 16, attempts=SHORT[:1]).solve()
    assert not leak.certified.any() and any("moved" in note for note in leak.notes)


def test_what_does_not_work_is_said():
    parts, labels, model, vfl = table_case(rows=12, widths=(2, 3, 3), batch_size=4, schedule="epochs")  # spans are everything
    leak = watched(model, vfl, 12).solve()
    assert not leak.certified.any() and any("in more directions than" in note for note in leak.notes)
    fixed = table_case(rows=12, widths=(30, 30, 30), batch_size=4, schedule="fixed")
    leak = watched(fixed[2], fixed[3], 12).solve()
    assert not leak.certified.any() and leak.exchangeable.unique().numel() == 3
    assert any("12 of 12 rows share" in note for note in leak.notes)
    attack = FewRoundsCAFE(model, rows=5)
    with pytest.raises(ValueError, match="nothing was observed"):
        attack.solve()
    with pytest.raises(ValueError, match="rows=5 allows"):
        attack.observe(next(v for v in vfl.rounds(9) if v.indices.max() >= 5))


def test_wide_tables_come_back():
    parts, labels, model, vfl = table_case(rows=16, widths=(40, 50), batch_size=4, schedule="epochs", d2=32)
    leak = watched(model, vfl, 20).solve()
    for m in range(2):
        sure = leak.certified[:, m]
        assert sure.double().mean() > 0.7 and (leak.slices[m] - parts[m])[sure].norm() < 1e-5 * parts[m][sure].norm()


def test_the_command_line_trains_what_it_is_told_to():
    common = {"data": "digits", "rows": 12, "batch_size": 3, "method": "few-rounds", "learning_rate": 1e-3, "progress": False}
    above, everything = (run_attack(AttackOptions(**common, train=which)) for which in ("above", "all"))
    assert above.leak.certified.any() and not everything.leak.certified.any()
    with pytest.raises(ValueError, match="train='below' must be one of all, above"):
        run_attack(AttackOptions(**common, train="below"))
