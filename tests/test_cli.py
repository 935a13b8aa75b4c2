import json

import numpy as np
import pytest

from cafe_tutorial import run
from cafe_tutorial.__main__ import main

SMALL = ["attack", "--data", "digits", "--rows", "10", "--batch-size", "3", "--d2", "32", "--quiet"]
KEYS = set(
    "method data data_sha256 rows workers batch_size rounds seconds psnr_slice_mean psnr_slice_median psnr_image_median ssim_mean label_accuracy "
    "slices_total slices_not_leaked slices_certified images_certified device seed versions".split()
)


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def test_attack_writes_report_leak_and_picture(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert main([*SMALL, "--out", str(out)]) == 0
    report = report_of(out)
    assert report.keys() >= KEYS and report["method"] == "exact" and report["data"] == "digits" and report["workers"] == 4
    assert report["label_accuracy"] == 1.0 and report["slices_total"] == 40 and report["data_sha256"] is None
    assert report["certified_psnr_min"] > 60
    with np.load(out / "leak.npz") as leak:
        assert leak["recovered"].shape == (10, 1, 8, 8) and leak["certified"].sum() == report["slices_certified"]
    assert (out / "leak.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in out.iterdir()) == ["leak.npz", "leak.png", "report.json"]
    assert "digits" in capsys.readouterr().out


def test_the_same_command_gives_the_same_leak(tmp_path):
    for name in "ab":
        assert main([*SMALL, "--out", str(tmp_path / name)]) == 0
    first, second = (np.load(tmp_path / n / "leak.npz") for n in "ab")
    assert all(np.array_equal(first[k], second[k], equal_nan=first[k].dtype.kind == "f") for k in first.files)


def test_your_own_file_is_named_by_name_and_hash(tmp_path):
    np.savez(tmp_path / "mine.npz", images=np.random.default_rng(0).random((6, 8, 8)), labels=[3, 3, 7, 7, 3, 7])
    assert main(["attack", "--data", str(tmp_path / "mine.npz"), "--batch-size", "2", "--quiet", "--out", str(tmp_path / "o")]) == 0
    report = report_of(tmp_path / "o")
    assert report["data"] == "mine.npz" and len(report["data_sha256"]) == 64 and report["rows"] == 6
    assert str(tmp_path) not in (tmp_path / "o" / "report.json").read_text()
    with np.load(tmp_path / "o" / "leak.npz") as leak:
        assert leak["label_values"][leak["labels"]].tolist() == [3, 3, 7, 7, 3, 7]


@pytest.mark.parametrize("extra", [["--columns", "5,10,15"], ["--workers", "16"], [], ["--pretrain", "30"]])
def test_table(tmp_path, extra):
    assert main(["attack", "--data", "breast-cancer", "--rows", "40", "--batch-size", "8", "--quiet", "--out", str(tmp_path / "o"), *extra]) == 0
    report = report_of(tmp_path / "o")
    assert report["psnr_slice_mean"] is None and report["certified_error_max"] < 1e-3
    assert report["workers"] == (16 if "16" in extra else 3)
    with np.load(tmp_path / "o" / "leak.npz") as leak:
        assert leak["recovered_original_units"].shape == (40, 30)


@pytest.mark.parametrize("method", ["single-loop", "nested-loops"])
def test_iterative_methods_record_their_curve(tmp_path, method):
    options = ["--method", method, "--rounds", "4", "--curve", "2", "--set", "gamma=0", "--set", "switch_step2=none", "--learning-rate", "1e-6"]
    assert main([*SMALL, *options, "--out", str(tmp_path / "o")]) == 0
    report = report_of(tmp_path / "o")
    total = 12 if method == "nested-loops" else 4
    assert report["rounds"] == total and [p["rounds"] for p in report["curve"]] == list(range(2, total + 1, 2))
    assert report["settings"]["gamma"] == 0 and report["slices_certified"] == 0


BAD = {
    "unknown set": (["--data", "mnist-simple"], "neither a known set"),
    "too many rows": (["--rows", "99999"], "rows=99999 must be a whole number from 1 to 1,797"),
    "no rows": (["--rows", "0"], "rows=0"),
    "workers that do not divide": (["--workers", "3"], "these numbers can: 1, 2, 4"),
    "no workers": (["--workers", "0"], "workers=0"),
    "batch above rows": (["--batch-size", "11"], "batch_size=11 must be a whole number from 1 to 10"),
    "no batch": (["--batch-size", "0"], "batch_size=0"),
    "K = N": (["--batch-size", "10"], "K = N"),
    "fixed batches": (["--schedule", "fixed"], "fixed batches repeat"),
    "too few rounds": (["--rounds", "6"], "at least 4 more rounds"),
    "no rounds": (["--rounds", "0"], "rounds=0 must be at least 1"),
    "no first layer": (["--d2", "0"], "d2=0"),
    "columns of images": (["--columns", "3,5"], "is for tables"),
    "columns that do not add up": (["--data", "breast-cancer", "--columns", "3,5"], "has 30 columns, the groups hold 8"),
    "columns against workers": (["--data", "breast-cancer", "--columns", "10,20", "--workers", "3"], "disagree"),
    "unknown hyperparameter": (["--method", "single-loop", "--set", "delta=1"], "'delta' is not a hyperparameter"),
    "negative weight": (["--method", "single-loop", "--set", "gamma=-1"], "gamma=-1.0 must be a number, and not negative"),
    "no number": (["--method", "single-loop", "--set", "gamma=none"], "gamma=None must be a number"),
    "not finite": (["--method", "single-loop", "--set", "xi=inf"], "xi=inf must be a number"),
    "no switch": (["--method", "single-loop", "--set", "global_step_count=3"], "must be true or false"),
    "divergence": (["--method", "single-loop", "--set", "lr_step1=1e30"], "diverged in round"),
    "learning rate": (["--learning-rate", "-1"], "learning_rate=-1"),
    "negative seed": (["--seed", "-1"], "seed=-1"),
    "negative curve": (["--method", "single-loop", "--curve", "-5"], "curve=-5"),
    "curve of exact": (["--curve", "5"], "curve is for the paper's schedules (single-loop, nested-loops) and the baselines"),
    "preset of exact": (["--preset", "yale"], "preset is for the paper's schedules (single-loop, nested-loops); method='exact'"),
    "huge seed": (["--seed", str(2**64)], "must be from 0 to 4294967295"),
    "huge first layer": (["--d2", str(10**20)], "d2="),
    "more workers than pixels": (["--workers", "2000000011"], "these numbers can"),
    "no data": (["--data", ""], "neither a known set"),
    "negative pretrain": (["--pretrain", "-1"], "pretrain=-1"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input(tmp_path, capsys, kind):
    arguments, message = BAD[kind]
    assert main([*SMALL, "--out", str(tmp_path / "o"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not (tmp_path / "o").exists()


@pytest.mark.parametrize("arguments", [["--method", "dgl"], ["--network", "deep"], ["--schedule", "daily"], ["--preset", "svhn"], ["--columns", "a,b"], ["--set", "gamma"], ["--device", "tpu"], ["--rows", "many"]])
def test_bad_choices_are_refused_by_the_parser(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main([*SMALL, *arguments])
    assert stop.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_cuda_without_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*SMALL, "--device", "cuda", "--out", str(tmp_path / "o")]) == 2
    assert "torch sees no CUDA GPU" in capsys.readouterr().err


def test_hopeless_runs_are_refused_before_the_long_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "pretrain", lambda *a: pytest.fail("training began"))
    for extra in (["--batch-size", "10"], ["--rounds", "9"], ["--schedule", "fixed"]):
        assert main([*SMALL, "--pretrain", "50", *extra, "--out", str(tmp_path / "o")]) == 2
    assert "at least 1 more rounds" in capsys.readouterr().err


def test_one_class(tmp_path, capsys):
    np.savez(tmp_path / "one.npz", images=np.zeros((4, 4, 4)), labels=[3, 3, 3, 3])
    assert main(["attack", "--data", str(tmp_path / "one.npz"), "--quiet", "--out", str(tmp_path / "o")]) == 2
    assert "single class" in capsys.readouterr().err


def test_a_rate_that_diverges_is_noted_and_breaks_nothing(tmp_path):
    options = ["--data", "breast-cancer", "--rows", "100", "--batch-size", "60", "--method", "single-loop", "--rounds", "6", "--curve", "3"]
    assert main(["attack", *options, "--set", "lr_step1=0.02", "--quiet", "--out", str(tmp_path / "o")]) == 0
    report = report_of(tmp_path / "o")
    assert any("cannot converge" in note for note in report["notes"]) and report["curve"][0]["relative_error_median"] > 0


def test_a_signal_to_end_ends_cleanly(tmp_path):
    import signal
    import subprocess
    import sys

    command = [sys.executable, "-m", "cafe_tutorial", "attack", "--method", "single-loop", "--rows", "40", "--curve", "1", "--out", str(tmp_path / "o")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while "single-loop" not in (line := process.stderr.read(40)):
        assert line, "ended before it began"
    process.send_signal(signal.SIGTERM)
    assert "nothing was written" in process.communicate(timeout=60)[1]
    assert process.returncode == 130 and not (tmp_path / "o").exists()


def test_out_that_holds_a_folder_of_a_files_name_or_leads_nowhere(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "run_attack", lambda options: pytest.fail("the long work began"))
    (tmp_path / "o" / "leak.png").mkdir(parents=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    for out in (tmp_path / "o", tmp_path / "dangling", tmp_path / ("a" * 300), ""):
        assert main([*SMALL, "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("out=") == 4
    assert main(["experiment", "speed", "--out", str(tmp_path)]) == 2


def test_out_that_cannot_be_a_folder(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(run, "run_attack", lambda options: pytest.fail("the long work began"))
    for out in ("file", "file/below"):
        assert main([*SMALL, "--out", str(tmp_path / out)]) == 2
        assert "cannot be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("where", ["attack", "picture"])
@pytest.mark.parametrize("earlier", [True, False])
def test_an_interrupted_run_leaves_no_half_written_report(tmp_path, capsys, monkeypatch, where, earlier):
    out = tmp_path / "o"
    if earlier:
        assert main([*SMALL, "--out", str(out)]) == 0
        before = {p.name: p.read_bytes() for p in out.iterdir()}

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    target = "cafe_tutorial.attack.exact.ExactCAFE.solve" if where == "attack" else "cafe_tutorial.plots.true_beside_recovered"
    monkeypatch.setattr(target, interrupt)
    assert main([*SMALL, "--out", str(out)]) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before if earlier else not any(out.glob("*")) if out.exists() else True


def test_doctor_and_help(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "torch" in text and "device" in text and "mnist-sample" in text and "cifar10" in text
    for arguments in (["--help"], ["attack", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0 and "examples:" in capsys.readouterr().out


def test_the_report_names_its_command_without_paths(tmp_path):
    np.savez(tmp_path / "mine.npz", images=np.random.default_rng(0).random((6, 4, 4)), labels=[0, 1] * 3)
    options = ["--data", str(tmp_path / "mine.npz"), "--batch-size", "2", "--method", "single-loop", "--rounds", "2", "--set", "gamma=0", "--double-softmax"]
    assert main(["attack", *options, "--quiet", "--out", str(tmp_path / "o")]) == 0
    expected = "cafe-tutorial attack --data mine.npz --double-softmax --batch-size 2 --method single-loop --rounds 2 --set gamma=0.0"
    assert report_of(tmp_path / "o")["command"] == expected


@pytest.mark.parametrize("method", ["dlg", "cosine", "sapag", "bn", "gc"])
def test_a_baseline_from_the_command_line(method, tmp_path):
    assert main(["attack", "--data", "digits", "--rows", "6", "--batch-size", "2", "--method", method, "--rounds", "8", "--curve", "4", "--quiet", "--out", str(tmp_path / "o")]) == 0
    found = report_of(tmp_path / "o")
    assert found["method"] == method and found["rounds"] == 8 and found["slices_certified"] == 0 and len(found["curve"]) == 2


def test_the_horizontal_setting_from_the_command_line(tmp_path):
    base = ["attack", "--data", "digits", "--rows", "1", "--batch-size", "1", "--workers", "1", "--network", "smooth", "--quiet", "--out", str(tmp_path / "o")]
    assert main([*base, "--method", "idlg", "--rounds", "100"]) == 0
    found = report_of(tmp_path / "o")
    assert found["network"] == "smooth" and found["psnr_slice_mean"] > 40 and found["label_accuracy"] == 1
    assert main(["attack", "--data", "breast-cancer", "--network", "smooth", "--out", str(tmp_path / "o")]) == 2


def test_experiment_speed(tmp_path):
    assert main(["experiment", "speed", "--size", "smoke", "--quiet", "--out", str(tmp_path / "s.json")]) == 0
    result = json.loads((tmp_path / "s.json").read_text())
    assert set(result["iteration"]) == {"1", "4", "16"}
    for by in result["iteration"].values():
        assert by["plain_over_fused"] > 0 and set(by["fused"]) == set(by["plain"]) == {"round", "step1", "step2", "step3"}
    assert result["command"].startswith("cafe-tutorial experiment speed") and 0 < sum(result["operations"].values()) <= 1
    assert result["step1"]["exact_error"] < 1e-5 < result["step1"]["iterative_error"] and result["step3"]["residual_median"] < 1e-8
    assert set(result["attacks"]) == {"exact", "few-rounds"} == set(result["growth_exponent"])
    (tmp_path / "file").write_text("x")
    assert main(["experiment", "speed", "--out", str(tmp_path / "file" / "s.json")]) == 2


def test_the_growth_exponent():
    from cafe_tutorial.experiments.speed import exponent

    assert exponent({n: 3 * n**1.5 for n in (10, 30, 70)}) == pytest.approx(1.5)


def test_experiment_certificates(tmp_path, monkeypatch):
    from cafe_tutorial.experiments import certificates
    from cafe_tutorial.experiments.certificates import Setting

    full, few = certificates.run, (Setting("digits", 12, 3, workers=4, d2=32, seeds=2), Setting("breast-cancer", 20, 3, columns=(5, 10, 15)))
    monkeypatch.setattr(certificates, "run", lambda **options: full(settings=few, **options))
    assert main(["experiment", "certificates", "--quiet", "--out", str(tmp_path / "c.json")]) == 0
    result = json.loads((tmp_path / "c.json").read_text())
    assert result["slices"] == 2 * 48 + 60 == sum(r["slices"] for r in result["settings"]) and result["false"] == 0
    assert 0 < result["certified"] <= result["leak"] and {r["seed"] for r in result["settings"]} == {0, 1}


def test_experiment_span_certificates(tmp_path, monkeypatch):
    from cafe_tutorial.experiments import span_certificates
    from cafe_tutorial.experiments.certificates import Setting

    few = tuple(Setting("digits", 12, 3, workers=4, d2=32, method=method) for method in ("few-rounds", "one-round"))
    full = span_certificates.run
    monkeypatch.setattr(span_certificates, "run", lambda **options: full(settings=few, **options))
    assert main(["experiment", "span-certificates", "--quiet", "--out", str(tmp_path / "c.json")]) == 0
    result = json.loads((tmp_path / "c.json").read_text())
    assert [r["method"] for r in result["settings"]] == ["few-rounds", "one-round"] and result["false"] == 0 and result["slices"] == 48 + 12
    assert {s.method for s in span_certificates.SETTINGS} == {"few-rounds", "one-round"}


def test_few_rounds(tmp_path):
    base = ["attack", "--data", "digits", "--rows", "16", "--batch-size", "4", "--method", "few-rounds", "--quiet", "--out", str(tmp_path / "o")]
    assert main(base) == 0
    found = report_of(tmp_path / "o")
    assert (found["rounds"], found["schedule"], found["method"]) == (16, "epochs", "few-rounds") and found["settings"] is None
    assert found["slices_certified"] > 0 and found["certified_psnr_min"] > 60
    assert main([*base, "--epochs", "2"]) == 0 and report_of(tmp_path / "o")["rounds"] == 8
    for wrong in (["--epochs", "0"], ["--epochs", "2", "--rounds", "3"], ["--curve", "5"]):
        assert main([*base, *wrong]) == 2
    assert main(["attack", "--epochs", "3", "--out", str(tmp_path / "o")]) == 2


def test_one_round(tmp_path):
    base = ["attack", "--data", "digits", "--rows", "12", "--batch-size", "3", "--method", "one-round", "--quiet", "--out", str(tmp_path / "o")]
    assert main(base) == 0
    found = report_of(tmp_path / "o")
    assert (found["rounds"], found["method"], found["slices_total"]) == (1, "one-round", 12) and found["settings"] is None
    leak = np.load(tmp_path / "o" / "leak.npz")
    assert len(leak["recovered"]) == len(leak["row_numbers"]) == 3
    for wrong in (["--curve", "5"], ["--epochs", "2"], ["--double-softmax"], ["--rounds", "0"], ["--data", "breast-cancer"]):
        assert main([*base, *wrong]) == 2
