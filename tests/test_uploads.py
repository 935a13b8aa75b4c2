"""Uploads inside the protocol: every party's own defence, and rows clipped one by one."""

import pytest
import torch
from conftest import image_case, smooth_images, table_case
from test_defense import EXAMPLES

from cafe_tutorial.defense import GaussianMechanism, HalfPrecision, Quantization, defense_from
from cafe_tutorial.defense.base import flat
from cafe_tutorial.model import VFLModel
from cafe_tutorial.partition import GridPartition
from cafe_tutorial.protocol import VerticalFL
from cafe_tutorial.uploads import _norms_of_rows, row_norms, uploads


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["images", "table"])
def test_each_rows_own_gradient_is_clipped_as_by_autograd_one_row_at_a_time(kind, training):
    def protocol(**options):
        if kind == "images":
            return image_case(smooth_images(9, 1, 6, 8), (2, 2), dtype=torch.float64, batch_size=5, **options)[-1]
        return table_case(batch_size=5, **options)[-1]

    plain, loose = (next(protocol(defense=d).rounds(1)) for d in (None, GaussianMechanism(clip_norm=1e9, noise_multiplier=0.0)))
    assert all(torch.allclose(plain.gradients[k], loose.gradients[k], rtol=1e-8, atol=1e-14) for k in plain.gradients)
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} if training else {}
    vfl = protocol(defense=GaussianMechanism(clip_norm=0.05, noise_multiplier=0.0), **options)
    model = vfl.model
    *_, view = vfl.rounds(3)
    parties: list = [[] for _ in range(model.workers + 1)]
    for n in view.indices:
        weights = {k: v.clone().requires_grad_() for k, v in view.parameters.items()}
        loss = model.loss(model.forward(weights, [x[:, n : n + 1] for x in vfl._stacked])[1], vfl.labels[n : n + 1])
        own = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
        for m in range(model.workers):
            parties[m].append(flat(model.of_worker(own, m)))
        parties[-1].append(flat({k: v for k, v in own.items() if k.startswith("head.")}))
    for m, rows in enumerate(parties):
        expected = torch.stack([g * min(1.0, 0.05 / float(g.norm())) if float(g.norm()) else g for g in rows]).mean(0)
        seen = model.of_worker(view.gradients, m) if m < model.workers else {k: v for k, v in view.gradients.items() if k.startswith("head.")}
        assert torch.allclose(flat(seen), expected, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("text", EXAMPLES)
@pytest.mark.parametrize("kind", ["images", "table", "one worker"])
def test_in_the_protocol_every_party_goes_through_its_own_defense_and_training_uses_what_was_uploaded(text, kind):
    def protocol(**options):
        if kind == "table":
            return table_case(batch_size=5, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options)[-1]
        grid = (1, 1) if kind == "one worker" else (2, 1)
        return image_case(smooth_images(9, 1, 6, 8), grid, batch_size=5, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options)[-1]

    vfl, plain = protocol(defense=defense_from(text, seed=3)), protocol()
    model, before = vfl.model, {k: v.detach().clone() for k, v in vfl.parameters.items()}
    view, true = next(vfl.rounds(1)), next(plain.rounds(1))
    assert list(view.gradients) == list(true.gradients) and all(view.gradients[k].shape == true.gradients[k].shape for k in true.gradients)
    if not text.startswith("dp:noise_multiplier=0.5,clip_norm"):
        for m in range(model.workers):
            own = defense_from(text, seed=3).for_party(m, rows=vfl.rows, batch_size=5)(model.of_worker(true.gradients, m), rows=5)
            assert torch.allclose(flat(own), flat(model.of_worker(view.gradients, m)), atol=1e-7)
    for k, v in vfl.parameters.items():
        assert torch.allclose(v, before[k] - 0.1 * view.gradients[k].to(v), atol=1e-6)
    again = next(protocol(defense=defense_from(text, seed=3)).rounds(1))
    assert all(torch.equal(again.gradients[k], view.gradients[k]) for k in view.gradients)


def test_a_defense_needs_the_whole_gradient():
    with pytest.raises(ValueError, match="below=False leaves out part of what a defence acts on"):
        image_case(smooth_images(), below=False, defense=HalfPrecision())


def test_the_same_instance_in_two_protocols_gives_the_same_uploads():
    data, defense = smooth_images(), Quantization(bits=3, seed=1)
    views = [next(image_case(data, defense=defense)[-1].rounds(1)) for _ in range(2)]
    assert all(torch.equal(a, views[1].gradients[k]) for k, a in views[0].gradients.items())
    assert isinstance(image_case(data)[-1], VerticalFL)


@pytest.mark.parametrize("kind", ["released", "double softmax", "smooth", "two workers", "table", "one worker"])
def test_norms_of_rows_are_those_of_each_rows_own_gradient(kind):
    data = smooth_images(6, 3, 8, 10)
    if kind == "table":
        *_, model, vfl = table_case(rows=6, widths=(2, 3, 4))
    elif kind == "smooth":
        split = GridPartition(2, 2)
        model = VFLModel.smooth(split.part_shapes(data), classes=3, d2=8)
        vfl = VerticalFL(model, split.split(data.images), data.labels, batch_size=3, dtype=torch.float64)
    else:
        grid = {"two workers": (2, 1), "one worker": (1, 1)}.get(kind, (2, 2))
        _, model, vfl = image_case(data, grid, d2=8, dtype=torch.float64, model_options={"double_softmax": kind == "double softmax"})
    stacked = model.stack(vfl.parts)
    norms = row_norms(model, vfl.parameters, stacked, vfl.labels)
    for n in range(6):
        loss = model.loss(model.forward(vfl.parameters, [x[:, n : n + 1] for x in stacked])[1], vfl.labels[n : n + 1])
        own = dict(zip(vfl.parameters, torch.autograd.grad(loss, list(vfl.parameters.values()))))
        assert torch.allclose(norms[:, n], torch.stack([flat(g).norm() for g in uploads(model, own)]), rtol=1e-9)
    assert torch.allclose(norms, _norms_of_rows(model, vfl.parameters, stacked, vfl.labels), rtol=1e-9)
