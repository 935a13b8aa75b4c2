"""The attack from a single round, against known rows; nothing wrongly certified."""

import pytest
import torch
from conftest import image_case, smooth_images, table_case

from cafe_tutorial.attack import OneRoundCAFE
from cafe_tutorial.attack.join import join
from cafe_tutorial.attack.merge import Picture, merge
from cafe_tutorial.attack.one_round import find_rows
from cafe_tutorial.attack.rays import RayFinder
from cafe_tutorial.attack.search import Outside, Search, seek
from cafe_tutorial.attack.spans import span
from cafe_tutorial.data import Images, load_images
from cafe_tutorial.metrics import score
from cafe_tutorial.protocol import VerticalFL


def tiles(rows, seed=0):
    """The middles of digits, 12x12."""
    data = load_images("mnist-sample", rows=rows, seed=seed)
    return Images(data.images[:, :, 8:20, 8:20].clone(), data.labels, data.label_values, "tiles")


def one_worker(rows=6, seed=0, dtype=torch.float32, **options):
    """Tiles with one worker, their first view, and the span of its gradient."""
    data = tiles(rows, seed)
    split, model, vfl = image_case(data, (1, 1), batch_size=rows, d2=64, seed=seed, dtype=dtype, schedule="epochs", **options)
    view = next(vfl.rounds(1))
    own = model.of_worker(view.gradients, 0)
    batch = span(view.indices, own["first.weight"], own["first.bias"], scale=1.0)
    outside = Outside(model.representation(0, view.parameters), [batch.basis.to(dtype)], batch.scale)
    return data, split, model, vfl, view, batch, outside


def test_only_rows_of_the_batch_lie_in_its_span():
    data, _, _, _, view, _, outside = one_worker(dtype=torch.float64)
    x = data.images[view.indices].double()
    assert (outside.relative(x) < 1e-20).all()
    assert (outside.relative(0.97 * x) > 1e-8).all() and (outside.relative((x + x.roll(1, 0)) / 2) > 1e-6).all()


@pytest.mark.parametrize("c, entries, seed", [(3, 60, 0), (10, 300, 1), (25, 800, 2)])
def test_the_ray_with_a_hints_zeros(c, entries, seed):
    """Sparse non-negative vectors come back from their span and rough copies, each the one that the hint resembles."""
    g = torch.Generator().manual_seed(seed)
    H = torch.rand(c, entries, generator=g, dtype=torch.float64) * (torch.rand(c, entries, generator=g) > 0.4)
    basis = torch.linalg.qr(H.T)[0]
    finder, known = RayFinder(basis.numpy()), torch.zeros(0, c, dtype=torch.float64)
    for h in H:
        hint = h + 0.02 * torch.rand(entries, generator=g, dtype=torch.float64)
        ray = torch.from_numpy(finder.near(hint.numpy(), known.numpy()))
        assert float((basis @ ray - h / h.norm()).norm()) < 1e-6
        known = torch.cat([known, ray[None]])
    assert finder.near(hint.numpy(), known.numpy()) is None  # nothing new is left


