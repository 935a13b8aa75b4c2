import dataclasses

import pytest
import torch
from conftest import image_case, smooth_images, table_case, true_gradients

from cafe_tutorial.attack import ExactCAFE, NotIdentifiable
from cafe_tutorial.attack.invert import Attempt
from cafe_tutorial.attack.jacobians import gains
from cafe_tutorial.data import load_images
from cafe_tutorial.defense import Defense
from cafe_tutorial.metrics import score
from cafe_tutorial.protocol import VerticalFL

SHORT = (Attempt("grey", 30), Attempt("smooth", 160, 1e-3))


def attacked(model, vfl, **options):
    attack = ExactCAFE(model, rows=vfl.rows, **options)
    while not attack.ready:
        assert not attack.stalled
        for view in vfl.rounds(1):
            attack.observe(view)
    return attack


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 1), (7, 3), (8, 4), (10, 9), (11, 4)])
@pytest.mark.parametrize("schedule", ["random", "epochs"])
def test_any_rows_and_batch_size(rows, size, schedule):
    """H to float64 precision from float64 gradients, for any N and K, K a divisor of N or not."""
    parts, labels, model, vfl = table_case(rows=rows, widths=(2, 5, 2), batch_size=size, schedule=schedule)
    leak = attacked(model, vfl).solve()
    assert torch.equal(leak.labels, labels)
    for found, true in zip(leak.slices, parts):
        assert (found - true).norm() < 1e-7 * true.norm()
    assert leak.leaks.all() and leak.certified.all() and leak.rounds >= rows


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 9, 16])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_workers_grey_and_colour(workers, channels):
    """Tiles of odd sizes; what is certified is right, and most of what leaks is certified."""
    from cafe_tutorial.partition import GridPartition

    grid = GridPartition.for_workers(workers, 12, 18 if workers != 16 else 20)
    data = smooth_images(6, channels, 12, 18 if workers != 16 else 20, seed=workers)
    split, model, vfl = image_case(data, (grid.rows, grid.cols), batch_size=2)
    leak = attacked(model, vfl, **({} if workers == 1 else {"attempts": SHORT})).solve()
    result = score(leak, data, split)
    assert result.label_accuracy == 1.0
    assert result.certified.sum() > 0.5 * result.leaks.sum()
    assert (result.psnr_slice[result.certified] > 60).all()


@pytest.mark.parametrize("workers", range(1, 17))
def test_any_number_of_table_workers(workers):
    parts, labels, model, vfl = table_case(rows=12, widths=[1 + m % 3 for m in range(workers)], batch_size=5)
    leak = attacked(model, vfl).solve()
    assert torch.equal(leak.labels, labels) and leak.certified.all()
    assert all((s - p).norm() < 1e-7 * p.norm() for s, p in zip(leak.slices, parts))


@pytest.mark.parametrize("size", [(5, 7), (4, 4), (3, 9), (14, 2)])
def test_odd_tile_sizes(size):
    data = smooth_images(5, 1, *size)
    split, model, vfl = image_case(data, (1, 1), batch_size=2)
    result = score(attacked(model, vfl, attempts=SHORT).solve(), data, split)
    assert (result.psnr_slice[result.certified] > 60).all() and result.certified.any()


def test_digits_and_their_blank_tiles(digits):
    """Blank tiles have v_n = 0 exactly: they do not leak, are not certified, and are no error."""
    images = digits.images.clone()
    images[:5, :, :4, :4] = 0
    data = type(digits)(images, digits.labels, digits.label_values, "digits")
    split, model, vfl = image_case(data, batch_size=4)
    V, _ = true_gradients(vfl)
    silent = torch.stack([v.norm(dim=1) == 0 for v in V], 1)
    assert silent[:5, 0].all()
    leak = attacked(model, vfl).solve()
    assert torch.equal(leak.leaks, ~silent)
    assert not leak.certified[silent].any() and leak.residual[silent].isnan().all()
    assert all((s[silent[:, m]] == 0).all() for m, s in enumerate(leak.slices))
    result = score(leak, data, split)
    assert result.certified[~silent].double().mean() > 0.9 and (result.psnr_slice[result.certified] > 60).all()
    assert result.summary()["slices_not_leaked"] == int(silent.sum())


