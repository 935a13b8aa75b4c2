import dataclasses

import pytest
import torch
from conftest import image_case, smooth_images, table_case

from cafe_tutorial.attack.adam import RowAdam
from cafe_tutorial.attack.presets import PRESETS, Hyperparameters
from cafe_tutorial.attack.step3 import gradient_distance, step3_gradients, total_variation, truncated_tv


def test_total_variation_known_answers():
    x = torch.zeros(2, 3, 4, 5)
    x[0, 0, 1, 1] = 1  # four neighbours
    x[1] = torch.arange(5.0)  # 3 channels x 4 rows x 4 steps
    assert total_variation(x).tolist() == [4.0, 48.0]
    flat = torch.full((1, 1, 3, 3), 0.5, requires_grad=True)
    total_variation(flat).sum().backward()
    assert flat.grad.isfinite().all()
    assert total_variation(torch.rand(4, 7)).tolist() == [0.0] * 4


def test_truncation():
    x = torch.zeros(2, 3, 1, 4, 4)
    x[0, :, 0, 1, 1] = 1  # worker 0: a TV of 4 a row; worker 1: 0; mean 2
    assert truncated_tv([x], 1.9) == 4 and truncated_tv([x], 2.0) == 0 and truncated_tv([x], 0) == 4
    assert truncated_tv([x[:1], x[1:]], 1.9) == 4


@pytest.mark.parametrize("kind", ["images", "table"])
def test_gradients_of_the_objective(kind):
    """Against central differences of eq. 9 written out, in float64."""
    if kind == "images":
        data = smooth_images(6, 1, 4, 6)
        _, model, vfl = image_case(data, (1, 2), dtype=torch.float64, d2=6)
    else:
        *_, model, vfl = table_case(rows=6, batch_size=3, d2=6)
    view = next(iter(vfl.rounds(1)))
    g = torch.Generator().manual_seed(0)
    x = [torch.rand(len(group), 3, *model.part_shapes[group[0]], generator=g, dtype=torch.float64) for group in model.groups]
    y = torch.rand(3, model.classes, generator=g, dtype=torch.float64)
    H = [torch.rand(len(group), 3, model.d1[group[0]], generator=g, dtype=torch.float64) for group in model.groups]
    settings = Hyperparameters(alpha=3.0, beta=0.1, gamma=0.2, xi=0.5)

    def objective(x, y):
        leaves = {k: v.clone().requires_grad_() for k, v in view.parameters.items()}
        hidden, logits = model.forward(leaves, x)
        fake = torch.autograd.grad(-(y.softmax(1) * logits.log_softmax(1)).sum() / 3, list(leaves.values()))
        distance = sum((f - r).square().sum() for f, r in zip(fake, view.gradients.values()))
        tv = sum(total_variation(part).sum() / 3 for part in x) if kind == "images" else 0.0
        return 3.0 * distance + 0.1 * tv + 0.2 * sum((h - r).square().sum() for h, r in zip(hidden, H))

    value, x_grads, y_grad = step3_gradients(model, view.parameters, view.gradients, x, y, H, settings)
    assert torch.allclose(value, objective(x, y).detach())
    for i, grad in enumerate(x_grads):
        d = torch.randn(x[i].shape, generator=g, dtype=torch.float64)
        shifted = [[v + (e * d if j == i else 0) for j, v in enumerate(x)] for e in (1e-6, -1e-6)]
        slope = (objective(shifted[0], y) - objective(shifted[1], y)) / 2e-6
        assert torch.allclose((grad * d).sum(), slope, rtol=1e-4)
    d = torch.randn(y.shape, generator=g, dtype=torch.float64)
    slope = (objective(x, y + 1e-6 * d) - objective(x, y - 1e-6 * d)) / 2e-6
    assert torch.allclose((y_grad * d).sum(), slope, rtol=1e-4)


