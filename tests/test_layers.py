"""A representation taken apart, against autograd in float64."""

import pytest
import torch
from conftest import image_case, smooth_images
from torch import nn

from cafe_tutorial.attack.chords import chords
from cafe_tutorial.attack.invert import invert
from cafe_tutorial.attack.jacobians import gains, jacobian, tells_apart
from cafe_tutorial.attack.layers import evaluate, filters, layers_of, part, spare, thinned
from cafe_tutorial.attack.local import local_jacobian
from cafe_tutorial.model import Piece

CHAINS = {
    "released": ((1, 10, 9), lambda: [nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), nn.Conv2d(8, 12, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)]),
    "colour, no padding": ((3, 9, 11), lambda: [nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 8, (3, 2))]),
    "no pooling": ((2, 5, 6), lambda: [nn.Conv2d(2, 7, (3, 5), padding=(1, 2)), nn.ReLU(), nn.Conv2d(7, 9, 3, padding=2, bias=False), nn.ReLU()]),
    "pooled by three": ((1, 12, 7), lambda: [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d((3, 2), ceil_mode=True), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()]),
    "many channels": ((12, 4, 4), lambda: [nn.Conv2d(12, 4, 5, padding=2), nn.ReLU()]),
    "a pixel": ((1, 1, 1), lambda: [nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)]),
}  # fmt: skip


def chain(name, rows=3):
    """The chain with its own random weights, and images."""
    torch.manual_seed(1)
    shape, make = CHAINS[name]
    module = nn.Sequential(*make(), nn.Flatten()).double()
    return Piece(module, {k: v.detach() for k, v in module.named_parameters()}), torch.rand(rows, *shape, dtype=torch.float64)


def true_jacobian(h, x):
    return torch.stack([torch.func.jacrev(lambda z: h(z[None])[0])(row).flatten(1).T for row in x])


@pytest.mark.parametrize("name", CHAINS)
def test_values_gradients_and_jacobians_are_those_of_autograd(name):
    h, x = chain(name)
    layers = layers_of(h)
    x.requires_grad_()
    c = torch.randn(h(x).shape, dtype=torch.float64)
    mine, theirs = (torch.autograd.grad((f(x) * c).sum(), x)[0] for f in (lambda x: evaluate(layers, x), h))
    assert torch.allclose(evaluate(layers, x), h(x), atol=1e-14) and torch.allclose(mine, theirs, atol=1e-13)
    assert torch.allclose(local_jacobian(layers, x.detach()), true_jacobian(h, x.detach()), atol=1e-13)


def test_equal_pixels_have_autograds_derivative_too():
    """Among equal maxima both take the first one."""
    h, x = chain("released")
    x = torch.full_like(x, 0.5).requires_grad_()
    mine, theirs = (torch.autograd.grad(f(x).sum(), x)[0] for f in (lambda x: evaluate(layers_of(h), x), h))
    assert torch.allclose(mine, theirs, atol=1e-13)
    assert torch.allclose(local_jacobian(layers_of(h), x.detach()), true_jacobian(h, x.detach()), atol=1e-13)


@pytest.mark.parametrize("layers", [
    [nn.Identity()], [nn.Linear(4, 4), nn.Flatten()], [nn.Conv2d(1, 4, 3, stride=2), nn.Flatten()], [nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten()],
    [nn.Conv2d(1, 4, 3, padding_mode="circular", padding=1), nn.Flatten()], [nn.Conv2d(1, 4, 3), nn.MaxPool2d(3, stride=2), nn.Flatten()],
    [nn.Conv2d(1, 4, 3), nn.ReLU()], [nn.Conv2d(2, 4, 3, groups=2), nn.Flatten()], [nn.Conv2d(1, 4, 3), nn.MaxPool2d(3, padding=1), nn.Flatten()],
])  # fmt: skip
def test_anything_else_is_left_whole(layers):
    module = nn.Sequential(*layers)
    assert layers_of(Piece(module, dict(module.named_parameters()))) is None
    assert layers_of(lambda x: x) is None