def test_trained_weights():
    data = smooth_images(10, 1, 8, 8)
    split, model, vfl = image_case(data, batch_size=3, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    for _ in vfl.rounds(60):
        pass
    model.parameters = {k: v.detach().clone() for k, v in vfl.parameters.items()}
    from cafe_tutorial.protocol import VerticalFL

    frozen = VerticalFL(model, split.split(data.images), data.labels, batch_size=3)
    result = score(attacked(model, frozen, attempts=SHORT).solve(), data, split)
    assert result.certified.any() and (result.psnr_slice[result.certified] > 60).all()


@pytest.mark.parametrize("steps", [0, 100, 300])
@pytest.mark.parametrize("seed", [0, 1])
def test_certified_records_of_a_trained_table_are_right(steps, seed):
    """Training shrinks most v_n; the certificate must widen with the error that follows."""
    from cafe_tutorial.data import load_table
    from cafe_tutorial.model import VFLModel
    from cafe_tutorial.partition import ColumnPartition
    from cafe_tutorial.protocol import VerticalFL

    table, split = load_table(rows=120, seed=seed), ColumnPartition.widths([5, 10, 15])
    model = VFLModel.mlp(split.part_shapes(table), classes=2, seed=seed)
    vfl = VerticalFL(model, split.split(table.records), table.labels, batch_size=12, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    for _ in vfl.rounds(steps):
        pass
    model.parameters = {k: v.detach().clone() for k, v in vfl.parameters.items()}
    frozen = VerticalFL(model, split.split(table.records), table.labels, batch_size=12, seed=seed)
    result = score(attacked(model, frozen).solve(), table, split)
    assert result.certified.any() and (result.relative_error[result.certified] < 1e-4).all()
    if not steps:
        assert result.certified.all()


@pytest.mark.parametrize("rate", [1e-9, 1e-8, 1e-7, 1e-6, 1e-3])
def test_training_while_attacked_certifies_nothing(rate):
    """A slow drift of Θ leaves small residuals and larger errors: no certificate covers it."""
    parts, labels, model, vfl = table_case(rows=30, batch_size=5, dtype=torch.float32, optimizer=lambda p: torch.optim.Adam(p, lr=rate))
    leak = attacked(model, vfl).solve()
    assert leak.leaks.all() and not leak.certified.any()
    assert any("Θ changed" in note for note in leak.notes)
    errors = torch.cat([(s - p).norm(dim=1) / p.norm(dim=1) for s, p in zip(leak.slices, parts)])
    assert errors.median() < 1e-3 if rate < 1e-7 else errors.median() > 1e-6


def test_nothing_is_certified_where_h_has_fewer_numbers_than_the_image():
    """Sixteen numbers cannot tell 64-pixel images apart, however well they are matched."""
    from torch import nn

    from cafe_tutorial.model import BottomModel, VFLModel
    from cafe_tutorial.protocol import VerticalFL

    data = smooth_images(6, 1, 8, 8)
    representation = nn.Sequential(nn.Conv2d(1, 4, 4, stride=4), nn.ReLU(), nn.Flatten())
    bottom = BottomModel(representation, nn.Linear(16, 32), nn.Sequential(nn.ReLU(), nn.Linear(32, 5)))
    model = VFLModel([bottom], nn.Linear(5, data.classes), [(1, 8, 8)])
    vfl = VerticalFL(model, [data.images], data.labels, batch_size=2)
    assert not attacked(model, vfl, attempts=SHORT).solve().certified.any()


@pytest.mark.parametrize("layer, shift", [(0, -0.02), (0, -0.1), (3, -0.05)])
def test_nothing_wrong_is_certified_where_a_convolution_swallows_pixels(layer, shift):
    """Negative biases hide dark pixels from h: many images have the same h_n, so a small residual says nothing."""
    data = load_images("mnist-sample", rows=8, seed=0)
    split, model, _ = image_case(data, d2=256)
    model.parameters[f"group0.representation.{layer}.bias"] += shift
    vfl = VerticalFL(model, split.split(data.images), data.labels, batch_size=2)
    result = score(attacked(model, vfl, attempts=SHORT[:1]).solve(), data, split)
    assert (result.psnr_slice < 60).any() and not (result.certified & (result.psnr_slice < 60)).any()


@pytest.mark.parametrize("channels, size", [(1, 8), (3, 6), (1, 3)])
def test_gains_are_the_extreme_singular_values(channels, size):
    data = smooth_images(rows=4, channels=channels, height=size, width=size)
    model = image_case(data, grid=(1, 1))[1]
    h = model.representation(0, model.parameters)
    x = 0.2 + 0.6 * data.images
    low, high = gains(h, x)
    J = torch.stack([torch.func.jacrev(lambda z: h(z[None])[0])(row).flatten(1) for row in x])
    values = torch.linalg.svdvals(J)
    assert torch.allclose(high, values[:, 0], rtol=1e-3) and torch.allclose(low, values[:, -1], rtol=1e-3)
    silent = {k: v - 10 * k.endswith("representation.0.bias") for k, v in model.parameters.items()}
    assert (gains(model.representation(0, silent), x)[0] == 0).all()


@pytest.mark.parametrize("pixels", [16, 100])
def test_one_lost_direction_among_many_is_found(pixels):
    """A single direction of x that h does not see, with all others well seen."""
    g = torch.Generator().manual_seed(pixels)
    U, _, W = torch.linalg.svd(torch.randn(2 * pixels, pixels, generator=g), full_matrices=False)
    values = torch.linspace(0.05, 0.5, pixels)
    values[0] = 0
    matrix = (U * values) @ W
    low, high = gains(lambda x: x.flatten(1) @ matrix.T, torch.rand(5, 1, 1, pixels, generator=g))
    assert (low < 1e-5).all() and torch.allclose(high, torch.full((5,), 0.5), rtol=1e-4)


def test_doubtful_labels_are_counted():
    *_, model, vfl = table_case(rows=12, batch_size=3, dtype=torch.float32)
    honest, noisy, g = ExactCAFE(model, rows=12), ExactCAFE(model, rows=12), torch.Generator().manual_seed(0)
    for view in vfl.rounds(40):
        honest.observe(view)
        noisy.observe(dataclasses.replace(view, gradients={**view.gradients, "head.bias": 1e-3 * torch.randn(2, generator=g)}))
    assert not any("labels" in note for note in honest.solve().notes)
    assert any("labels rest on a gradient" in note for note in noisy.solve().notes)


def test_h_is_known_as_well_as_predicted(digits):
    _, model, vfl = image_case(digits, batch_size=4, d2=64)
    attack = attacked(model, vfl)
    V_true, H_true = true_gradients(vfl)
    V, noise = attack.bias.solve(eps=2**-23)
    widths = [*model.d2, model.classes]
    for m, v in enumerate(V.split(widths, 1)[:-1]):
        assert (v - V_true[m]).norm() < 1e-5 * V_true[m].norm()
        live = V_true[m].norm(dim=1) > 0
        H, delta = attack._representations(m, v, live, noise, 2**-23, torch.Generator().manual_seed(0))
        truth = (H - H_true[m]).norm(dim=1) / H_true[m].norm(dim=1)
        assert (truth[live] < 5 * delta[live]).all() and truth[live].median() < 1e-5


class Sloppy(Defense):
    """A processor whose sums are off by several units in the last place."""

    def __init__(self, units):
        super().__init__(seed=3)
        self.units = units

    def __call__(self, gradient, *, rows):
        return {k: g * (1 + self.units * 2**-23 * torch.randn(g.shape, generator=self.generator)) for k, g in gradient.items()}


@pytest.mark.parametrize("units", [1, 4, 16, 64])
def test_nothing_wrong_is_certified_where_gradients_are_rounded_more_coarsely(digits, units):
    """How sums are rounded depends on the processor; what is certified does not get worse than the certificate allows."""
    split, model, vfl = image_case(digits, defense=Sloppy(units))
    result = score(attacked(model, vfl).solve(), digits, split)
    assert (result.psnr_slice[result.certified] > 60).all()
    parts, _, model, vfl = table_case(dtype=torch.float32, defense=Sloppy(units))
    leak = attacked(model, vfl).solve()
    for found, true, certified in zip(leak.slices, parts, leak.certified.T):
        assert ((found - true).norm(dim=1) <= 1e-4 * true.norm(dim=1))[certified].all()
    assert units > 4 or result.certified.any() and leak.certified.any()


def test_too_few_rounds_says_how_many_more():
    *_, model, vfl = table_case(rows=30, batch_size=5)
    attack = ExactCAFE(model, rows=30)
    with pytest.raises(NotIdentifiable, match="nothing was observed"):
        attack.solve()
    for view in vfl.rounds(12):
        attack.observe(view)
    missing = 30 - int(torch.linalg.matrix_rank(attack.bias.incidence))
    assert attack.missing == missing and not attack.ready
    with pytest.raises(NotIdentifiable, match=f"rank {30 - missing} of 30 rows: at least {missing} more rounds"):
        attack.solve()


@pytest.mark.parametrize(("schedule", "size", "rank"), [("fixed", 5, 4), ("random", 20, 1), ("epochs", 20, 1)])
def test_repeating_schedules_are_refused_with_the_reason(schedule, size, rank):
    *_, model, vfl = table_case(rows=20, batch_size=size, schedule=schedule)
    attack = ExactCAFE(model, rows=20)
    for view in vfl.rounds(600):
        attack.observe(view)
        if attack.stalled:
            break
    assert attack.stalled and not attack.ready
    with pytest.raises(NotIdentifiable, match=f"rank {rank} of 20 .*repeats its batches"):
        attack.solve()


def test_fixed_batches_of_one_are_identified():
    parts, *_, model, vfl = table_case(rows=6, batch_size=1, schedule="fixed")
    leak = attacked(model, vfl).solve()
    assert all((s - p).norm() < 1e-7 * p.norm() for s, p in zip(leak.slices, parts))


def test_batches_larger_than_the_first_layer():
    """K > d2: no single batch determines its rows, all of them together do."""
    parts, _, model, vfl = table_case(rows=30, widths=(3, 4), batch_size=12, d2=6)
    leak = attacked(model, vfl).solve()
    assert all((s - p).norm() < 1e-5 * p.norm() for s, p in zip(leak.slices, parts))


def test_repeatable_from_the_seed():
    runs = []
    for _ in range(2):
        data = smooth_images(6, 3, 8, 8)
        _, model, vfl = image_case(data, batch_size=2)
        runs.append(attacked(model, vfl, attempts=SHORT[:1], seed=1).solve())
    assert all(torch.equal(a, b) for a, b in zip(runs[0].slices, runs[1].slices))
    assert torch.equal(runs[0].certified, runs[1].certified)


def test_small_memory_gives_the_same_answer():
    parts, _, model, vfl = table_case(rows=30, batch_size=4)
    leak = attacked(model, vfl, memory=1).solve()
    assert all((s - p).norm() < 1e-5 * p.norm() for s, p in zip(leak.slices, parts))


def test_errors():
    *_, model, vfl = table_case(rows=8)
    view = next(iter(vfl.rounds(1)))
    with pytest.raises(ValueError, match="rows=2 allows 0 to 1"):
        ExactCAFE(model, rows=2).observe(view)
    for rows in (0, True, 1.5):
        with pytest.raises(ValueError, match="rows="):
            ExactCAFE(model, rows=rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_on_a_gpu(digits):
    split, model, vfl = image_case(digits, batch_size=4, device="cuda")
    result = score(attacked(model, vfl).solve(), digits, split)
    assert result.label_accuracy == 1.0 and (result.psnr_slice[result.certified] > 60).all()
    assert result.certified.sum() > 0.5 * result.leaks.sum()
