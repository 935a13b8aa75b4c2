"""Rows grown worker by worker, and candidates chosen for a group, against known answers."""

import pytest
import torch
from conftest import image_case

from cafe_tutorial.attack import OneRoundCAFE
from cafe_tutorial.attack.grow import grow
from cafe_tutorial.attack.meeting import meeting
from cafe_tutorial.attack.newton import gauss_newton
from cafe_tutorial.attack.pool import Pool
from cafe_tutorial.attack.spans import span
from cafe_tutorial.data import Images, load_images
from cafe_tutorial.metrics import score


def rows_of(workers, rows, classes=10, rank=5, spread=1.0, seed=0):
    """Slopes and V of rows whose e = softmax(logits) - y, the logits' spread being what tells rows of one label apart."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (rows,), generator=g)
    e = (spread * torch.randn(rows, classes, generator=g, dtype=torch.float64)).softmax(1) - torch.eye(classes, dtype=torch.float64)[labels]
    left, right = (torch.randn(workers, rows, a, b, generator=g, dtype=torch.float64) for a, b in ((24, rank), (rank, classes)))
    slopes = left @ right
    orders = [torch.randperm(rows, generator=g) for _ in range(workers)]
    return labels, orders, [s[o] for s, o in zip(slopes, orders)], [torch.einsum("ndc,nc->nd", s, e)[o] for s, o in zip(slopes, orders)]


@pytest.mark.parametrize("workers, rows, rank, seed", [(3, 12, 6, 0), (4, 30, 5, 1), (16, 40, 4, 2), (5, 1, 4, 3)])
def test_rows_grow_together(workers, rows, rank, seed):
    labels, orders, slopes, V = rows_of(workers, rows, rank=rank, seed=seed)
    choice, named, misfit, _ = grow(slopes, V, [False] * workers, rows)
    found = torch.stack([order[choice[:, m]] for m, order in enumerate(orders)], 1)
    assert len(found) == rows and (found == found[:, :1]).all() and torch.equal(named, labels[found[:, 0]]) and misfit.isfinite().all()


@pytest.mark.parametrize("spread", [1.0, 0.01])
@pytest.mark.parametrize("seed", range(3))
def test_a_missing_slice_leaves_a_hole(spread, seed):
    """No slice of another row takes its place, not even where rows of one label have nearly the same e."""
    labels, orders, slopes, V = rows_of(6, 30, spread=spread, seed=seed)
    kept = [torch.rand(30, generator=torch.Generator().manual_seed(seed + m)) > 0.15 for m in range(6)]
    orders, slopes, V = ([x[k] for x, k in zip(values, kept)] for values in (orders, slopes, V))
    choice, named, misfit, _ = grow(slopes, V, [True] * 6, 30)
    assert len(choice) > 25
    for slots, label, miss in zip(choice.tolist(), named.tolist(), misfit.tolist()):
        rows = {int(orders[m][i]) for m, i in enumerate(slots) if i >= 0}
        assert miss == float("inf") or (len(rows) == 1 and label == labels[rows.pop()])


def test_nothing_grows_from_unrelated_slices_or_too_few_equations():
    _, _, slopes, V = rows_of(6, 20)
    noise = [torch.randn(v.shape, generator=torch.Generator().manual_seed(m), dtype=v.dtype) for m, v in enumerate(V)]
    assert len(grow(slopes, noise, [True] * 6, 20)[0]) == 0
    assert len(grow(slopes[:2], V[:2], [False] * 2, 20)[0]) == 0  # ten equations for nine unknowns
    empty = [s[:0] for s in slopes], [v[:0] for v in V]
    assert len(grow(*empty, [True] * 6, 20)[0]) == 0


def batch(H, numbers, seed):
    """The span of a batch of these rows of H."""
    h = H[numbers]
    V = torch.randn(len(numbers), 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return span(torch.tensor(numbers), (V.T @ h / len(numbers)).float(), (V.sum(0) / len(numbers)).float(), scale=1.0)


def sparse(rows, seed, entries=400):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(rows, entries, generator=g, dtype=torch.float64) * (torch.rand(rows, entries, generator=g) > 0.5)


@pytest.mark.parametrize("gap", [3e-5, 1e-4, 3e-4])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_that_resembles_one_of_another_round_does_not_blur_the_rest(gap, seed):
    H = sparse(20, seed)
    H[19] = H[5] * (1 + gap * torch.rand(400, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    met = meeting([batch(H, [0, 1, *range(2, 10)], 1), batch(H, [0, 1, *range(10, 20)], 2)], 2, rays=True, seed=0)
    truth = torch.nn.functional.normalize(torch.cat([H, torch.ones(20, 1, dtype=torch.float64)], 1), dim=1)
    apart = torch.cdist(met.rays, truth).min(1)
    shared = apart.indices < 2
    assert set(apart.indices[shared].tolist()) == {0, 1}
    assert (apart.values[shared] < 3 * met.error[shared] + 1e-6).all() and (apart.values[shared] < 1e-4).all()
    assert (met.error[~shared] > 1e-6).all()  # what lies in no intersection says so


def test_candidates_that_belong_to_another_group_come_last():
    H = sparse(4, 0)
    member = torch.tensor([[True, True, False], [True, True, False], [True, False, True], [False, True, True]])
    pool = Pool.empty(torch.zeros(4, 400, dtype=torch.float64), member)
    pool.add([0, 1], 3, H[:3], torch.full((3,), 1e-7, dtype=torch.float64))
    pool.add([2], 1, H[2:3], torch.full((1,), 1e-7, dtype=torch.float64))
    pool.add([3], 0)
    n = len(pool.error)
    pool.x, pool.residual, pool.certified = torch.arange(float(n)), torch.tensor([1e-12, 1e-12, 1e-13, 1e-12, 1e-12])[:n], torch.ones(n, dtype=torch.bool)
    assert n == 5 and pool.member[4].tolist() == [True, True, False]
    for _ in range(2):
        pool.select(4)
    pool.truncate(4)
    assert {tuple(h.tolist()) for h in pool.H[:2]} == {tuple(h.tolist()) for h in H[:2]}
    assert torch.equal(pool.H[2], H[2]) and pool.silent.tolist() == [False, False, False, True]


class Linear:
    """P h̃ of a linear h with singular values from 1 down to ``least``, zero at ``truth``; what gauss_newton asks of an Outside."""

    def __init__(self, truth, least, seed):
        g = torch.Generator().manual_seed(seed)
        pixels = truth[0].numel()
        Q, P = (torch.linalg.qr(torch.randn(n, pixels, generator=g, dtype=torch.float64))[0] for n in (3 * pixels, pixels))
        self.A = Q @ torch.diag(torch.logspace(0, torch.tensor(least).log10().item(), pixels, dtype=torch.float64)) @ P.T
        self.truth, self.bases = truth, [self.A]

    def at(self, rows):
        other = object.__new__(Linear)
        other.A, other.truth, other.bases = self.A, self.truth[rows], self.bases
        return other

    def __call__(self, x):
        return (x - self.truth).flatten(1) @ self.A.T

    def relative(self, x):
        return self(x).square().sum(1)


@pytest.mark.parametrize("least, large", [(1e-1, False), (1e-3, False), (1e-4, False), (1e-1, True), (1e-2, True)])
@pytest.mark.parametrize("seed", range(2))
def test_gauss_newton_reaches_badly_conditioned_images_at_the_edge_of_their_range(least, large, seed, monkeypatch):
    """By the solver with bounds, and by the conjugate gradients that stand in for it where images are large."""
    monkeypatch.setattr("cafe_tutorial.attack.newton.LARGE", 0 if large else 1024)
    g = torch.Generator().manual_seed(seed)
    truth = (1.5 * torch.rand(5, 1, 4, 4, generator=g, dtype=torch.float64) - 0.25).clamp(0, 1)  # many pixels are 0 or 1
    outside = Linear(truth, least, seed)
    start = (truth + 0.01 * torch.randn(truth.shape, generator=g, dtype=torch.float64)).clamp(0, 1)
    x, rho = gauss_newton(outside, start, outside.relative(start))
    assert ((x >= 0) & (x <= 1)).all() and (rho < 1e-13).all() and float((x - truth).abs().max()) < 1e-6 / least
    again, same = gauss_newton(outside, truth, outside.relative(truth))
    assert torch.equal(again, truth) and (same == 0).all()


def test_many_workers_are_joined():
    """More combinations of slices than can be tried."""
    data = load_images("mnist-sample", rows=12, seed=0)
    data = Images(data.images[:, :, 2:26, 2:26].clone(), data.labels, data.label_values, "middles")
    split, model, vfl = image_case(data, (2, 4), batch_size=12, d2=64, schedule="epochs")
    attack = OneRoundCAFE(model)
    attack.observe(next(vfl.rounds(1)))
    leak = attack.solve()
    result = score(leak, data, split)
    assert result.label_accuracy > 0.7 and leak.certified.double().mean() > 0.5 and not (result.certified & (result.psnr_slice < 60)).any()


def test_the_beam_keeps_what_has_most_equations(monkeypatch):
    """More combinations than it may keep: rows still grow."""
    monkeypatch.setattr("cafe_tutorial.attack.grow.BEAM", 2000)
    labels, orders, slopes, V = rows_of(5, 30, rank=5, seed=4)
    choice, named, *_ = grow(slopes, V, [False] * 5, 30)
    rows = torch.stack([order[choice[:, m]] for m, order in enumerate(orders)], 1)
    assert len(rows) == 30 and (rows == rows[:, :1]).all() and torch.equal(named, labels[rows[:, 0]])
