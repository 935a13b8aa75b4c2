"""The paper's tables as commands: what each holds, and that an interruption changes nothing but times."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cafe_tutorial.__main__ import main
from cafe_tutorial.defense import fake_gradients
from cafe_tutorial.experiments import command, defenses, order, sweep, tables
from cafe_tutorial.experiments.sweep import Cell, at_rounds, rounds_to, summary, without_times
from cafe_tutorial.options import BASELINES


def run(name, out, *options):
    return main(["experiment", name, "--size", "smoke", "--quiet", "--out", str(out), *options])


@pytest.mark.parametrize("name", [n for n in tables.NAMES if n not in ("table3", "table6", "horizontal", *defenses.TABLES)])
def test_every_table_in_its_smallest_size(name, tmp_path):
    assert run(name, tmp_path / "t.json") == 0
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["experiment"] == name and result["size"] == "smoke" and result["data"] == "digits" and result["seeds"] == [0]
    assert result["command"] == f"cafe-tutorial experiment {name} --size smoke --device auto"
    assert {"date", "versions", "device"} <= set(result) and str(tmp_path) not in (tmp_path / "t.json").read_text()
    assert len(result["cells"]) == len(result["summary"]) > 1
    for cell in result["cells"]:
        assert cell["psnr_slice_mean"] is not None and 0 <= cell["label_accuracy"] <= 1 and cell["seconds"] > 0
        if cell["method"] == "exact":
            assert cell["psnr_slice_median"] > 100 and cell["slices_certified"] > 0.9 * cell["slices_leaking"]
    assert list(tmp_path.iterdir()) == [tmp_path / "t.json"]


@pytest.mark.parametrize("name, methods, count", [("table3", "exact,single-loop", 4), ("table6", "exact,single-loop", 4), ("horizontal", "dlg,idlg,gc,one-round", 12)])
def test_only_some_methods(name, methods, count, tmp_path):
    assert run(name, tmp_path / "t.json", "--methods", methods) == 0
    result = json.loads((tmp_path / "t.json").read_text())
    assert {c["method"] for c in result["cells"]} == set(methods.split(",")) and len(result["cells"]) == count


@pytest.mark.parametrize("name", ["averaging", "defenses", "fakes", "table7", "tradeoff", "trained"])
def test_the_exact_attack_under_every_defence(name, tmp_path, monkeypatch):
    monkeypatch.setattr(fake_gradients, "MEMORY", 2**22)
    monkeypatch.setattr(sys.modules["cafe_tutorial.attack.invert"], "MANY", 4)  # gives up early for so few rows too
    assert run(name, tmp_path / "d.json", "--methods", "exact") == 0
    result = json.loads((tmp_path / "d.json").read_text())
    assert all(c["certified_false"] == 0 for c in result["cells"])
    undefended = [c for c in result["cells"] if c["row"] in ("none", "fake, clip, σ² = 1.1") or name == "trained"]
    assert all(c["psnr_slice_median"] > 100 and c["slices_certified"] > 0.9 * c["slices_leaking"] for c in undefended)
    if name == "fakes":
        plain, clipped = (next(c for c in result["cells"] if c["row"] == row) for row in ("none", "fake, clip, σ² = 1.1"))
        assert plain["psnr_slice_mean"] == pytest.approx(clipped["psnr_slice_mean"], abs=3)  # σ² = 1.1 changes no entry
    if name == "defenses":
        assert {c["psnr_slice_median"] < 60 for c in result["cells"] if "largest" in c["row"] or "ε" in c["row"]} == {True}


def test_training_under_every_defence(tmp_path, monkeypatch):
    monkeypatch.setattr(fake_gradients, "MEMORY", 2**22)
    assert run("learning", tmp_path / "l.json") == 0
    result = json.loads((tmp_path / "l.json").read_text())
    rows = {c["row"]: c for c in result["cells"]}
    assert all(c["curve"][0]["rounds"] == 0 and c["curve"][0]["test_loss"] == rows["none"]["curve"][0]["test_loss"] for c in rows.values())
    assert rows["none"]["training_loss"] < rows["none"]["curve"][0]["training_loss"]
    assert rows["none"]["curve"] != rows["fake, order, σ = 1 rms"]["curve"]
    assert rows["none"]["rows"] == 20 and 0 <= rows["none"]["test_accuracy"] <= 1
    assert run("accuracy", tmp_path / "a.json") == 0
    fewer = json.loads((tmp_path / "a.json").read_text())["cells"]
    assert len(fewer) == 4 and all(c["curve"] == rows[c["row"]]["curve"] for c in fewer)


def test_labels(tmp_path):
    assert run("labels", tmp_path / "l.json", "--seeds", "0,1") == 0
    result = json.loads((tmp_path / "l.json").read_text())
    assert len(result["labels"]) == 4 and all(r["exact"] == 1.0 and 0.7 < r["counts"] <= 1 for r in result["labels"])
    assert run("labels", tmp_path / "l.json", "--methods", "exact") == 2


def test_what_the_order_gives_away_is_scored_slice_by_slice(tmp_path, monkeypatch):
    """With finds put in place of the search: a true slice counts once, those not found are black, a false certificate is counted."""
    def finds(model, view, m, *, seed):
        true = order_views[-1][m][view.indices]
        x = torch.stack([true[0], true[0], torch.rand_like(true[0])])[: 2 if m else 3]
        return SimpleNamespace(x=x, certified=torch.tensor([True, False, False])[: len(x)] if m else torch.tensor([True, False, True]))

    order_views, plain = [], order.parties
    monkeypatch.setattr(order, "find_rows", finds)
    monkeypatch.setattr(order, "parties", lambda options, images: [(s := plain(options, images)), order_views.append(s[0].split(images.features))][0])
    monkeypatch.setattr(fake_gradients, "MEMORY", 2**20)
    assert run("order", tmp_path / "o.json", "--data", "mnist-sample") == 0
    result = json.loads((tmp_path / "o.json").read_text())
    assert result["seed"] == 0 and len(result["settings"]) == len(order.READINGS)
    for row in result["settings"]:
        assert row["slices"] == row["found"] == 8 and row["certified"] >= 4 and row["psnr_median"] < 150
        assert 0 <= row["certified_false"] <= 1 and row["error"] < 1


OPTIONS = ("--seeds", "0,1", "--methods", "exact,single-loop,dlg")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without an interruption."""
    out = tmp_path_factory.mktemp("whole") / "whole.json"
    assert run("table2", out, *OPTIONS) == 0
    return out


