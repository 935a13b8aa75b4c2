import math

import pytest
import torch
import torch.nn.functional as F
from conftest import smooth_images

from cafe_tutorial import theory
from cafe_tutorial.attack.step1 import BiasEquations, step1_update
from cafe_tutorial.attack.step2 import step2_gradient
from cafe_tutorial.protocol import index_batches

sizes = pytest.mark.parametrize("rows, batch_size", [(1, 1), (2, 1), (5, 1), (5, 3), (5, 4), (5, 5), (13, 6)])


def every_batch(rows, batch_size):
    """The indicators of all K-subsets, (count, N), float64."""
    return torch.stack([F.one_hot(s, rows).sum(0) for s in torch.combinations(torch.arange(rows), batch_size)]).double()


@sizes
def test_step1_hessian_is_the_mean_over_every_batch(rows, batch_size):
    A = every_batch(rows, batch_size)
    H = theory.step1_hessian(rows, batch_size)
    assert torch.allclose(H, 2 * A.T @ A / len(A), atol=1e-12)
    low, high = theory.step1_eigenvalues(rows, batch_size)
    expected = torch.tensor([low] * (rows - 1) + [high]).sort().values.double()
    assert torch.allclose(torch.linalg.eigvalsh(H), expected, atol=1e-12)


@sizes
def test_step2_hessian_is_autograds(rows, batch_size):
    g = torch.Generator().manual_seed(rows + batch_size)
    V, H = torch.randn(rows, 2, generator=g, dtype=torch.float64), torch.zeros(rows, 1, dtype=torch.float64)
    V[0] = 0
    A = every_batch(rows, batch_size)
    expected = torch.zeros(rows, rows, dtype=torch.float64)
    for a in A:
        s = a.nonzero()[:, 0]
        G = torch.zeros(2, 1, dtype=torch.float64)
        hessian = torch.func.jacrev(lambda h_s, s=s, G=G: step2_gradient(h_s, V[s], G)[1])(H[s]).reshape(len(s), len(s))
        expected[s[:, None], s] += hessian / len(A)
    found = theory.step2_hessian(V, batch_size)
    assert torch.allclose(found, expected, atol=1e-12)
    low, high = theory.step2_bounds(V, batch_size)
    assert low - 1e-12 <= float(torch.linalg.eigvalsh(found)[0]) <= high + 1e-12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows, batch_size", [(12, 1), (12, 4), (12, 11), (12, 12)])
