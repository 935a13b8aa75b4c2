import pytest
import torch
from conftest import image_case, smooth_images, table_case

from cafe_tutorial.attack.label_counts import label_counts
from cafe_tutorial.model import VFLModel
from cafe_tutorial.protocol import VerticalFL


@pytest.mark.parametrize("batch_size", [1, 2, 7, 12])
@pytest.mark.parametrize("seed", [0, 1])
def test_counts_of_a_fresh_model(batch_size, seed):
    """Many rows a class, more rows than classes: the counts add up, and are right where all p_n are nearly alike."""
    data = smooth_images(12, 1, 6, 6, classes=4, seed=seed)
    _, _, vfl = image_case(data, (1, 2), batch_size=batch_size, seed=seed)
    for view in vfl.rounds(4):
        counts = label_counts(view)
        assert counts.sum() == batch_size and (counts >= 0).all() and counts.dtype == torch.int64
        assert torch.equal(counts, data.labels[view.indices].bincount(minlength=4))


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_exact_where_the_assumption_holds(seed):
    """Equal records, however sure the model: every prototype is the head's one input."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
    model = VFLModel.mlp([(4,)], classes=4, seed=seed)
    model.parameters = {k: 4 * v for k, v in model.parameters.items()}
    vfl = VerticalFL(model, [torch.randn(1, 4, generator=g, dtype=torch.float64).expand(10, 4)], labels, batch_size=10, dtype=torch.float64)
    assert label_counts(next(vfl.rounds(1))).tolist() == [3, 2, 5, 0]


def test_one_class_only():
    *_, vfl = table_case(rows=5, batch_size=5)
    vfl._labels.fill_(1)
    assert label_counts(next(vfl.rounds(1))).tolist() == [0, 5]