def test_a_part_of_h_is_a_part_of_h():
    h, x = chain("released")
    layers = layers_of(h)
    for every in (1, 2, 3, 5, 12):
        assert torch.equal(part(h(x), layers, every), h(x).unflatten(1, (12, -1))[:, ::every].flatten(1))
        assert torch.allclose(evaluate(thinned(layers, every), x), part(h(x), layers, every), atol=1e-14)
        assert torch.allclose(jacobian(h, x, every=every), part(true_jacobian(h, x).flatten(0, 1), layers, every).view(len(x), x[0].numel(), -1), atol=1e-13)
    assert [spare(layers, width, 100) for width in (10, 250, 500, 750, 10**6)] == [1, 1, 2, 3, 4] and filters(layers) == 12


def test_what_a_part_of_h_tells_apart_the_whole_does_too():
    """σ_min of a part is never above that of the whole, and the answer is that of the whole on both sides of it."""
    data = smooth_images(6, 1, 8, 8)
    model = image_case(data, (1, 1))[1].to(torch.float64)
    h = model.representation(0, model.parameters)
    x, layers = data.images.double(), layers_of(h)
    inside = x.clamp(1e-3, 1 - 1e-3)
    assert spare(layers, h(x).shape[1], 64) > 1
    whole = torch.linalg.svdvals(true_jacobian(h, inside))[:, -1]
    assert torch.allclose(gains(h, x)[0], whole, rtol=1e-6)
    for every in (2, 3, 4):
        assert (torch.linalg.svdvals(jacobian(h, inside, every=every))[:, -1] <= whole * (1 + 1e-9)).all()
    assert tells_apart(h, x, whole * 0.999).all() and not tells_apart(h, x, whole * 1.001).any()
    assert tells_apart(lambda x: h(x), x, whole * 0.999).all() and not tells_apart(lambda x: h(x), x, whole * 1.001).any()


def test_nothing_is_told_apart_where_h_sees_nothing():
    h, x = chain("released")
    silent = Piece(h.module, {k: v - 100 * k.endswith("0.bias") for k, v in h.parameters.items()})
    assert not tells_apart(silent, x, torch.full((3,), 1e-9, dtype=torch.float64)).any()


def test_chords_lead_to_the_solution_and_stay_in_range():
    data = smooth_images(5, 1, 8, 8)
    model = image_case(data, (1, 1))[1].to(torch.float64)
    h, true = model.representation(0, model.parameters), data.images.double()
    near = (true + 1e-4 * torch.randn(true.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    found = chords(layers_of(h), h(true), near)
    assert (found - true).abs().amax() < 1e-6 and found.min() >= 0 and found.max() <= 1
    assert torch.equal(chords(layers_of(h), h(true), true), true)


def test_most_faint_single_pixels_are_found():
    """Tiles that are black but for one dark pixel: such rows were lost when the gradient steps after Adam were too few."""
    true = torch.zeros(20, 1, 7, 7)
    true[torch.arange(20), 0, torch.arange(20) % 7, torch.arange(20) // 3] = torch.linspace(0.02, 0.1, 20)
    model = image_case(smooth_images(4, 1, 7, 7), (1, 1))[1]
    h = model.representation(0, model.parameters)
    x, rho = invert(h, h(true), (1, 7, 7), goal=1e-10, generator=torch.Generator().manual_seed(0))
    found = rho < 1e-10
    assert found.double().mean() > 0.7 and (x - true)[found].abs().max() < 1e-4


def test_colour_tiles_are_found():
    """768 unknowns and hardly more numbers that are not zero."""
    data = smooth_images(4, 3, 16, 16)
    model = image_case(data, (1, 1))[1]
    h = model.representation(0, model.parameters)
    x, rho = invert(h, h(data.images), (3, 16, 16), goal=1e-10, generator=torch.Generator().manual_seed(0))
    assert (rho < 1e-10).all() and (x - data.images).abs().max() < 1e-3


def test_no_rows_are_no_error():
    h, x = chain("released")
    found, rho = invert(h, h(x)[:0], x.shape[1:], generator=torch.Generator().manual_seed(0))
    assert found.shape == (0, *x.shape[1:]) and rho.shape == (0,)
