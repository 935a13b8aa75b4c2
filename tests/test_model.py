import pytest
import torch
from conftest import image_case, smooth_images
from torch import nn

from cafe_tutorial.model import VFLModel, convolutional_bottom, mlp_bottom


@pytest.mark.parametrize(("channels", "grid", "size"), [(1, (1, 1), (5, 7)), (3, (2, 2), (6, 10)), (1, (4, 4), (8, 8))])
def test_fused_workers_equal_the_plain_form(channels, grid, size):
    data = smooth_images(6, channels, *size)
    out = {}
    for fuse in (True, False):
        split, model, _ = image_case(data, grid, model_options={"fuse": fuse})
        assert len(model.groups) == (1 if fuse else split.workers)
        params = {k: v.double().requires_grad_() for k, v in model.parameters.items()}
        hidden, logits = model.forward(params, model.stack([p.double() for p in split.split(data.images)]))
        grads = dict(zip(params, torch.autograd.grad(model.loss(logits, data.labels), list(params.values()))))
        out[fuse] = model.unstack(hidden), logits, [model.of_worker(grads, m) for m in range(split.workers)]
    for a, b in zip(out[True][0], out[False][0]):
        assert torch.allclose(a, b, atol=1e-12)
    assert torch.allclose(out[True][1], out[False][1], atol=1e-12)
    for a, b in zip(out[True][2], out[False][2]):
        assert a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=1e-12) for k in a)


def test_released_network():
    bottom = convolutional_bottom((1, 14, 14))
    h, out = bottom(torch.rand(3, 1, 14, 14))
    assert h.shape == (3, 2048) and out.shape == (3, 10)
    assert sum(p.numel() for p in bottom.parameters()) == 748_234
    assert bottom.first.in_features == 2048 and bottom.first.out_features == 256


def test_weights_come_from_the_seed():
    shapes = [(1, 4, 4)] * 2
    a, b, c = (VFLModel.convolutional(shapes, classes=3, seed=s).parameters for s in (0, 0, 1))
    assert all(torch.equal(a[k], b[k]) for k in a) and not torch.equal(a["head.weight"], c["head.weight"])
    assert all((v == 0).all() for k, v in a.items() if k.endswith("bias"))
    first = a["group0.first.weight"]
    assert not torch.equal(first[0], first[1])


def test_unequal_widths_make_groups():
    model = VFLModel.mlp([(2,), (5,), (2,)], classes=2, d2=8)
    assert model.groups == [[0, 2], [1]]
    parts = [torch.rand(4, w) for w in (2, 5, 2)]
    assert all(torch.equal(a, b) for a, b in zip(model.unstack(model.stack(parts)), parts))
    hidden, logits = model.forward(model.parameters, model.stack(parts))
    assert all(torch.equal(h, p) for h, p in zip(model.unstack(hidden), parts)) and logits.shape == (4, 2)
    for m, x in enumerate(parts):
        assert torch.allclose(model.bottom(m)(x)[1], model.bottom(m, model.parameters)(x)[1])


def test_only_workers_that_compute_the_same_are_fused():
    """Tiles of two sizes may have the same layers; a module of one's own may hide what it does."""
    data_model = VFLModel.convolutional([(1, 13, 13), (1, 14, 14)], classes=2)
    assert data_model.groups == [[0], [1]]

    class Scale(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return self.factor * x

    bottoms = [mlp_bottom(3, d2=4) for _ in range(2)]
    for bottom, factor in zip(bottoms, (1.0, 2.0)):
        bottom.representation = Scale(factor)
    model = VFLModel(bottoms, nn.Linear(20, 2), [(3,), (3,)])
    x = torch.rand(5, 3)
    hidden = model.unstack(model.hidden(model.parameters, model.stack([x, x])))
    assert model.groups == [[0], [1]] and torch.equal(hidden[1], 2 * hidden[0])


def test_double_softmax_bounds_the_loss():
    logits = torch.tensor([[50.0] + [0.0] * 9])
    labels = torch.tensor([0])
    model = VFLModel.mlp([(2,)], classes=10, double_softmax=True)
    assert abs(float(model.loss(logits, labels)) - torch.log(torch.tensor(1 + 9 / torch.e)).item()) < 1e-6
    assert float(VFLModel.mlp([(2,)], classes=10).loss(logits, labels)) < 1e-6


@pytest.mark.parametrize("bad", [0, -3, 2.0, True])
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match="d2="):
        VFLModel.convolutional([(1, 4, 4)], classes=2, d2=bad)
    with pytest.raises(ValueError, match="classes="):
        VFLModel.mlp([(3,)], classes=bad)


def test_other_errors():
    with pytest.raises(ValueError, match="activation='swish'"):
        VFLModel.mlp([(3,)], classes=2, activation="swish")
    with pytest.raises(ValueError, match="one of each"):
        VFLModel([], nn.Linear(1, 1), [])