@pytest.mark.parametrize("stop_at, cut", [(1, False), (3, False), (3, True)])
def test_an_interrupted_run_goes_on(whole, stop_at, cut, tmp_path, monkeypatch, capsys):
    """Interrupted after any number of attacks, also with the last line cut short: the same JSON, times excepted."""
    parts = tmp_path / "parts.json"
    true, calls = sweep.run_attack, []

    def stopping(attack_options):
        calls.append(attack_options)
        if len(calls) == stop_at + 1:
            raise KeyboardInterrupt
        return true(attack_options)

    def interrupted(cells, what, **rest):
        return sweep.run_cells(cells, what, **{**rest, "attack": stopping})

    monkeypatch.setattr(command, "run_cells", interrupted)
    assert run("table2", parts, *OPTIONS) == 130
    assert f"{stop_at} of 4 attacks are kept in parts.json.unfinished" in capsys.readouterr().err
    record = tmp_path / "parts.json.unfinished"
    assert not parts.exists() and len(record.read_text().splitlines()) == 1 + stop_at
    if cut:
        record.write_text(record.read_text()[:-20])
    calls.clear()
    monkeypatch.setattr(command, "run_cells", lambda cells, what, **rest: sweep.run_cells(cells, what, **{**rest, "attack": lambda o: calls.append(o) or true(o)}))
    assert run("table2", parts, *OPTIONS) == 0
    assert len(calls) == 4 - stop_at + cut  # nothing is done twice but what was cut
    a, b = (json.loads(f.read_text()) for f in (whole, parts))
    assert without_times(a) == without_times(b)
    assert not (tmp_path / "parts.json.unfinished").exists()


def test_an_unfinished_run_with_other_options_is_refused(tmp_path, monkeypatch, capsys):
    out = tmp_path / "t.json"
    kept = '{"experiment": "table2", "size": "paper"}\n{"row": "exact"}\n'
    (tmp_path / "t.json.unfinished").write_text(kept)
    assert run("table2", out) == 2
    told = capsys.readouterr().err
    assert "size='paper' there and 'smoke' here" in told and len(told) < 2000
    assert (tmp_path / "t.json.unfinished").read_text() == kept and not out.exists()
    (tmp_path / "t.json.unfinished").write_text("{ cut")
    assert run("table4", out) == 0


@pytest.mark.parametrize("content", [b"notes of my own\n", b'["a list"]\n', b'{"rows": 3}\n', b"\xff\xfe\n"])
def test_a_foreign_file_in_the_way_is_left_alone(content, tmp_path, capsys):
    (tmp_path / "t.json.unfinished").write_bytes(content)
    assert run("table4", tmp_path / "t.json") == 2
    assert "t.json.unfinished is no unfinished run" in capsys.readouterr().err and (tmp_path / "t.json.unfinished").read_bytes() == content


def test_other_data_under_the_same_name_is_another_run(tmp_path, monkeypatch, capsys):
    images = np.random.default_rng(0).random((12, 6, 6))
    np.savez(tmp_path / "own.npz", images=images, labels=[0, 1] * 6)
    options = ("--data", str(tmp_path / "own.npz"), "--methods", "single-loop")
    true = sweep.run_attack
    monkeypatch.setattr(command, "run_cells", lambda cells, what, **rest: sweep.run_cells(cells, what, **{**rest, "attack": _after(1, true)}))
    assert run("table4", tmp_path / "t.json", *options) == 130
    np.savez(tmp_path / "own.npz", images=images[::-1], labels=[0, 1] * 6)
    assert run("table4", tmp_path / "t.json", *options) == 2
    assert "data_sha256=" in capsys.readouterr().err


