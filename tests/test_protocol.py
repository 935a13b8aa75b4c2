import pytest
import torch
import torch.nn.functional as F
from conftest import image_case, smooth_images, table_case, true_gradients

from cafe_tutorial.protocol import VerticalFL, index_batches


class Central(torch.nn.Module):
    """The same network as one ordinary module that sees whole rows."""

    def __init__(self, model):
        super().__init__()
        import copy

        self.bottoms = torch.nn.ModuleList([copy.deepcopy(model.template(m)) for m in range(model.workers)])
        self.head = torch.nn.Linear(model.parameters["head.weight"].shape[1], model.classes)
        for m, bottom in enumerate(self.bottoms):
            bottom.load_state_dict(model.of_worker(model.parameters, m))
        self.head.load_state_dict({k: model.parameters[f"head.{k}"] for k in ("weight", "bias")})
        self.double()

    def forward(self, parts):
        return self.head(torch.cat([bottom(x)[1] for bottom, x in zip(self.bottoms, parts)], 1))


@pytest.mark.parametrize("kind", ["grey", "colour", "one worker", "table"])
def test_gradients_are_the_central_ones(kind):
    if kind == "table":
        parts, labels, model, vfl = table_case()
    else:
        data = smooth_images(9, 3 if kind == "colour" else 1, 6, 8)
        split, model, vfl = image_case(data, (1, 1) if kind == "one worker" else (2, 2), dtype=torch.float64)
        parts, labels = [p.double() for p in split.split(data.images)], data.labels
    central = Central(model)
    for view in vfl.rounds(3):
        loss = F.cross_entropy(central([p[view.indices] for p in parts]), labels[view.indices])
        central.zero_grad()
        loss.backward()
        for m, bottom in enumerate(central.bottoms):
            mine = model.of_worker(view.gradients, m)
            for name, p in bottom.named_parameters():
                assert torch.allclose(mine[name], p.grad, rtol=1e-10, atol=1e-14), (m, name)
        for name, p in central.head.named_parameters():
            assert torch.allclose(view.gradients[f"head.{name}"], p.grad, rtol=1e-10, atol=1e-14)


def batches(schedule, rows, size, count, seed=0):
    stream = index_batches(schedule, rows, size, generator=torch.Generator().manual_seed(seed))
    return [next(stream) for _ in range(count)]


def rank(found, rows):
    A = torch.zeros(len(found), rows, dtype=torch.float64)
    for t, s in enumerate(found):
        A[t, s] = 1
    return int(torch.linalg.matrix_rank(A))


