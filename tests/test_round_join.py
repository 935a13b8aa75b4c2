"""The join of one round's slices, from true slices in any order: all there, some missing, some inexact, too many to combine."""

import pytest
import torch
import torch.nn.functional as F
from conftest import image_case, smooth_images

from cafe_tutorial.attack.one_round import Found
from cafe_tutorial.attack.round_join import join_round
from cafe_tutorial.attack.spans import balance, span
from cafe_tutorial.data import load_images


def slices_in_disorder(grid=(2, 2), rows=12, seed=0, data=None):
    """What a perfect search would find, in a random order a worker; the order; the model, Θ, and the rows' labels."""
    data = data or load_images("mnist-sample", rows=rows, seed=1)
    split, model, vfl = image_case(data, grid, batch_size=rows, d2=64)
    view = next(vfl.rounds(1))
    found, orders = [], []
    g = torch.Generator().manual_seed(seed)
    for m, tiles in enumerate(split.split(data.images)):
        own = model.of_worker(view.gradients, m)
        weight, bias = own["first.weight"], own["first.bias"]
        here = span(view.indices, weight, bias, scale=balance(weight, bias))
        h = model.representation(m, view.parameters)(tiles).double()
        extended = F.normalize(torch.cat([h, torch.full_like(h[:, :1], here.scale)], 1), dim=1)
        there = (extended - (extended @ here.basis) @ here.basis.T).norm(dim=1) < 1e-4
        order = torch.randperm(rows, generator=g)
        order = order[there[order]]
        flags = torch.ones(len(order), dtype=torch.bool)
        found.append(Found(here, tiles[order], extended[order] @ here.basis, 0.0 * order.double(), flags))
        orders.append(order)
    return found, orders, model, view.parameters, data.labels


def without(found, orders, m, n):
    keep = orders[m] != n
    f = found[m]
    found[m] = Found(f.span, f.x[keep], f.coordinates[keep], f.residual[keep], f.certified[keep])
    orders[m] = orders[m][keep]


def rows_named(rows, orders):
    """For each joined row the true rows of its slices, None for a hole."""
    return [([None if i is None else int(orders[m][i]) for m, i in enumerate(row.slots)], row) for row in rows if row.label >= 0]


@pytest.mark.parametrize("grid", [(2, 2), (1, 2), (2, 4)])
@pytest.mark.parametrize("most", [None, 100])
def test_rows_come_together_in_any_order(grid, most, monkeypatch):
    if most:
        monkeypatch.setattr("cafe_tutorial.attack.join.MOST", most)  # too many combinations until most rows have grown
    found, orders, model, parameters, labels = slices_in_disorder(grid)
    rows = join_round(model, parameters, found, 12)
    named = rows_named(rows, orders)
    assert len(rows) == 12 and (len(named) == 12 or (grid, most) == ((1, 2), 100))
    for own, row in named:
        (n,) = {n for n in own if n is not None}
        assert row.label == labels[n] and all(s or i is None for s, i in zip(row.sure, own))


@pytest.mark.parametrize("m, n", [(2, 11), (5, 4)])
def test_a_missing_slice_leaves_a_hole(m, n):
    found, orders, model, parameters, labels = slices_in_disorder((2, 4), data=smooth_images(12, 1, 16, 32, classes=10))
    without(found, orders, m, n)
    named = rows_named(join_round(model, parameters, found, 12), orders)
    assert len(named) >= 11
    for own, row in named:
        (k,) = {k for k in own if k is not None}
        assert row.label == labels[k] and (k != n or own[m] is None)


@pytest.mark.parametrize("m, n", [(1, 9), (6, 0)])
def test_an_inexact_slice_spoils_no_other_and_is_not_sure(m, n):
    found, orders, model, parameters, labels = slices_in_disorder((2, 4), data=smooth_images(12, 1, 16, 32, classes=10))
    at = int((orders[m] == n).nonzero()[0])
    found[m].residual[at] = 1e-8
    found[m].coordinates[at] += 1e-3 * torch.randn(found[m].coordinates.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    named = rows_named(join_round(model, parameters, found, 12), orders)
    joined = {own[0]: (own, row) for own, row in named}
    assert len(named) >= 11 and all(len(set(own)) == 1 and row.label == labels[own[0]] for own, row in named)
    assert n not in joined or (joined[n][0][m] == n and not joined[n][1].sure[m])


def test_no_slices_at_all():
    found, orders, model, parameters, _ = slices_in_disorder(rows=3)
    for m in range(4):
        for n in range(3):
            without(found, orders, m, n)
    assert [row.label for row in join_round(model, parameters, found, 3)] == [-1] * 3