def test_step2_is_strongly_convex_exactly_when_the_theorem_says(rows, batch_size, seed):
    V = torch.randn(rows, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)  # rank 1, far below N
    smallest = torch.linalg.eigvalsh(theory.step2_hessian(V, batch_size))[0]
    assert (smallest > 1e-9) == (batch_size < rows)
    V[3] = 0
    assert abs(float(torch.linalg.eigvalsh(theory.step2_hessian(V, batch_size))[0])) < 1e-12
    wide = torch.randn(rows, rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert torch.linalg.eigvalsh(theory.step2_hessian(wide, batch_size))[0] > 1e-9  # rank N: also for K = N


@pytest.mark.parametrize("rows, batch_size, multiple", [(8, 1, 1.0), (8, 3, 0.3), (8, 3, 1.0), (8, 7, 1.7), (8, 8, 1.0)])
def test_step1_error_is_the_mean_over_every_batch(rows, batch_size, multiple):
    eta = multiple / (2 * batch_size)
    start = torch.randn(rows, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A, errors = every_batch(rows, batch_size), [start]
    for _ in range(2):  # every batch, then every pair of batches
        following = []
        for error in errors:
            for a in A:
                moved = error.clone()
                step1_update(moved, a.nonzero()[:, 0], torch.zeros(2, dtype=torch.float64), learning_rate=eta)
                following.append(moved)
        errors = following
    mean = torch.stack(errors).square().sum((1, 2)).mean()
    assert math.isclose(float(theory.step1_error(start, batch_size, eta, 2)[2]), float(mean), rel_tol=1e-10, abs_tol=1e-12)


@pytest.mark.parametrize("rows, batch_size", [(20, 1), (20, 7), (60, 6), (10, 9)])
def test_rates(rows, batch_size):
    error = torch.randn(rows, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for multiple in (0.4, 1.0, 1.6):
        eta = multiple / (2 * batch_size)
        path = theory.step1_error(error, batch_size, eta, 3000)
        assert math.isclose(float((path[3000] / path[2999]).sqrt()), theory.step1_rate(rows, batch_size, eta), rel_tol=1e-6)
    best = theory.best_learning_rate(rows, batch_size)
    rate = theory.step1_rate(rows, batch_size, best)
    assert all(rate <= theory.step1_rate(rows, batch_size, best * f) + 1e-12 for f in (0.5, 0.9, 0.99, 1.01, 1.1))
    mu = theory.step1_eigenvalues(rows, batch_size)[0] / 2
    assert rate <= theory.step1_rate(rows, batch_size, 1 / (2 * batch_size)) <= 1 - mu / (2 * batch_size) + 1e-12
    assert math.isclose(theory.step1_rate(rows, batch_size, 1 / batch_size), 1.0, rel_tol=1e-9)  # reflected for ever


@pytest.mark.parametrize("schedule, batch_size", [("random", 1), ("random", 19), ("random", 5), ("random", 20), ("epochs", 6), ("epochs", 5), ("fixed", 6), ("epochs", 20)])
def test_incidence_rank(schedule, batch_size):
    rows, seeds, rounds = 20, 40, 60
    total = torch.zeros(rounds, dtype=torch.float64)
    for seed in range(seeds):
        batches, equations = index_batches(schedule, rows, batch_size, generator=torch.Generator().manual_seed(seed)), BiasEquations(rows)
        for t in range(rounds):
            equations.add(next(batches), torch.zeros(1))
            total[t] += equations.rank / seeds
    predicted = torch.tensor([theory.incidence_rank(schedule, rows, batch_size, t) for t in range(1, rounds + 1)], dtype=torch.float64)
    below = {"fixed": 1e-9, "epochs": 0.6, "random": 1.2}[schedule]  # chance, over the seeds and close to rank N
    assert (predicted - total).max() < below and (total - predicted).max() < (0.3 if schedule == "random" else 1e-9)


@pytest.mark.parametrize("channels, kernel, padding", [(1, 3, 1), (3, 3, 1), (1, 5, 2), (2, 3, 0)])
def test_another_image_explains_a_convolutions_gradients(channels, kernel, padding):
    images = smooth_images(rows=2, channels=channels, height=12, width=12).images.double()
    layer = torch.nn.Conv2d(channels, 4, kernel, padding=padding).double()
    out = layer(images[:1])
    (out.sin() * torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).sum().backward()
    delta = theory.output_gradient_for(images[1], layer.weight.grad, layer.bias.grad, padding)
    again = torch.autograd.grad((layer(images[1:])[0] * delta).sum(), [layer.weight, layer.bias])
    for found, first in zip(again, (layer.weight.grad, layer.bias.grad)):
        assert (found - first).norm() < 1e-9 * first.norm()
    everywhere = torch.ones_like(delta, dtype=torch.bool)
    same = theory.output_gradient_for(images[1], layer.weight.grad, layer.bias.grad, padding, allowed=everywhere)
    assert torch.allclose(same, delta, atol=1e-9 * float(delta.abs().max()))
    few = everywhere & (torch.rand(delta.shape, generator=torch.Generator().manual_seed(1)) < 0.1)
    masked = theory.output_gradient_for(images[1], layer.weight.grad, layer.bias.grad, padding, allowed=few)
    assert masked[~few].abs().max() < 1e-9 * masked.abs().max()


def test_errors():
    for call in (lambda: theory.probabilities(0, 1), lambda: theory.step1_hessian(5, 6), lambda: theory.step1_eigenvalues(5, 0)):
        with pytest.raises(ValueError, match="rows=0|batch_size="):
            call()
    with pytest.raises(ValueError, match="schedule='sorted'"):
        theory.incidence_rank("sorted", 5, 2, 3)
    with pytest.raises(ValueError, match="dependent 3x3 patches"):
        theory.output_gradient_for(torch.zeros(1, 8, 8), torch.ones(2, 1, 3, 3), torch.ones(2), 1)
