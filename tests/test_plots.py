import io

import numpy as np
import pytest
import torch
from conftest import smooth_images
from PIL import Image

from cafe_tutorial import plots
from cafe_tutorial.attack import Leak
from cafe_tutorial.data import load_table
from cafe_tutorial.partition import ColumnPartition, GridPartition


def pixels(figure):
    return np.asarray(Image.open(io.BytesIO(figure._repr_png_())))


@pytest.mark.parametrize("channels", [1, 3])
def test_image_rows_show_the_images(channels):
    images = smooth_images(4, channels, 6, 5).images
    tiles = plots._tiles(images)
    assert tiles.shape == (6, 4 * 6 - 1, 4)
    for i in range(4):
        shown = torch.from_numpy(tiles[:, 6 * i : 6 * i + 5, :3]).permute(2, 0, 1)
        assert torch.allclose(shown, images[i].expand(3, 6, 5))
    assert (tiles[:, 5, 3] == 0).all()  # the gap
    shown = pixels(plots.image_rows({"true": images, "recovered": images[:3]}))
    assert shown[..., 3].max() == 255 and shown[0, 0, 3] == 0  # transparent around the images
    with pytest.raises(ValueError, match="at least one row"):
        plots.image_rows({})


def test_every_figure_draws():
    data, table = smooth_images(3, 1, 8, 8), load_table(rows=4)
    yes = torch.ones(3, 2, dtype=torch.bool)
    for source, split in ((data, GridPartition(1, 2)), (table, ColumnPartition.widths([10, 20]))):
        leak = Leak("x", split.split(source.features), source.labels, yes, yes.float(), yes, 1)
        assert pixels(plots.true_beside_recovered(leak, source, split)).std() > 0
    assert pixels(plots.curve([(0, 1.0), (5, 2.0)])).std() > 0


def test_a_figure_needs_no_pyplot():
    import subprocess
    import sys

    code = "import sys, cafe_tutorial.plots as p; p.curve([(0, 1), (1, 2)])._repr_png_(); assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_imports_no_plotting_and_no_data_libraries():
    import subprocess
    import sys

    code = (
        "import sys, cafe_tutorial.attack, cafe_tutorial.data, cafe_tutorial.metrics, cafe_tutorial.protocol\n"
        "heavy = {'matplotlib', 'sklearn', 'skimage', 'mlxtend', 'torchvision', 'ipywidgets', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
