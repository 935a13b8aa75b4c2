import pytest
import torch

from cafe_tutorial.partition import ColumnPartition, GridPartition


@pytest.mark.parametrize("workers", range(1, 17))
@pytest.mark.parametrize("channels", [1, 3])
def test_grid_round_trip(workers, channels):
    height, width = 16 * 9 * 5, 7 * 11 * 13  # every number to 16 divides their product
    grid = GridPartition.for_workers(workers, height, width)
    images = torch.rand(2, channels, 2 * grid.rows, 3 * grid.cols)
    parts = grid.split(images)
    assert len(parts) == workers and {tuple(p.shape[1:]) for p in parts} == set(grid.part_shapes(images))
    assert torch.equal(grid.merge(parts), images)


def test_grid_numbers_tiles_row_by_row():
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    parts = GridPartition(2, 2).split(image)
    assert [p.flatten().tolist() for p in parts] == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert GridPartition.for_workers(4, 28, 28) == GridPartition(2, 2)
    assert GridPartition.for_workers(2, 28, 28).workers == 2


def test_grid_errors():
    with pytest.raises(ValueError, match=r"height 28 .* 3 equal tiles; a height of 27 or 30 would do"):
        GridPartition(3, 1).split(torch.zeros(1, 1, 28, 28))
    with pytest.raises(ValueError, match=r"width 2 .* a width of 5 would do"):
        GridPartition(1, 5).split(torch.zeros(1, 1, 2, 2))
    with pytest.raises(ValueError, match=r"workers=3 .* 28x28 images; these numbers can: 1, 2, 4, 7"):
        GridPartition.for_workers(3, 28, 28)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="rows="):
            GridPartition(bad, 1)
        with pytest.raises(ValueError, match="workers="):
            GridPartition.for_workers(bad, 4, 4)
    with pytest.raises(ValueError, match="ColumnPartition"):
        GridPartition(1, 1).split(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="one shape"):
        GridPartition(1, 2).merge([torch.zeros(1, 1, 2, 2)])


@pytest.mark.parametrize("groups", [[[0]], [[2, 0], [1]], [[4], [3, 1], [0, 2, 5]], [[i] for i in range(16)]])
def test_columns_round_trip(groups):
    split = ColumnPartition(groups)
    records = torch.rand(6, split.columns)
    parts = split.split(records)
    assert [p.shape[1] for p in parts] == [len(g) for g in groups] == [s[0] for s in split.part_shapes(records)]
    assert torch.equal(parts[0], records[:, groups[0]])
    assert torch.equal(split.merge(parts), records)


def test_column_constructors_and_errors():
    assert ColumnPartition.widths([1, 2]).groups == ((0,), (1, 2))
    assert [len(g) for g in ColumnPartition.even(30, 4).groups] == [8, 8, 7, 7]
    for bad in ([], [0, 3], [1.5], [-1]):
        with pytest.raises(ValueError, match="widths="):
            ColumnPartition.widths(bad)
    for bad in ([[0], [0, 1]], [[0, 2]], [[0], []], []):
        with pytest.raises(ValueError, match="groups="):
            ColumnPartition(bad)
    for bad in (0, 6, True):
        with pytest.raises(ValueError, match="from 1 to 5"):
            ColumnPartition.even(5, bad)
    with pytest.raises(ValueError, match="has 4 columns, the groups hold 3"):
        ColumnPartition.widths([1, 2]).split(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="GridPartition"):
        ColumnPartition.widths([1, 2]).split(torch.zeros(2, 1, 3, 3))
    with pytest.raises(ValueError, match="parts have widths"):
        ColumnPartition.widths([1, 2]).merge([torch.zeros(2, 2), torch.zeros(2, 1)])