def test_the_truth_has_no_distance_and_switched_off_terms_count_nothing():
    data = smooth_images(5, 1, 4, 4)
    split, model, vfl = image_case(data, (1, 2), dtype=torch.float64)
    view = next(iter(vfl.rounds(1)))
    x = [p[:, view.indices] for p in vfl._stacked]
    y = 60 * torch.nn.functional.one_hot(data.labels[view.indices], data.classes).double()
    H = model.hidden(view.parameters, x)
    value, *_ = step3_gradients(model, view.parameters, view.gradients, x, y, H, Hyperparameters(beta=0))
    assert value < 1e-20
    off = dataclasses.replace(Hyperparameters(), alpha=0, beta=0, gamma=0)
    value, x_grads, y_grad = step3_gradients(model, view.parameters, view.gradients, x, y, H, off)
    assert value == 0 and not any(g.any() for g in x_grads) and not y_grad.any()
    assert gradient_distance([torch.ones(3)], [torch.zeros(3)]) == 3


def test_row_adam_is_adam_for_each_row():
    g = torch.Generator().manual_seed(0)
    value = torch.randn(2, 6, 3, generator=g)
    rows = [value[:, n].clone().requires_grad_() for n in range(6)]
    plain = [torch.optim.Adam([r], lr=0.01, eps=1e-7) for r in rows]
    mine = RowAdam(value, 0.01, row_dim=1)
    for t in range(40):
        s = torch.randperm(6, generator=g)[: 1 + t % 4]
        gradient = torch.randn(2, len(s), 3, generator=g)
        mine.update(s, gradient)
        for i, n in enumerate(s.tolist()):
            rows[n].grad = gradient[:, i].clone()
            plain[n].step()
    assert torch.allclose(value, torch.stack([r.detach() for r in rows], 1), atol=1e-6)


def test_the_released_codes_corrections():
    gradient = torch.ones(1, 2)
    for t, (b1, b2) in enumerate([(0.9, 0.999)] * 3, start=1):
        once, twice = torch.zeros(1, 2), torch.zeros(1, 2)
        a, b = RowAdam(once, 1.0), RowAdam(twice, 1.0, double_bias_correction=True)
        for _ in range(t):
            before = once.clone(), twice.clone()
            a.update(torch.tensor([0]), gradient)
            b.update(torch.tensor([0]), gradient)
        ratio = ((twice - before[1]) / (once - before[0])).mean()
        assert abs(ratio - (1 - b2**t) ** 0.5 / (1 - b1**t)) < 1e-5  # 0.32 at the first step
    late, late_global = torch.zeros(2, 1), torch.zeros(2, 1)
    a, b = RowAdam(late, 1.0), RowAdam(late_global, 1.0, global_step_count=True)
    for opt in (a, b):
        for _ in range(5):
            opt.update(torch.tensor([0]), torch.ones(1, 1))
        opt.update(torch.tensor([1]), torch.ones(1, 1))
    assert torch.allclose(late[0], late_global[0]) and abs(float(late[1]) + 1) < 1e-4
    assert abs(float(late_global[1]) + (0.1 / (1 - 0.9**6)) / (0.001 / (1 - 0.999**6)) ** 0.5) < 1e-4


def test_presets_are_table_9():
    names = ("lr_step1", "lr_step2", "lr_step3", "alpha", "beta", "gamma", "xi")
    table = {
        "cifar10": (5e-3, 8e-3, 2e-2, 1e-2, 1e-4, 1e-3, 90),
        "mnist": (1e-2, 1e-2, 1e-2, 1e-2, 1e-4, 1e-3, 25),
        "linnaeus5": (5e-3, 5e-3, 1e-2, 1e-2, 1e-4, 1e-3, 110),
        "yale": (1e-2, 1e-2, 1e-2, 1e-2, 1e-4, 1e-3, 32),
    }
    for preset, values in table.items():
        assert tuple(getattr(PRESETS[preset], n) for n in names) == values


@pytest.mark.parametrize("bad", [{"lr_step1": 0}, {"gamma": -1}, {"init_H": float("nan")}, {"switch_step2": 0.0}])
def test_bad_hyperparameters(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
        Hyperparameters(**bad)
