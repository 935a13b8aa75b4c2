"""An attack object cannot reach private data: no tensor it holds shares memory with it, nothing leads to it."""

import pytest
import torch
from conftest import image_case, smooth_images, table_case

from cafe_tutorial.attack import OBJECTIVES, ExactCAFE, FewRoundsCAFE, MatchingAttack, NestedLoopsCAFE, OneRoundCAFE, SingleLoopCAFE
from cafe_tutorial.data import Images
from cafe_tutorial.protocol import VerticalFL


def reachable(start):
    """Every object that attributes, containers, closures and bound methods lead to."""
    seen, queue = {}, [start]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type)):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, dict):
            queue += [*thing.keys(), *thing.values()]
        elif isinstance(thing, (list, tuple, set, frozenset)):
            queue += list(thing)
        elif isinstance(thing, torch.Tensor):
            queue += [thing.grad_fn, thing._base]
        else:
            queue += [getattr(thing, "__self__", None), *(c.cell_contents for c in getattr(thing, "__closure__", None) or ())]
            queue += list(getattr(thing, "__dict__", {}).values())
    return list(seen.values())


NESTED = lambda m, rows: NestedLoopsCAFE(m, rows=rows, iterations=2)  # noqa: E731
ONE_ROUND = lambda m, rows: OneRoundCAFE(m)  # noqa: E731
MATCHING = [lambda m, rows, n=n: MatchingAttack(m, rows=rows, objective=n, rounds=40) for n in OBJECTIVES if n not in ("bn", "idlg")]
KINDS = [(make, kind) for make in (ExactCAFE, FewRoundsCAFE, SingleLoopCAFE, NESTED, *MATCHING) for kind in ("images", "table")]


@pytest.mark.parametrize("make, kind", [*KINDS, (ONE_ROUND, "images")])
def test_nothing_leads_from_an_attack_to_the_data(make, kind):
    if kind == "images":
        data = smooth_images(6, 1, 4, 4)
        _, model, vfl = image_case(data, (1, 2), batch_size=2)
        private = [data.images, data.labels, *vfl._stacked, vfl._labels]
    else:
        parts, labels, model, vfl = table_case(rows=6, batch_size=2, dtype=torch.float32)
        private = [*parts, labels, *vfl._stacked, vfl._labels]
    attack = make(model, rows=6)
    for view in vfl.rounds(1 if make is ONE_ROUND else 40):
        attack.observe(view)
    attack.solve()
    found = reachable(attack)
    tensors = [t for t in found if isinstance(t, torch.Tensor)]
    assert len(tensors) > 10
    assert not {t.untyped_storage().data_ptr() for t in tensors} & {p.untyped_storage().data_ptr() for p in private}
    assert not any(isinstance(t, (VerticalFL, Images)) for t in found)
    assert not any(t.grad_fn for t in tensors)
    known = reachable(vfl)  # the search itself would see them
    assert any(t is vfl._labels for t in known)


MATCHES = [lambda m, n=n: MatchingAttack(m, rows=8, objective=n, rounds=12) for n in OBJECTIVES if n not in ("bn", "idlg")]


@pytest.mark.parametrize("make", [lambda m: ExactCAFE(m, rows=8), lambda m: FewRoundsCAFE(m, rows=8), OneRoundCAFE, *MATCHES])
def test_an_attack_does_not_depend_on_anything_but_views_and_model(make):
    """The same views give the same leak when every private tensor has been overwritten."""
    leaks = []
    for wipe in (False, True):
        _, model, vfl = image_case(smooth_images(8, 1, 6, 6), (1, 2), batch_size=2, schedule="epochs")
        views = list(vfl.rounds(2 if make is OneRoundCAFE else 12))
        if wipe:
            for private in (*vfl.parts, *vfl._stacked, vfl._labels):
                private.zero_()
        attack = make(model)
        for view in views:
            attack.observe(view)
        leaks.append(attack.solve())
    assert all(torch.equal(a, b) for a, b in zip(leaks[0].slices, leaks[1].slices))
    assert torch.equal(leaks[0].labels, leaks[1].labels)


def test_published_statistics_are_numbers_a_channel():
    """What the BN baseline is given beyond the rounds: two numbers a channel and worker, sharing no memory with the rows."""
    data = smooth_images(6, 1, 4, 4)
    _, _, vfl = image_case(data, (1, 2), batch_size=2)
    given = [v for group in vfl.statistics() for layer in group for v in layer]
    assert [tuple(v.shape) for v in given] == [(2, 64), (2, 64), (2, 128), (2, 128)] and not any(v.requires_grad for v in given)
    assert not {v.untyped_storage().data_ptr() for v in given} & {x.untyped_storage().data_ptr() for x in vfl._stacked}


@pytest.mark.parametrize("name, batch_size", [("bn", 2), ("idlg", 1)])
def test_the_other_baselines_depend_on_views_model_and_statistics_alone(name, batch_size):
    leaks = []
    for wipe in (False, True):
        _, model, vfl = image_case(smooth_images(8, 1, 6, 6), (1, 2), batch_size=batch_size, schedule="epochs")
        views, statistics = list(vfl.rounds(12)), vfl.statistics() if name == "bn" else None
        if wipe:
            for private in (*vfl.parts, *vfl._stacked, vfl._labels):
                private.zero_()
        attack = MatchingAttack(model, rows=8, objective=name, rounds=12, statistics=statistics)
        for view in views:
            attack.observe(view)
        leaks.append(attack.solve())
    assert all(torch.equal(a, b) for a, b in zip(leaks[0].slices, leaks[1].slices)) and torch.equal(leaks[0].labels, leaks[1].labels)
    private = {x.untyped_storage().data_ptr() for x in vfl._stacked}
    assert not any(isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in private for t in reachable(attack))
