"""Small cases made on the spot; no test reads a file that it did not write or touches the network."""

import os

import pytest
import torch
import torch.nn.functional as F

from cafe_tutorial.data import Images
from cafe_tutorial.model import VFLModel
from cafe_tutorial.partition import GridPartition
from cafe_tutorial.protocol import VerticalFL
from cafe_tutorial.reveal import row_gradients as true_gradients  # noqa: F401

if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)  # one core a worker: two that wait for each other's threads are ten times slower


def smooth_images(rows=10, channels=1, height=8, width=8, classes=3, seed=0):
    """Random smooth images with random labels."""
    g = torch.Generator().manual_seed(seed)
    low = torch.rand(rows, channels, 3, 3, generator=g)
    images = F.interpolate(low, size=(height, width), mode="bicubic", align_corners=True).clamp(0, 1)
    return Images(images, torch.randint(classes, (rows,), generator=g), tuple(range(classes)), "smooth")


def image_case(data, grid=(2, 2), *, batch_size=3, d2=32, seed=0, dtype=torch.float32, model_options=None, **options):
    """Partition, model and running protocol for an image set."""
    split = GridPartition(*grid)
    model = VFLModel.convolutional(split.part_shapes(data), classes=data.classes, d2=d2, seed=seed, **(model_options or {}))
    vfl = VerticalFL(model, split.split(data.images), data.labels, batch_size=batch_size, seed=seed, dtype=dtype, **options)
    return split, model, vfl


def table_case(rows=20, widths=(2, 3, 4), classes=2, *, batch_size=4, d2=32, seed=0, dtype=torch.float64, **options):
    """Parts, model and running protocol for a random table."""
    g = torch.Generator().manual_seed(seed)
    parts = [torch.randn(rows, w, generator=g, dtype=torch.float64) for w in widths]
    labels = torch.randint(classes, (rows,), generator=g)
    model = VFLModel.mlp([(w,) for w in widths], classes=classes, d2=d2, seed=seed)
    return parts, labels, model, VerticalFL(model, parts, labels, batch_size=batch_size, seed=seed, dtype=dtype, **options)


@pytest.fixture
def digits():
    from cafe_tutorial.data import load_images

    return load_images("digits", rows=12, seed=1)