def test_no_ray_without_zeros():
    H = torch.rand(5, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    finder = RayFinder(torch.linalg.qr(H.T)[0].numpy())
    assert finder.near(H[0].numpy(), torch.zeros(0, 5).numpy()) is None


def test_the_search_keeps_away_from_known_rows():
    """With all rows but one known, every start that arrives arrives there."""
    data, _, _, _, view, batch, outside = one_worker(rows=4)
    x = data.images[view.indices]
    known = torch.nn.functional.normalize(outside.extended(x[1:]).double() @ batch.basis, dim=1)
    found = seek(outside, known, x.shape[1:], Search(starts=6, steps=200, tv=0.02), torch.Generator().manual_seed(0))
    arrived = found[outside.relative(found) < 1e-7]
    assert len(arrived) and torch.cdist(arrived.flatten(1), x.flatten(1)).argmin(1).eq(0).all()


@pytest.mark.parametrize("grid, rows, channels, seed", [((2, 2), 4, 1, 0), ((1, 2), 4, 3, 1), ((1, 1), 1, 1, 2)])
def test_rows_come_back_from_one_round(grid, rows, channels, seed):
    data = tiles(rows, seed) if channels == 1 else smooth_images(rows, 3, 12, 12, seed=seed)
    split, model, vfl = image_case(data, grid, batch_size=rows, d2=64, seed=seed, schedule="epochs")
    attack = OneRoundCAFE(model, seed=seed)
    for view in vfl.rounds(1):
        attack.observe(view)
    leak = attack.solve()
    result = score(leak, data, split)
    assert leak.certified.double().mean() > 0.6 and result.label_accuracy > 0.6
    assert not (result.certified & (result.psnr_slice < 60)).any()
    assert leak.exchangeable.eq(0).all() and leak.numbers.tolist() == list(range(rows))


def test_row_numbers_and_learning_rate_do_not_matter():
    """A view with other row numbers, of a round in the middle of training, gives the same pictures."""
    data, split, model, vfl, *_ = one_worker(rows=4, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    view = list(vfl.rounds(3))[-1]
    first = find_rows(model, view, 0)
    other = find_rows(model, type(view)(view.round, view.indices.flip(0) + 100, view.parameters, view.gradients), 0)
    assert torch.equal(first.x, other.x) and len(first.x) == 4


def test_identical_and_nearly_identical_rows_are_not_certified():
    """Blends of two rows in one linear piece of h stay in the span, so that neither is singled out."""
    images = tiles(4).images
    images[1] = images[0] + 1e-4 * torch.rand(images[0].shape, generator=torch.Generator().manual_seed(0)) * (images[0] > 0) * (images[0] < 0.9)
    data = Images(images, torch.tensor([0, 1, 2, 1]), tuple(range(3)), "near")
    split, model, vfl = image_case(data, (1, 1), batch_size=4, d2=64, schedule="epochs")
    view = next(vfl.rounds(1))
    found = find_rows(model, view, 0)
    distance = torch.cdist(found.x.flatten(1), images.flatten(1)).square().min(1).values / images[0].numel()
    assert not (found.certified & (distance > 1e-6)).any()


def test_nothing_is_certified_beyond_the_first_layers_width():
    """K > d2: the span holds combinations of rows only."""
    _, model, vfl = image_case(tiles(8), (1, 1), batch_size=8, d2=4, schedule="epochs")
    found = find_rows(model, next(vfl.rounds(1)), 0)
    assert not found.certified.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_gradients_give_no_false_certificate(dtype):
    data, _, model, _, view, *_ = one_worker(rows=4)
    rounded = type(view)(view.round, view.indices, view.parameters, {k: g.to(dtype) for k, g in view.gradients.items()})
    found = find_rows(model, rounded, 0)
    distance = torch.cdist(found.x.float().flatten(1), data.images.flatten(1)).square().min(1).values / data.images[0].numel() if len(found.x) else torch.zeros(0)
    assert not (found.certified & (distance > 1e-6)).any()


def picture(t, value, label=0, certified=True):
    return Picture((t,), label, [torch.full((1, 2, 2), value)], [True], [1e-13], [certified])


def merged(pictures, batches):
    return merge("one-round", pictures, batches, [])


def test_rounds_that_share_a_row_name_it():
    leak = merged([picture(0, 0.1), picture(0, 0.2), picture(1, 0.2), picture(1, 0.3)], [[7, 4], [4, 9]])
    assert leak.numbers.tolist() == [4, 7, 9] and leak.exchangeable.unique().numel() == 3
    assert [float(x.mean()) for x in leak.slices[0]] == pytest.approx([0.2, 0.1, 0.3]) and leak.certified.all()


def test_a_picture_that_may_belong_elsewhere_loses_its_certificate():
    """Round 1 did not give all its rows, so the picture of round 0 may be of row 4 or of row 7."""
    leak = merged([picture(0, 0.1), picture(1, 0.3, label=-1, certified=False)], [[7, 4], [4, 9]])
    assert not leak.certified.any()


def test_twins_that_are_not_recognized_certify_nothing():
    """Row 7 came back twice, not quite alike, so that one of both would stand for another row."""
    leak = merged([picture(0, 0.2), picture(0, 0.1), picture(1, 0.21), picture(1, 0.3)], [[3, 7], [7, 9]])
    assert not leak.certified.any()


def test_rows_with_the_same_picture_certify_nothing():
    leak = merged([picture(0, 0.1), picture(0, 0.2), picture(1, 0.1), picture(1, 0.2)], [[3, 7], [5, 7]])
    assert not leak.certified.any() and any("no row left" in n or "joined" in n for n in leak.notes)


def test_pictures_with_different_labels_are_not_the_same():
    assert not picture(0, 0.1, label=0).same(picture(1, 0.1, label=1)) and picture(0, 0.1).same(picture(1, 0.1))
    assert not picture(0, 0.1).same(picture(1, 0.1, certified=False))


def test_each_worker_must_fit_for_itself():
    """A worker with a small gradient is tested too: with the right slice absent, no other takes its place."""
    g = torch.Generator().manual_seed(0)
    classes, d2 = 4, 12
    parts = [torch.randn(3, classes, generator=g, dtype=torch.float64), 1e-4 * torch.randn(3, classes, generator=g, dtype=torch.float64)]
    slopes = [torch.randn(3, d2, classes, generator=g, dtype=torch.float64) * size for size in (1.0, 1e-4)]
    labels, bias = torch.tensor([0, 1, 2]), torch.zeros(classes, dtype=torch.float64)
    e = (parts[0] + parts[1]).softmax(1) - torch.eye(classes, dtype=torch.float64)[labels]
    V = [torch.einsum("ndc,nc->nd", s, e) for s in slopes]
    choice, named, misfit = join(parts, slopes, V, bias, 3)
    assert choice[:, 0].equal(choice[:, 1]) and named.equal(labels[choice[:, 0]]) and (misfit < 1e-12).all()
    lost = [0, 1]  # worker 1's third slice was not found
    choice, _, misfit = join([parts[0], parts[1][lost]], [slopes[0], slopes[1][lost]], [V[0], V[1][lost]], bias, 3)
    assert all(a == b for (a, b), m in zip(choice.tolist(), misfit.tolist()) if m < 1e-6)


def test_rounds_without_common_rows():
    leak = merged([picture(0, 0.1), picture(1, 0.3)], [[3], [5]])
    assert leak.numbers.tolist() == [3, 5] and [round(float(x.mean()), 1) for x in leak.slices[0]] == [0.1, 0.3] and leak.certified.all()


def test_what_does_not_work_is_said():
    _, _, model, _ = table_case()
    with pytest.raises(ValueError, match="worker 0 has h"):
        OneRoundCAFE(model)
    data = smooth_images(4)
    _, model, _ = image_case(data, model_options={"double_softmax": True})
    with pytest.raises(ValueError, match="double_softmax"):
        OneRoundCAFE(model)
    _, model, _ = image_case(data)
    with pytest.raises(ValueError, match="nothing was observed"):
        OneRoundCAFE(model).solve()


def test_a_round_without_any_gradient():
    """Blank images leave no direction; nothing is found, nothing fails."""
    data = Images(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]), tuple(range(3)), "blank")
    split, model, vfl = image_case(data, batch_size=4, schedule="epochs")
    attack = OneRoundCAFE(model)
    attack.observe(next(vfl.rounds(1)))
    leak = attack.solve()
    assert not leak.leaks.any() and not leak.certified.any()
    assert score(leak, data, split).summary()["slices_not_leaked"] == 16
    assert isinstance(vfl, VerticalFL)
