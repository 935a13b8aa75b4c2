"""Workers that keep the layers below the first to themselves: what the server is shown, and what is left of the attacks."""

import pytest
import torch
from conftest import image_case, smooth_images
from test_cli import SMALL, report_of

from cafe_tutorial.__main__ import main


def test_the_server_sees_what_it_believes_and_no_gradient_of_it():
    *_, plain = image_case(smooth_images())
    below = {k: torch.zeros_like(v) for k, v in plain.parameters.items() if ".representation." in k}
    *_, local = image_case(smooth_images(), stale=below, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    view, shown = next(plain.rounds(1)), next(local.rounds(1))
    assert set(shown.gradients) == set(view.gradients) - set(below) and below
    assert all(torch.equal(shown.gradients[k], view.gradients[k]) for k in shown.gradients)  # computed from the true weights
    assert all(torch.equal(shown.parameters[k], below.get(k, v)) for k, v in view.parameters.items())
    assert any(not torch.equal(local.parameters[k], plain.parameters[k]) for k in below)  # the workers train on


@pytest.mark.parametrize("name", ["head.weight", "group0.representation.nothing", "group0.representation.0.weight"])
def test_only_layers_below_the_first_can_be_kept(name):
    with pytest.raises(ValueError, match=rf"stale holds {name} \(1,\); it may only hold weights of the layers below the first"):
        image_case(smooth_images(), stale={name: torch.zeros(1)})


def test_weights_that_the_server_still_knows_protect_nothing_and_weights_that_moved_protect_the_pixels_only(tmp_path):
    found = {}
    for steps in (0, 30):
        assert main([*SMALL, "--local-bottom", "--pretrain", str(steps), "--out", str(tmp_path / str(steps))]) == 0
        found[steps] = report_of(tmp_path / str(steps))
    assert found[0]["psnr_slice_median"] > 100 and found[0]["slices_certified"] > 0
    assert found[30]["psnr_slice_median"] < 30 and found[30]["slices_certified"] == found[30]["certified_false"] == 0
    assert found[0]["label_accuracy"] == found[30]["label_accuracy"] == 1 and found[30]["local_bottom"]


@pytest.mark.parametrize("options, message", [
    (["--data", "breast-cancer", "--pretrain", "3", "--local-bottom"], "local_bottom=True: the workers of a table have no layers below the first"),
    (["--optimizer", "sgd"], "optimizer='sgd' is for a learning_rate above 0"), (["--train", "above"], "train='above' is for a learning_rate above 0"),
    (["--method", "patient", "--rounds", "15", "--pretrain", "3"], "rounds=15 must be at least 20 for method='patient'"),
])  # fmt: skip
def test_options_that_would_do_nothing_are_refused(options, message, tmp_path, capsys):
    assert main([*SMALL, *options, "--out", str(tmp_path / "o")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "o").exists()


def test_a_method_that_compares_the_hidden_gradients_is_refused(tmp_path, capsys):
    assert main([*SMALL, "--method", "single-loop", "--local-bottom", "--out", str(tmp_path)]) == 2
    assert "local_bottom hides gradients that method='single-loop' compares" in capsys.readouterr().err


def test_sgd_trains_while_the_attack_goes_on_and_the_report_tells_the_progress(tmp_path):
    options = ["--learning-rate", "0.1", "--optimizer", "sgd", "--method", "single-loop", "--rounds", "6", "--curve", "3"]
    assert main([*SMALL, *options, "--out", str(tmp_path)]) == 0
    report = report_of(tmp_path)
    assert report["optimizer"] == "sgd" and "--optimizer sgd" in report["command"]
    assert report["curve"][-1]["test_accuracy"] == report["test_accuracy"] and report["training_loss"] < 3
    assert report["curve"][0]["training_loss"] != report["training_loss"]
