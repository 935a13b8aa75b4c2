import math

import pytest
import torch
from conftest import smooth_images

from cafe_tutorial.attack import Leak
from cafe_tutorial.metrics import psnr, score, ssim
from cafe_tutorial.partition import ColumnPartition, GridPartition


def test_psnr_known_answers():
    true = torch.full((4, 3, 5, 5), 0.5, dtype=torch.float64)
    found = true.clone()
    found[0] += 0.1
    found[1] += 0.01
    found[2] = 7.0  # clipped to 1
    values = psnr(found, true)
    assert torch.allclose(values[:3], torch.tensor([20.0, 40.0, -10 * math.log10(0.25)], dtype=torch.float64))
    assert values[3] == 150.0
    with pytest.raises(ValueError, match="must agree"):
        psnr(true, true[:2])


def test_ssim_known_answers():
    images = smooth_images(3, 3, 9, 9).images
    assert torch.allclose(ssim(images, images), torch.ones(3, dtype=torch.float64))
    flat, other = torch.full((1, 1, 8, 8), 0.2), torch.full((1, 1, 8, 8), 0.6)
    c1 = 0.01**2
    expected = (2 * 0.2 * 0.6 + c1) / (0.2**2 + 0.6**2 + c1)  # luminance alone
    assert abs(float(ssim(flat, other)) - expected) < 1e-6
    assert ssim(images[:, :, :6], images[:, :, :6]).isnan().all()


def leak_of(slices, labels, leaks=None, certified=None):
    shape = (len(labels), len(slices))
    yes = torch.ones(shape, dtype=torch.bool)
    return Leak("test", slices, labels, yes if leaks is None else leaks, torch.zeros(shape), ~yes if certified is None else certified, 1)


def test_score_is_over_slices_that_leak():
    data, split = smooth_images(2, 1, 8, 8), GridPartition(1, 2)
    slices = [s.clone() for s in split.split(data.images * 0.5 + 0.2)]
    data = type(data)(data.images * 0.5 + 0.2, data.labels, data.label_values, "x")
    slices[0][0] += 0.1  # 20 dB
    slices[1][1] = 0
    leaks = torch.tensor([[True, True], [True, False]])
    certified = torch.tensor([[False, True], [True, False]])
    result = score(leak_of(slices, data.labels.flip(0), leaks, certified), data, split)
    summary = result.summary()
    assert result.psnr_slice.shape == (2, 2)
    assert abs(summary["psnr_slice_mean"] - (20 + 150 + 150) / 3) < 1e-4
    assert summary["psnr_slice_median"] == 150 and summary["certified_psnr_min"] == 150
    assert summary["slices_total"] == 4 and summary["slices_not_leaked"] == 1
    assert summary["slices_certified"] == 2 and summary["images_certified"] == 0
    assert summary["label_accuracy"] == float((data.labels.flip(0) == data.labels).double().mean())
    assert abs(float(result.psnr_image[0]) - 10 * math.log10(1 / (0.01 / 2))) < 1e-4
    assert "do not leak" in str(result)


def test_score_of_a_table_and_of_small_images():
    from cafe_tutorial.data import load_table

    table, split = load_table(rows=5), ColumnPartition.widths([10, 20])
    slices = split.split(table.records * 1.1)
    summary = score(leak_of(slices, table.labels), table, split).summary()
    assert summary["psnr_slice_mean"] is None and summary["ssim_mean"] is None and summary["certified_error_max"] is None
    assert abs(summary["relative_error_median"] - 0.1) < 1e-5
    small = smooth_images(3, 1, 6, 6)
    assert score(leak_of([small.images], small.labels), small, GridPartition(1, 1)).summary()["ssim_mean"] is None
    broken = [small.images.clone()]
    broken[0][1, 0, 2, 2] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        score(leak_of(broken, small.labels), small, GridPartition(1, 1))
    nothing = torch.zeros(5, 2, dtype=torch.bool)
    assert "- median" in str(score(leak_of(slices, table.labels, leaks=nothing), table, split))
    with pytest.raises(ValueError, match="leak has slices"):
        score(leak_of([small.images], small.labels), small, GridPartition(1, 2))


def test_a_leak_about_some_rows_is_compared_with_these():
    data = smooth_images(6, 1, 8, 8)
    split, rows = GridPartition(2, 2), torch.tensor([4, 1])
    few = data.take(rows)
    assert torch.equal(few.images, data.images[rows]) and torch.equal(few.take(torch.tensor([1])).row_numbers, torch.tensor([1]))
    yes = torch.ones(2, 4, dtype=torch.bool)
    leak = Leak("test", split.split(few.images), few.labels, yes, torch.zeros(2, 4), yes, 1, numbers=rows)
    result = score(leak, data, split)
    assert result.label_accuracy == 1 and (result.psnr_slice == 150).all()


def test_a_slice_that_was_not_found_does_not_decide_which_row_it_is():
    """Row 0's certified slice identifies it, although its other slices, which are not, are those of row 1."""
    data = smooth_images(rows=2)
    split = GridPartition(2, 2)
    slices = [s.clone() for s in split.split(data.images)]
    for s in slices[1:]:
        s[:] = s.flip(0)
    certified = torch.tensor([[True, False, False, False], [False] * 4])
    leak = Leak("x", [s.flip(0) for s in slices], data.labels.flip(0), torch.ones(2, 4, dtype=torch.bool), torch.zeros(2, 4), certified.flip(0), 1, exchangeable=torch.tensor([0, 0]))
    result = score(leak, data, split)
    assert result.certified[0, 0] and result.psnr_slice[0, 0] == 150 and not (result.certified & (result.psnr_slice < 60)).any()
