"""Results as text: what stands beside what, and that it fits a page."""

import shlex

import pytest

from cafe_tutorial import results
from cafe_tutorial.experiments.paper import PAPER, TABLE10
from cafe_tutorial.experiments.show import WIDE, beside, command_lines, grid, learned, measured, scored, shields
from cafe_tutorial.experiments.tables import NAMES

TABLES = [name for name in results.names() if results.load(name).get("experiment") in NAMES]


@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_the_page(name):
    result = results.load(name)
    for text in (grid(result), *([beside(result)] if result["experiment"] != "averaging" else [])):  # its places have long names
        assert max(map(len, text.splitlines())) <= WIDE
    assert result["command"] in measured(result).replace(" \\\n   ", "") and result["date"] in measured(result)
    assert max(map(len, measured(result).splitlines())) <= WIDE


@pytest.mark.parametrize("name", TABLES)
def test_every_value_is_shown_once(name):
    result = results.load(name)
    numbers = grid(result).split()
    for entry in (e for e in result["summary"] if e["psnr_slice_mean"] is not None):
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


def test_a_score_on_a_line_tells_of_false_certificates():
    report = {"psnr_slice_median": 98.76, "slices_certified": 7, "slices_leaking": 8, "certified_false": 0, "label_accuracy": 0.75}
    assert scored(report).strip() == "98.8 dB, 7 of 8 certified, labels 75%"
    assert "7 of 8 certified (2 falsely)" in scored({**report, "certified_false": 2})


def _training(row, losses, test, column="training"):
    curve = [{"rounds": 10 * i, "training_loss": v} for i, v in enumerate(losses)]
    return {"row": row, "column": column, "method": "training", "curve": curve, "training_loss": losses[-1], "training_accuracy": test, "test_accuracy": test, "certified_false": 0}


def test_a_training_that_diverged_is_shown_as_far_as_it_went():
    result = {"cells": [_training("none", [2.3, 1.0, 0.5], 0.9), _training("much noise", [2.3, None], None), _training("more", [2.3, 5e12, 7e13], 0.1)]}
    lines = learned(result).splitlines()
    assert lines[1].split() == ["none", "2.30", "1.00", "0.50", "90%", "90%"]
    assert lines[2].split() == ["much", "noise", "2.30", "-", "-", "-", "-"] and lines[3].split()[2] == "5e+12"
    assert learned(result, ["more"]).splitlines()[1:] == lines[3:] and len({len(line) for line in lines}) == 1


def test_a_defence_on_a_line_takes_the_better_rate_and_counts_false_certificates():
    def attack(row, column, psnr):
        return {"row": row, "column": column, "method": column, "psnr_slice_mean": psnr, "certified_share": 0.25, "label_accuracy": 1.0, "certified_false": 1}

    attacks = {"cells": [attack("noise", "exact", 30.0), attack("noise", "one-round", 20.0)]}
    attacks["summary"], slow = attacks["cells"], {"summary": [attack("noise", "single-loop", 10.0)], "cells": []}
    learning = {"cells": [_training("noise, rate 0.1", [2.3, None], 0.2), _training("noise, rate 0.01", [2.3, 1.0], 0.7)]}
    assert shields(attacks, slow, learning).splitlines()[1].split() == ["noise", "30.0", "20.0", "10.0", "25%", "2", "100%", "70%"]
