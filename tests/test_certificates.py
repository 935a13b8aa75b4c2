"""Ways in which a wrong slice could look right, each of which once passed."""

import pytest
import torch
from conftest import image_case, smooth_images
from test_few_rounds import SHORT

from cafe_tutorial.attack import FewRoundsCAFE, Leak
from cafe_tutorial.attack.grow import explained, grow
from cafe_tutorial.attack.merge import Picture, merge
from cafe_tutorial.attack.spans import balance
from cafe_tutorial.data import Images
from cafe_tutorial.metrics import score


def watched(attack, vfl, batches):
    """The attack after rounds with these batches."""
    vfl._batches = iter(map(torch.tensor, batches))
    for view in vfl.rounds(len(batches)):
        attack.observe(view)
    return attack


def false_certificates(leak, data, split):
    result = score(leak, data, split)
    return int((result.certified & (result.psnr_slice < 60)).sum())


def logits_case(rows, workers, classes=2, seed=0):
    """Parts of the logits, slopes, e and labels of rows, each label the likelier class."""
    g = torch.Generator().manual_seed(seed)
    parts = [0.02 * torch.randn(rows, classes, generator=g, dtype=torch.float64) for _ in range(workers)]
    slopes = [torch.randn(rows, 16, 5, generator=g, dtype=torch.float64) @ torch.randn(rows, 5, classes, generator=g, dtype=torch.float64) for _ in parts]
    p = sum(parts).softmax(1)
    labels = p.argmax(1)
    return parts, slopes, p - torch.nn.functional.one_hot(labels, classes), labels


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("hole", [False, True])
def test_grown_rows_must_explain_their_logits(single, hole):
    """Row 0 comes with the v of two rows together, as a direction does that two rows share: e is a sum, and no p - y."""
    parts, slopes, e, labels = logits_case(12, 8)
    first = (labels == labels[0]).nonzero()[1]
    mixed = e.clone()
    mixed[0] += e[first[0]]
    V = [torch.einsum("ndc,nc->nd", s, mixed) for s in slopes]
    if hole:
        parts, slopes, V = ([*x[:-1], x[-1][:0]] for x in (parts, slopes, V))
    choice, named, misfit, found = grow(slopes, V, [False] * 7 + [hole], 12)
    blanks, bias = [torch.full((1, 2), 0.5, dtype=torch.float64) * torch.tensor([1, -1])] * 8, torch.zeros(2, dtype=torch.float64)
    confirmed, refuted = explained(choice, named, found, parts, blanks, bias, [single] * 8)
    row = choice[:, 0]
    assert misfit.isfinite().all() and len(row) == 12 and (choice[:, :7] == row[:, None]).all()
    if hole:
        assert not refuted.any() and (confirmed == single).all()
    else:
        assert torch.equal(refuted, row == 0) and torch.equal(confirmed, row != 0)


def test_rows_whose_gradients_are_proportional_are_not_certified():
    """Two images, one darker than the other: with two classes and a fresh model their v are proportional, and a third brightness fits."""
    images = smooth_images(8, 1, 16, 32, classes=2, seed=3).images * 0.9 + 0.05
    images[1] = 0.9 * images[0]
    unlabelled = Images(images, torch.arange(8) % 2, (0, 1), "x")
    split, model, _ = image_case(unlabelled, (2, 4), d2=64)
    labels = model.forward(model.parameters, model.stack(split.split(images)))[1].argmax(1)
    data = Images(images, labels, (0, 1), "x")
    split, _, vfl = image_case(data, (2, 4), batch_size=4, d2=64)
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 4, 6], [2, 3, 5, 7], [0, 1, 5, 7], [2, 4, 3, 6]]
    leak = watched(FewRoundsCAFE(model, rows=8, attempts=SHORT), vfl, batches).solve()
    assert false_certificates(leak, data, split) == 0 and leak.certified.any()


@pytest.mark.parametrize("tile", [0.8, 1.0, "smooth"])
def test_a_row_in_neither_group_is_not_taken_for_the_one_they_share(tile):
    """Row 0 is silent and shares a round with each of two rows that have the same tile: the spans meet there."""
    images = smooth_images(3, 1, 16, 16, seed=1).images
    images[0, :, :8, :8] = 0
    images[1:, :, :8, :8] = smooth_images(1, 1, 8, 8, seed=9).images[0] if tile == "smooth" else tile
    data = Images(images, torch.tensor([0, 1, 2]), (0, 1, 2), "x")
    split, model, vfl = image_case(data, (2, 2), batch_size=2, d2=64)
    leak = watched(FewRoundsCAFE(model, rows=3, attempts=SHORT), vfl, [[0, 1], [0, 2]]).solve()
    assert false_certificates(leak, data, split) == 0


@pytest.mark.parametrize("joined", [False, True])
def test_two_rows_that_look_the_same_do_not_name_a_third(joined):
    """Row 0 is in both rounds; rows 1 and 2, one in each, have the same picture. Where row 0 has a picture too, nothing is sure either."""
    def picture(t, value, label):
        return Picture((t,), label, [torch.full((1, 4, 4), value)] * 2, [True] * 2, [0.0] * 2, [label >= 0] * 2)

    other = (0.2, 1) if joined else (0.9, -1)
    leak = merge("x", [picture(t, *which) for t in (0, 1) for which in ((0.5, 0), other)], [[0, 1], [0, 2]], [])
    assert not leak.certified.any()


def test_a_row_of_two_rounds_is_named_where_both_are_whole():
    def picture(t, value):
        return Picture((t,), 0, [torch.full((1, 4, 4), value)] * 2, [True] * 2, [0.0] * 2, [True] * 2)

    leak = merge("x", [picture(t, value) for t, value in ((0, 0.5), (0, 0.2), (1, 0.5), (1, 0.9))], [[0, 1], [0, 2]], [])
    assert leak.certified.all() and [round(float(x.mean()), 1) for x in leak.slices[0]] == [0.5, 0.2, 0.9]


def test_averages_are_over_the_slices_that_have_a_gradient():
    """Not over those that the attack says leak: a stand-in for a blank slice fits it, and a slice called silent was missed."""
    data = smooth_images(4)
    split, *_ = image_case(data)
    leaking, claimed = torch.ones(4, 4, dtype=torch.bool), torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) > 0.5
    leaking[0] = False
    leak = Leak("x", [s * 0.9 for s in split.split(data.images)], data.labels, claimed, claimed.double(), claimed, 1)
    half, whole = score(leak, data, split, leaking=leaking), score(leak, data, split)
    assert half.summary()["slices_leaking"] == 12 and whole.summary()["slices_leaking"] == int(leak.leaks.sum())
    assert half.summary()["psnr_slice_mean"] == pytest.approx(float(half.psnr_slice[1:].mean()))


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="classes=1 must be at least 2"):
        image_case(Images(torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64), (0,), "x"))


def test_balance_without_a_gradient():
    assert balance(torch.ones(4, 5), torch.zeros(4)) == balance(torch.zeros(4, 5), torch.ones(4)) == 1.0
    assert balance(torch.full((1, 4), 3.0), torch.ones(1)) == 6.0
