import pytest
import torch
from conftest import image_case, smooth_images, table_case, true_gradients

from cafe_tutorial.attack.step2 import WeightEquations, step2_gradient


@pytest.mark.parametrize("schedule", ["random", "epochs"])
def test_weight_gradient_is_the_mean_outer_product(schedule):
    """|s| G = Σ_{n∈s} h_n v_nᵀ against autograd, in float64."""
    data = smooth_images(10, 1, 7, 6)
    _, model, vfl = image_case(data, (1, 2), batch_size=4, schedule=schedule, dtype=torch.float64)
    V, H = true_gradients(vfl)
    for view in vfl.rounds(6):
        s = view.indices
        for m in range(2):
            G = model.of_worker(view.gradients, m)["first.weight"]
            assert torch.allclose(G * len(s), V[m][s].T @ H[m][s], rtol=1e-9, atol=1e-14)


def test_gradient_of_the_objective():
    g = torch.Generator().manual_seed(0)
    H = torch.randn(2, 4, 6, generator=g, dtype=torch.float64, requires_grad=True)
    V, G = torch.randn(2, 4, 5, generator=g, dtype=torch.float64), torch.randn(2, 5, 6, generator=g, dtype=torch.float64)
    objective = sum((V[i].T @ H[i] - G[i]).square().sum() for i in range(2))
    (expected,) = torch.autograd.grad(objective, H)
    value, gradient = step2_gradient(H.detach(), V, G)
    assert torch.allclose(gradient, expected) and torch.allclose(value, objective.detach())


def solved(rows, size, d1, d2, rounds, *, seed=0, dtype=torch.float64, memory=2**30, dead=()):
    g = torch.Generator().manual_seed(seed)
    V, H = torch.randn(rows, d2, generator=g, dtype=torch.float64), torch.rand(rows, d1, generator=g, dtype=torch.float64)
    V[list(dead)] = 0
    equations = WeightEquations(rows, memory=memory)
    for _ in range(rounds):
        s = torch.randperm(rows, generator=g)[:size]
        equations.add(s, [(V[s].T @ H[s] / size)[None].to(dtype)])
    live = V.norm(dim=1) > 0
    found, error = equations.solve(0, 0, V, live, eps=torch.finfo(dtype).eps)
    return H, found, error, live, equations


@pytest.mark.parametrize(("rows", "size", "d2"), [(20, 4, 16), (20, 16, 16), (20, 20, 24), (30, 12, 8), (9, 1, 5)])
def test_exact_solution(rows, size, d2):
    """One batch is enough for K ≤ d2; a batch larger than d2 needs several, solved together."""
    H, found, error, live, _ = solved(rows, size, 11, d2, 60)
    assert (found - H).norm() < 1e-9 * H.norm() and error.isfinite().all()


def test_predicted_error_is_of_the_right_size():
    H, found, error, *_ = solved(40, 6, 50, 32, 40, dtype=torch.float32)
    ratio = (found - H).norm(dim=1) / error
    assert ratio.max() < 4 and ratio.median() > 0.1


def test_rows_without_gradient_and_open_rows():
    H, found, error, live, _ = solved(12, 3, 7, 8, 40, dead=(2, 5))
    assert (found[~live] == 0).all() and error[~live].isinf().all()
    assert (found[live] - H[live]).norm() < 1e-9 * H.norm() and error[live].isfinite().all()
    H, found, error, _, equations = solved(12, 3, 7, 8, 2)  # two batches leave six rows or more unseen
    unseen = equations.cover == 0
    assert unseen.sum() >= 6 and error[unseen].isinf().all() and (found[unseen] == 0).all()
    *_, open_error, _, _ = solved(12, 12, 7, 4, 3)  # 3 rounds of rank 4 for 12 rows, all the same batch
    assert open_error.isinf().any()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearly_dependent_rows_beside_healthy_ones(seed, dtype):
    """Rows whose v_n are dependent stay open; they neither pass as known nor spoil the others."""
    g = torch.Generator().manual_seed(seed)
    V, H = torch.randn(23, 16, generator=g, dtype=torch.float64), torch.rand(23, 9, generator=g, dtype=torch.float64)
    V[0] = V[1] + 5e-4 * V[2]
    equations = WeightEquations(23)
    batches = [torch.tensor([0, 1, 2])] * 3 + [3 + torch.randperm(20, generator=g)[:4] for _ in range(60)]
    for s in batches:
        equations.add(s, [(V[s].T @ H[s] / len(s))[None].to(dtype)])
    found, error = equations.solve(0, 0, V, torch.ones(23, dtype=torch.bool), eps=torch.finfo(dtype).eps)
    truth = (found - H).norm(dim=1)
    assert (truth < 5 * error + 1e-12).all()
    assert error[:2].isinf().all() and (error[3:] < 1e-4).all() and (truth[3:] < 1e-5).all()


def test_memory_is_bounded_and_every_row_stays_covered():
    size = 4 * 9 * 8  # bytes of one float32 weight gradient
    H, found, error, _, equations = solved(30, 5, 9, 8, 200, dtype=torch.float32, memory=14 * size)
    assert (equations.cover > 0).all()
    assert len(equations.held) <= 14
    assert (found - H).norm() < 1e-3 * H.norm()
    *_, tight = solved(30, 5, 9, 8, 200, dtype=torch.float32, memory=1)
    assert (tight.cover > 0).all() and len(tight.held) < 30


def test_against_autograd_on_a_table():
    parts, labels, model, vfl = table_case(rows=24, widths=(3, 5), batch_size=6)
    V, H = true_gradients(vfl)
    equations = WeightEquations(24)
    for view in vfl.rounds(60):
        equations.add(view.indices, [view.gradients[f"group{g}.first.weight"] for g in range(2)])
    assert (equations.cover > 0).all()
    for m in range(2):
        found, _ = equations.solve(*model.place(m), V[m], torch.ones(24, dtype=torch.bool), eps=1e-16)
        assert (found - parts[m]).norm() < 1e-8 * parts[m].norm()
