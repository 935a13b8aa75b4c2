"""Averages over the same batch: against the mean itself, and against the noise that they are for."""

import pytest
import torch
from conftest import image_case, smooth_images

from cafe_tutorial.attack import Repeats
from cafe_tutorial.defense import GaussianMechanism


def seen(rounds, **options):
    _, _, vfl = image_case(smooth_images(), schedule="fixed", **options)
    repeats = Repeats()
    for view in vfl.rounds(rounds):
        repeats.observe(view)
    return repeats


def test_one_view_a_batch_with_the_mean_of_what_came():
    plain, noisy = seen(4), seen(22, defense=GaussianMechanism(noise_multiplier=0.1, clip_norm=0.1))
    assert noisy.counts == [6, 6, 5, 5] and plain.counts == [1] * 4
    for one, other in zip(plain.views(), noisy.views()):
        assert torch.equal(one.indices, other.indices) and one.gradients.keys() == other.gradients.keys()
    sums, counts = {}, {}
    for view in image_case(smooth_images(), schedule="fixed", defense=GaussianMechanism(noise_multiplier=0.1, clip_norm=0.1))[-1].rounds(22):
        key = tuple(view.indices.tolist())
        sums[key], counts[key] = sums.get(key, 0) + view.gradients["head.weight"].double(), counts.get(key, 0) + 1
    for view in noisy.views():
        key = tuple(view.indices.tolist())
        assert torch.allclose(view.gradients["head.weight"].double(), sums[key] / counts[key], atol=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_noise_shrinks_with_the_root_of_the_repeats(seed):
    plain = seen(1, batch_size=10).views()[0].gradients
    off = []
    for rounds in (4, 64):
        mean = seen(rounds, batch_size=10, defense=GaussianMechanism(noise_multiplier=1e-3, clip_norm=10.0, seed=seed)).views()[0].gradients
        off.append(torch.cat([(mean[k] - g).flatten() for k, g in plain.items()]).std() * rounds**0.5)
    assert off[0] == pytest.approx(1e-3, rel=0.05) and off[1] == pytest.approx(1e-3, rel=0.05)


def test_a_model_that_moves_is_refused():
    with pytest.raises(ValueError, match="view.parameters of round 1 differ"):
        seen(2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
