"""Results as text: what stands beside what, and that it fits a page."""

import shlex

import pytest

from cafe_tutorial import results
from cafe_tutorial.experiments.paper import PAPER, TABLE10
from cafe_tutorial.experiments.show import WIDE, beside, command_lines, grid, measured
from cafe_tutorial.experiments.tables import NAMES

TABLES = [name for name in results.names() if results.load(name).get("experiment") in NAMES]


@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_the_page(name):
    result = results.load(name)
    for text in (beside(result), grid(result)):
        assert max(map(len, text.splitlines())) <= WIDE
    assert result["command"] in measured(result).replace(" \\\n   ", "") and result["date"] in measured(result)
    assert max(map(len, measured(result).splitlines())) <= WIDE


@pytest.mark.parametrize("name", TABLES)
def test_every_value_is_shown_once(name):
    result = results.load(name)
    numbers = grid(result).split()
    for entry in result["summary"]:
        assert f"{entry['psnr_slice_mean']:.1f}" in numbers
    assert len(beside(result).splitlines()) == 1 + len(result["summary"])


@pytest.mark.parametrize("table", PAPER)
def test_the_papers_places_are_those_of_our_tables(table):
    """A value of the paper that no row of ours is named after would never be shown."""
    from cafe_tutorial.experiments.tables import cells

    ours = {(c.row, c.column) for c in cells(table, size="paper", data="mnist-sample", preset="mnist", seeds=None, methods=None)}
    for values in PAPER[table].values():
        assert set(values) <= ours


def test_paper_values_stand_beside_ours():
    result = results.load("table2_mnist_laptop")
    lines = {line[:12].strip(): line for line in beside(result, "mnist").splitlines()}
    assert "7.96" in lines["DLG"] and "43.15" in next(v for k, v in lines.items() if k.startswith("CAFE"))
    assert "7.96" not in beside(result) and all(len(v) == 5 for v in TABLE10.values())


def test_a_long_command_is_broken_between_its_words():
    command = "cafe-tutorial experiment table2 --size laptop --data some_images_with_a_long_name.npz --methods single-loop,exact,few-rounds"
    text = command_lines({"command": command})
    assert max(map(len, text.splitlines())) <= WIDE and shlex.split(text.replace("\\\n", "")) == shlex.split(command) and "\n" in text
