import pytest
import torch
from conftest import image_case, smooth_images, table_case, true_gradients

from cafe_tutorial.attack.step1 import BiasEquations, step1_update
from cafe_tutorial.protocol import index_batches


@pytest.mark.parametrize("schedule", ["random", "epochs"])
def test_bias_gradient_is_the_mean_of_v(schedule):
    """|s| b = Σ_{n∈s} v_n against autograd, in float64, short batches included."""
    data = smooth_images(10, 3, 6, 8)
    _, model, vfl = image_case(data, batch_size=4, schedule=schedule, dtype=torch.float64)
    V, _ = true_gradients(vfl)
    for view in vfl.rounds(6):
        for m in range(4):
            b = model.of_worker(view.gradients, m)["first.bias"]
            assert torch.allclose(b * len(view.indices), V[m][view.indices].sum(0), rtol=1e-10, atol=1e-15)


def test_update_follows_the_gradient_of_the_objective():
    g = torch.Generator().manual_seed(0)
    V = torch.randn(2, 7, 3, generator=g, dtype=torch.float64)
    b, s = torch.randn(2, 3, generator=g, dtype=torch.float64), torch.tensor([1, 4, 6])
    leaf = V.clone().requires_grad_()
    objective = (leaf[:, s].sum(1) - b).square().sum()
    (gradient,) = torch.autograd.grad(objective, leaf)
    value = step1_update(V, s, b, learning_rate=0.03)
    assert torch.allclose(V, leaf.detach() - 0.03 * gradient) and torch.allclose(value, objective.detach())


def test_half_over_k_solves_one_equation_at_once():
    V, b, s = torch.randn(9, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64), torch.tensor([0, 3, 5, 8])
    step1_update(V, s, b, learning_rate=1 / (2 * len(s)))
    assert step1_update(V, s, b, learning_rate=1e-9) < 1e-25


@pytest.mark.parametrize("schedule", ["random", "epochs", "fixed"])
@pytest.mark.parametrize(("rows", "size"), [(12, 1), (12, 5), (13, 4), (12, 11), (12, 12), (1, 1)])
def test_rank_is_counted_right(schedule, rows, size):
    stream = index_batches(schedule, rows, size, generator=torch.Generator().manual_seed(3))
    equations = BiasEquations(rows)
    for _ in range(3 * rows):
        equations.add(next(stream), torch.zeros(2))
        assert equations.rank == int(torch.linalg.matrix_rank(equations.incidence))


@pytest.mark.parametrize("size", [1, 3, 8, 14])
def test_exact_solution_and_its_error(size):
    rows, g = 15, torch.Generator().manual_seed(size)
    V = torch.randn(rows, 40, generator=g, dtype=torch.float64)
    V[4] = 0
    stream, equations = index_batches("random", rows, size, generator=g), BiasEquations(rows)
    while equations.rank < rows or len(equations) < equations.last_gain + 10:
        s = next(stream)
        equations.add(s, V[s].mean(0).float())
    solution, noise = equations.solve(eps=torch.finfo(torch.float32).eps)
    ratio = (solution - V).norm(dim=1) / (equations.spread() * noise.norm())
    moves = equations.perturbations(slice(0, 40), noise, 400, g)
    drawn = moves.square().sum(2).mean(0).sqrt() / (equations.spread() * noise.norm())
    assert moves.shape == (400, rows, 40) and drawn.min() > 0.9 and drawn.max() < 3
    assert (solution - V).norm() < 1e-4 * V.norm()
    assert ratio.max() < 4 and ratio.median() > 0.05  # the prediction is of the right size
    assert abs(equations.condition() - float(torch.linalg.cond(equations.incidence))) < 1e-6 * equations.condition()


def test_labels_are_in_the_heads_gradient():
    parts, labels, model, vfl = table_case(classes=5)
    equations = BiasEquations(20)
    for view in vfl.rounds(30):
        equations.add(view.indices, view.gradients["head.bias"])
    solution, _ = equations.solve(eps=1e-15)
    logits = model.forward(vfl.parameters, vfl._stacked)[1]
    expected = logits.softmax(1) - torch.nn.functional.one_hot(labels, 5)
    assert torch.allclose(solution, expected, atol=1e-9)