@pytest.mark.parametrize("rows", [1, 2, 7, 12])
@pytest.mark.parametrize("schedule", ["random", "epochs", "fixed"])
def test_schedules(rows, schedule):
    for size in range(1, rows + 1):
        per_epoch = -(-rows // size)
        found = batches(schedule, rows, size, 6 * per_epoch)
        assert all(len(set(s.tolist())) == len(s) and s.max() < rows for s in found)
        if schedule == "random":
            assert all(len(s) == size for s in found)
        else:
            for e in range(6):
                epoch = torch.cat(found[e * per_epoch : (e + 1) * per_epoch])
                assert sorted(epoch.tolist()) == list(range(rows))
        if schedule == "fixed":
            assert all(torch.equal(a, b) for a, b in zip(found, found[per_epoch:]))
            assert rank(found, rows) == per_epoch
        again = batches(schedule, rows, size, 6 * per_epoch)
        assert all(torch.equal(a, b) for a, b in zip(found, again))


@pytest.mark.parametrize(("rows", "size"), [(40, 5), (40, 8), (33, 8), (50, 7)])
def test_rank_of_shuffled_epochs(rows, size):
    per_epoch = -(-rows // size)
    for epochs in (1, 2, 3, 4):
        expected = min(rows, epochs * (per_epoch - 1) + 1)
        assert rank(batches("epochs", rows, size, epochs * per_epoch), rows) == expected


@pytest.mark.parametrize("size", [2, 5, 20, 39])
def test_rank_of_random_subsets_reaches_all_rows(size):
    assert rank(batches("random", 40, size, 400), 40) == 40
    assert rank(batches("random", 40, size, 39), 40) <= 39
    assert rank(batches("random", 40, 40, 50), 40) == 1


def test_fixed_and_trained_parameters():
    *_, model, vfl = table_case()
    views = list(vfl.rounds(3))
    assert views[0].parameters is views[2].parameters and [v.round for v in views] == [0, 1, 2]
    assert all(torch.equal(v, model.parameters[k].double()) for k, v in views[0].parameters.items())

    parts, labels, model, trained = table_case(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    before, _ = trained.evaluate()
    first = next(iter(trained.rounds(1)))
    second = next(iter(trained.rounds(1)))
    for name, value in first.parameters.items():
        assert torch.allclose(second.parameters[name], value - 0.1 * first.gradients[name], atol=1e-15)
    assert all(torch.equal(v, model.parameters[k].double()) for k, v in first.parameters.items())
    for _ in trained.rounds(100):
        pass
    after, accuracy = trained.evaluate(parts, labels)
    assert after < before and accuracy > 0.5


def test_views_carry_no_graph_and_repeat_from_the_seed():
    runs = []
    for _ in range(2):
        *_, vfl = table_case(seed=5, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
        runs.append(list(vfl.rounds(4)))
    for a, b in zip(*runs):
        assert torch.equal(a.indices, b.indices)
        for name in a.gradients:
            assert not a.gradients[name].requires_grad and not a.parameters[name].requires_grad
            assert torch.equal(a.gradients[name], b.gradients[name]) and torch.equal(a.parameters[name], b.parameters[name])


def test_errors():
    parts, labels, model, _ = table_case(rows=6)
    for size in (0, 7, -1, 2.0, True):
        with pytest.raises(ValueError, match="batch_size=.*from 1 to 6"):
            VerticalFL(model, parts, labels, batch_size=size)
    with pytest.raises(ValueError, match="schedule='daily' must be one of random, epochs, fixed"):
        VerticalFL(model, parts, labels, batch_size=2, schedule="daily")
    with pytest.raises(ValueError, match="2 tensors, the model has 3 workers"):
        VerticalFL(model, parts[:2], labels, batch_size=2)
    with pytest.raises(ValueError, match="rows"):
        VerticalFL(model, parts, labels[:3], batch_size=2)
    with pytest.raises(ValueError, match="from 0 to 1"):
        VerticalFL(model, parts, labels + 5, batch_size=2)


@pytest.mark.parametrize("kind", ["images", "table"])
def test_rounds_without_the_layers_below_show_the_same_gradients(kind):
    whole, above = (
        (image_case(smooth_images(), dtype=torch.float64, below=b)[-1] if kind == "images" else table_case(below=b)[-1]) for b in (True, False)
    )
    for a, b in zip(whole.rounds(5), above.rounds(5)):
        assert set(b.gradients) == {k for k in a.gradients if ".representation." not in k} and set(a.parameters) == set(b.parameters)
        assert all(torch.allclose(a.gradients[k], b.gradients[k], rtol=1e-9, atol=1e-15) for k in b.gradients)
    for kept, computed in zip(true_gradients(above), true_gradients(whole)):
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-15) for a, b in zip(kept, computed))


def test_only_the_layers_above_can_train_without_gradients_below():
    data = smooth_images()
    with pytest.raises(ValueError, match="below=False leaves the layers below"):
        image_case(data, below=False, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    _, model, _ = image_case(data)
    places = [i for i, k in enumerate(model.parameters) if ".representation." not in k]
    runs = [image_case(data, below=b, dtype=torch.float64, optimizer=lambda p: torch.optim.SGD([p[i] for i in places], lr=0.1))[-1] for b in (True, False)]
    for a, b in zip(*(vfl.rounds(6) for vfl in runs)):
        assert all(torch.allclose(a.parameters[k], b.parameters[k], atol=1e-12) for k in a.parameters)
    assert not torch.equal(b.parameters["head.weight"], model.parameters["head.weight"].double())
