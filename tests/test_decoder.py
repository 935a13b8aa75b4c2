import pytest
import torch

from cafe_tutorial.attack.decoder import linear_decoder, random_images
from cafe_tutorial.attack.invert import Attempt, invert
from cafe_tutorial.data import load_images
from cafe_tutorial.model import VFLModel
from cafe_tutorial.partition import GridPartition

SHAPES = [(1, 14, 14), (3, 16, 16), (1, 8, 8), (3, 5, 9), (1, 2, 3), (3, 1, 1)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 4, 9])
def test_random_images_have_the_shape_lie_in_the_range_and_repeat(shape, n):
    x = random_images(n, shape, generator=seeded(3))
    assert x.shape == (n, *shape) and 0 <= x.min() and x.max() <= 1
    assert torch.equal(x, random_images(n, shape, generator=seeded(3)))
    assert not torch.equal(x, random_images(n, shape, generator=seeded(4)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(1, 2, 3), (3, 2, 2), (1, 4, 4)])
def test_a_linear_map_with_more_outputs_than_pixels_is_read_back(shape, seed):
    pixels = torch.Size(shape).numel()
    A = torch.randn(pixels, 4 * pixels, generator=seeded(seed))
    decode = linear_decoder(lambda x: x.flatten(1) @ A + 0.3, shape, like=A, generator=seeded(seed + 1))
    x = random_images(20, shape, generator=seeded(seed + 2))
    assert (decode(x.flatten(1) @ A + 0.3) - x).abs().mean() < 0.02


@pytest.mark.parametrize("data, workers", [("digits", 1), ("mnist-sample", 4), ("photos", 4)])
def test_what_is_read_from_h_is_nearer_to_the_truth_than_grey_for_every_slice(data, workers):
    images = load_images(data, rows=24, seed=1)
    split = GridPartition.for_workers(workers, *images.images.shape[2:])
    model = VFLModel.convolutional(split.part_shapes(images), classes=images.classes, seed=2)
    h = model.representation(0, model.parameters)
    x = split.split(images.images)[0]
    x = x[h(x).detach().square().sum(1) > 0]
    read = linear_decoder(h, x.shape[1:], like=x, generator=seeded())(h(x).detach())
    assert read.dtype == x.dtype and 0 <= read.min() and read.max() <= 1
    errors = [(guess - x).square().flatten(1).mean(1) for guess in (read, torch.full_like(x, 0.5))]
    assert (errors[0] < errors[1]).all() and errors[0].median() < 0.6 * errors[1].median()


def test_a_decoded_start_without_a_step_of_adam_is_inverted():
    images = load_images("digits", rows=16, seed=0)
    model = VFLModel.convolutional([(1, 8, 8)], classes=10, seed=0)
    h = model.representation(0, model.parameters)
    x, rho = invert(h, h(images.images).detach(), (1, 8, 8), attempts=(Attempt("decoded", 0), Attempt("decoded", 40)), generator=seeded())
    assert (rho < 1e-10).all() and (x - images.images).abs().max() < 1e-3