def _after(count, true):
    """An attack that is interrupted after so many calls."""
    calls = []

    def attack(options):
        calls.append(options)
        if len(calls) > count:
            raise KeyboardInterrupt
        return true(options)

    return attack


def test_colour_images_take_their_own_preset(tmp_path):
    np.savez(tmp_path / "own.npz", images=np.random.default_rng(0).random((12, 6, 6, 3)), labels=[0, 1] * 6)
    assert run("variants", tmp_path / "t.json", "--data", str(tmp_path / "own.npz")) == 0
    cells = {c["row"]: c["settings"] for c in json.loads((tmp_path / "t.json").read_text())["cells"]}
    assert cells["table 9"]["lr_step3"] == 2e-2 and cells["both, step III at three times its rate"]["lr_step3"] == pytest.approx(6e-2)


def test_what_is_read_off_a_curve():
    curve = [{"rounds": 10 * i, "psnr_slice_mean": float(5 * i)} for i in range(1, 5)]
    assert rounds_to(curve, 5) == 10 and rounds_to(curve, 11) == 30 and rounds_to(curve, 21) is None
    assert at_rounds(curve, 20) == 10.0 and at_rounds(curve, 25) is None


def test_summary_over_seeds():
    def cell(row, psnr, seed):
        return {"row": row, "column": "c", "seed": seed, "psnr_slice_mean": psnr, "psnr_slice_median": None, "label_accuracy": 1.0, "seconds": 1.0, "slices_leaking": 4, "slices_certified": seed}

    table = summary([cell("a", 10.0, 0), cell("b", 1.0, 0), cell("a", 14.0, 2)])
    a, b = table
    assert a["psnr_slice_mean"] == 12.0 and a["psnr_slice_mean_sd"] == pytest.approx(8**0.5) and a["seeds"] == [0, 2] and a["certified_share"] == 0.25
    assert b["psnr_slice_mean_sd"] is None and b["psnr_slice_median"] is None


@pytest.mark.parametrize("name", tables.NAMES)
@pytest.mark.parametrize("size", tables.SIZES)
def test_what_the_tables_hold(name, size):
    cells = tables.cells(name, size=size, data="mnist-sample", preset="mnist", seeds=None, methods=None)
    own = tables.SIZES[size]
    assert len({(c.row, c.column, c.seed) for c in cells}) == len(cells)
    for cell in cells:
        slow = cell.options["method"] in tables.SLOW or name in defenses.TABLES and cell.options["method"] != "exact"
        assert not slow or cell.seed == 0
        same = [c for c in cells if (c.row, c.column) == (cell.row, cell.column)]
        assert len(same) == (1 if slow else own.seeds)
        assert cell.options["rows"] >= cell.options["batch_size"]
    methods = {c.options["method"] for c in cells}
    assert name != "table2" or methods == {"exact", "few-rounds", "one-round", "single-loop", *BASELINES} - {"idlg"}


def test_seeds_are_those_of_the_fast_methods():
    cells = tables.cells("table2", size="smoke", data="digits", preset="mnist", seeds=(5, 7), methods=("exact", "single-loop"))
    assert [(c.options["method"], c.seed) for c in cells] == [("exact", 5), ("exact", 7), ("single-loop", 5)]
    assert Cell("r", "c", 0, {}).levels == ()


@pytest.mark.parametrize(
    "options, message",
    [
        (["table2", "--methods", "exact,magic"], "methods: 'magic' is not in table2; it has exact"),
        (["table2", "--seed", "3"], "use seeds=3"),
        (["certificates", "--size", "laptop"], "size='laptop' is for table2"),
        (["speed", "--methods", "exact"], "methods=('exact',) is for table2"),
        (["table2", "--seeds", "0,1,0"], "seeds=(0, 1, 0) must be different"),
        (["table2", "--data", "breast-cancer"], "data='breast-cancer' is a table"),
        (["table2", "--data", ""], "data=''"),
        (["certificates", "--data", "digits"], "data='digits' is for"),
        (["table2", "--seeds", "-1"], "seed=-1 must be from 0"),
        (["table2", "--data", "no-such-file.npz"], "no-such-file.npz"),
        (["yale"], "data: yale is about faces"),
        (["table2", "--preset", "mnits"], "preset='mnits' must be one of"),
    ],
)
def test_bad_options_are_named_before_the_work(options, message, tmp_path, capsys):
    assert main(["experiment", *options, "--quiet", "--out", str(tmp_path / "new" / "o.json")]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_result_that_cannot_be_written_is_told_before_the_work(tmp_path, capsys):
    (tmp_path / "a.json.unfinished").mkdir()
    for name, message in (("a.json", "a.json.unfinished is a folder"), ("b" * 250, "too long a name")):
        assert main(["experiment", "table4", "--size", "smoke", "--quiet", "--out", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
