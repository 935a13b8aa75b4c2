"""Defences against their definitions, each for itself, and on the command line."""

import math
import shlex

import pytest
import torch
from test_cli import SMALL, report_of

from cafe_tutorial.__main__ import main
from cafe_tutorial.defense import DEFENSES, FakeGradients, GaussianMechanism, HalfPrecision, Quantization, TopK, defense_from
from cafe_tutorial.defense.base import flat, unflat
from cafe_tutorial.defense.privacy import appearances, epsilon_of, noise_for

EXAMPLES = ["fake", "fake:sigma=2,relative=true", "fake:sigma=1,relative=true,reading=order", "dp:noise_multiplier=0.5,clip_norm=0.1", "dp:noise_multiplier=0.5,per=batch", "half", "half:kind=bfloat16", "top-k:share=0.2", "quantized:bits=4"]  # fmt: skip


def gradient(seed: int = 0, scale: float = 1.0) -> dict:
    g = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(*shape, generator=g) for name, shape in (("a.weight", (7, 5)), ("a.bias", (5,)), ("b.weight", (4, 3, 2, 2)))}


def applied(text: str, given: dict, *, party: int = 0, times: int = 1, rows: int = 4) -> dict:
    own = defense_from(text, seed=5).for_party(party, rows=20, batch_size=rows)
    return [own(given, rows=rows) for _ in range(times)][-1]


@pytest.mark.parametrize("text", EXAMPLES)
def test_names_shapes_and_kinds_stay_nothing_given_is_changed_and_the_seed_repeats_it(text):
    given = gradient()
    before = {k: v.clone() for k, v in given.items()}
    first, again, other = applied(text, given), applied(text, given), applied(text, given, party=1)
    assert list(first) == list(given) and all(first[k].shape == given[k].shape and first[k].dtype == given[k].dtype for k in given)
    assert all(torch.equal(given[k], before[k]) for k in given)
    assert all(torch.equal(first[k], again[k]) for k in given)
    if text.startswith(("dp", "quantized", "fake:sigma=1")):  # their draws reach the upload
        assert not torch.equal(flat(first), flat(other))


@pytest.mark.parametrize("text", EXAMPLES)
def test_no_party_sees_anothers_data(text):
    """Worker 0's uploads stay bit for bit when another worker's rows change and the averaged gradients they share do not."""
    own = [defense_from(text).for_party(0, rows=20, batch_size=4) for _ in range(2)]
    others = [defense_from(text).for_party(1, rows=20, batch_size=4) for _ in range(2)]
    for i in range(3):
        mine, outputs = gradient(i), []
        for k in range(2):
            others[k](gradient(100 + 7 * i + k, scale=1 + 10 * k), rows=4)
            outputs.append(own[k](mine, rows=4))
        assert torch.equal(flat(outputs[0]), flat(outputs[1]))


def test_flat_and_unflat_are_inverse():
    given = gradient()
    assert all(torch.equal(a, given[k]) for k, a in unflat(flat(given), given).items())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sigma", [0.01, 0.3, 1.0, 5.0])
def test_fake_gradients_by_order_keep_the_order_and_hold_a_candidates_values(seed, sigma):
    given = gradient(seed)
    fake = flat(FakeGradients(sigma=sigma, reading="order", seed=seed)(given, rows=4))
    assert torch.equal(fake.argsort(), flat(given).argsort())
    other = flat(FakeGradients(sigma=2 * sigma, reading="order", candidates=1, seed=seed)(given, rows=4))
    assert 0.3 * sigma < float(fake.std()) < 2 * sigma and len(other) == len(fake)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sigma", [0.01, 0.3, 1.0, 5.0])
def test_fake_gradients_by_clipping_stay_within_the_candidate_of_the_same_rank_and_within_the_truth(seed, sigma):
    given = gradient(seed)
    defense = FakeGradients(sigma=sigma, candidates=1, seed=seed)
    true, fake = flat(given), flat(defense(given, rows=4))
    order = true.argsort()
    bound = sigma * defense._pool[0].abs()
    assert (fake[order].abs() <= bound).all() and (fake.abs() <= true.abs()).all() and (fake * true >= 0).all()
    cut = fake != true
    assert torch.equal(fake[order][cut[order]].abs(), bound[cut[order]])
    alike = defense._pool[0] * true[order] >= 0  # where the candidate's sign is the true one's, the order stays
    assert alike.float().mean() > 0.6 and (fake[order][alike].diff() >= 0).all()


def test_the_nearest_of_the_candidates_is_taken():
    given = gradient(1)
    defense = FakeGradients(sigma=0.7, reading="order", candidates=40, seed=2)
    fake = flat(defense(given, rows=4)).sort().values
    ascending = flat(given).sort().values
    distances = (0.7 * defense._pool - ascending).norm(dim=1)
    assert torch.allclose(fake, 0.7 * defense._pool[distances.argmin()])


def test_candidates_are_sorted_normal_samples():
    x = FakeGradients(candidates=50, seed=0)._draw(2000)
    assert (x.diff(dim=1) >= 0).all() and abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1) < 0.02
    pooled = x[:, torch.randperm(2000, generator=torch.Generator().manual_seed(0))]
    quantiles = torch.tensor([-1.2816, 0.0, 1.2816])
    assert torch.allclose((pooled < quantiles[:, None, None]).double().mean((1, 2)), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), atol=0.01)
    assert not torch.equal(x[0], x[1])


def test_relative_sigma_follows_the_gradient():
    for scale in (1e-4, 1.0, 1e3):
        fakes = flat(FakeGradients(sigma=1.0, relative=True, seed=3)(gradient(0, scale), rows=4)) / scale
        if scale == 1e-4:
            first = fakes
        assert torch.allclose(fakes, first, rtol=1e-4)


def test_a_distance_that_no_candidate_meets_is_an_error_that_says_how_far():
    with pytest.raises(ValueError, match=r"tau=1e-09 was not reached in 2 redraws: the nearest candidate was [0-9.]+"):
        FakeGradients(tau=1e-9, redraws=2, candidates=3)(gradient(), rows=4)


def test_redraws_find_a_nearer_candidate():
    ascending = flat(gradient()).sort().values
    first = FakeGradients(sigma=1.0, candidates=1, seed=4)
    first(gradient(), rows=4)
    tau = float((first._pool[0] - ascending).norm()) * 0.999
    second = FakeGradients(sigma=1.0, candidates=1, seed=4, tau=tau, redraws=500)
    second(gradient(), rows=4)
    assert float((second._pool[0] - ascending).norm()) <= tau


@pytest.mark.parametrize("epsilon", [10.0, 5.0, 1.0, 0.1])
def test_the_noise_is_the_accountants(epsilon):
    z = noise_for(epsilon, 1e-5, sample_rate=0.05, steps=200)
    assert 0.85 * epsilon < epsilon_of(z, 1e-5, sample_rate=0.05, steps=200) <= epsilon
    own = GaussianMechanism(epsilon=epsilon, steps=200).for_party(0, rows=200, batch_size=10)
    assert own.noise_multiplier == z


@pytest.mark.parametrize("per", ["row", "batch"])
@pytest.mark.parametrize("rows, clip_norm, z", [(4, 3.0, 1.0), (20, 0.5, 2.0), (1, 1.0, 0.1)])
def test_the_noise_has_the_standard_deviation_that_it_should(per, rows, clip_norm, z):
    zero = {"w": torch.zeros(300, 200), "b": torch.zeros(200)}
    noise = flat(GaussianMechanism(per=per, clip_norm=clip_norm, noise_multiplier=z, seed=1)(zero, rows=rows))
    expected = z * clip_norm / (rows if per == "row" else 1)
    assert abs(float(noise.std()) / expected - 1) < 0.02 and abs(float(noise.mean())) < 0.02 * expected


def test_rows_are_clipped_to_the_norm_and_short_ones_left():
    norms = torch.tensor([0.0, 0.01, 2.0, 100.0])
    assert torch.allclose(norms * GaussianMechanism(clip_norm=2.0, noise_multiplier=0.0).factors(norms), torch.tensor([0.0, 0.01, 2.0, 2.0]))


def test_the_batchs_gradient_is_clipped_to_the_norm():
    own = GaussianMechanism(clip_norm=0.3, per="batch", noise_multiplier=0.0)
    assert abs(float(flat(own(gradient(), rows=4)).norm()) - 0.3) < 1e-6
    small = gradient(0, 1e-3)
    assert torch.equal(flat(own(small, rows=4)), flat(small))


@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_top_k_keeps_the_largest(share):
    given = flat(gradient())
    kept = flat(TopK(share=share)(gradient(), rows=4))
    count = max(1, round(share * len(given)))
    assert int((kept != 0).sum()) == count and torch.equal(kept[kept != 0], given[kept != 0])
    assert given[kept == 0].abs().max() <= given[kept != 0].abs().min() if share < 1 else True


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_quantization_is_unbiased_and_on_its_grid(bits):
    own, given = Quantization(bits=bits, seed=1), gradient()
    draws = torch.stack([own(given, rows=4)["a.weight"] for _ in range(400)])
    step = given["a.weight"].abs().max() / (2 ** (bits - 1) - 1)
    assert torch.allclose(draws / step, (draws / step).round(), atol=1e-3) and draws.abs().max() <= given["a.weight"].abs().max() * (1 + 1e-5)
    assert (draws.mean(0) - given["a.weight"]).abs().max() < 5 * step / math.sqrt(400)
    assert torch.equal(own({"w": torch.zeros(3)}, rows=4)["w"], torch.zeros(3))


def test_half_precision_rounds():
    for kind, eps in (("float16", 2**-11), ("bfloat16", 2**-8)):
        found = flat(HalfPrecision(kind=kind)(gradient(), rows=4))
        assert ((found - flat(gradient())).abs() <= eps * flat(gradient()).abs() + 1e-7).all() and not torch.equal(found, flat(gradient()))


@pytest.mark.parametrize(
    "text, message",
    [
        ("noise", "must be one of fake, dp, half, top-k, quantized"), ("fake:size=3", "OPTION one of sigma, relative"), ("fake:sigma", "must be OPTION=VALUE"),
        ("fake:sigma=big", "sigma='big' must be a number"), ("fake:sigma=0", "sigma=0.0 must be a number above 0"), ("fake:sigma=nan", "must be a number above 0"), ("fake:sigma=inf", "at most 1e"), ("fake:redraws=-1", "redraws=-1"),
        ("fake:relative=2", "must be true or false"), ("fake:reading=both", "must be one of clip, order"), ("fake:candidates=0", "candidates=0"),
        ("fake:candidates=1.5", "must be a whole number"), ("dp", "give one of the two"), ("dp:epsilon=1,noise_multiplier=1", "give one of the two"),
        ("dp:epsilon=-1", "epsilon=-1.0"), ("dp:noise_multiplier=-1", "at least 0"), ("dp:noise_multiplier=inf", "at least 0"), ("dp:epsilon=inf", "at most 1000"), ("dp:epsilon=1,delta=2", "delta=2.0"), ("dp:epsilon=1,per=world", "must be one of row, batch"),
        ("top-k:share=0", "share=0.0"), ("top-k:share=1.5", "at most 1"), ("quantized:bits=1", "bits=1 must be a whole number from 2 to 16"), ("half:kind=float8", "float16, bfloat16"),
    ],
)  # fmt: skip
def test_what_will_not_do_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        defense_from(text)


@pytest.mark.parametrize("epsilon", [0.5, 10])
def test_a_server_that_knows_the_batches_needs_more_noise(epsilon):
    """Without amplification it is the Gaussian mechanism as often as the luckiest row comes: ε ≤ n α / (2 z²) + ln(1/δ) / (α - 1) for every α."""
    z = [GaussianMechanism(epsilon=epsilon, steps=800, amplified=a).for_party(0, rows=100, batch_size=5).noise_multiplier for a in (True, False)]
    assert z[0] < z[1]
    n, orders = appearances(100, 0.05, 800, 1e-5), [1 + i / 100 for i in range(1, 5000)]
    g = torch.Generator().manual_seed(0)
    counts = torch.stack([torch.randperm(100, generator=g)[:5] for _ in range(800)]).flatten().bincount(minlength=100)
    assert 40 < counts.max() <= n < 100
    bound = min(n * a / (2 * z[1] ** 2) + math.log(1e5) / (a - 1) for a in orders)
    assert epsilon <= bound * 1.02 and bound < 1.3 * epsilon  # the accountant's conversion is a little sharper
    assert epsilon_of(z[0], 1e-5, sample_rate=1.0, steps=n) > epsilon


def test_a_budget_that_no_noise_meets_is_named():
    with pytest.raises(ValueError, match="epsilon=1e-06 with delta=1e-09 over 10 rounds is too small"):
        noise_for(1e-6, 1e-9, sample_rate=0.5, steps=10)


def test_every_defense_has_a_name_and_documents_its_options():
    for name, kind in DEFENSES.items():
        assert kind.__doc__ and name == name.lower()


def test_a_defense_is_applied_and_told(tmp_path):
    exact = {}
    for name, extra in (("none", []), ("half", ["--defense", "half"]), ("private", ["--defense", "dp:epsilon=1,steps=100"])):
        assert main([*SMALL, *extra, "--out", str(tmp_path / name)]) == 0
        report = report_of(tmp_path / name)
        assert report["defense"] == (extra[1] if extra else None) and (not extra or shlex.join(extra) in report["command"])
        exact[name] = report["psnr_slice_median"]
    assert exact["none"] > exact["half"] > exact["private"]


@pytest.mark.parametrize("defense", ["dp:noise_multiplier=0.02,clip_norm=0.1", "fake:sigma=1,relative=true", "top-k:share=0.1", "quantized:bits=4"])
def test_what_a_defense_spoils_is_not_taken_for_silent(defense, tmp_path):
    """The attack shows its best guess, and not black, for rows whose gradient is lost in the errors."""
    assert main([*SMALL, "--defense", defense, "--out", str(tmp_path)]) == 0
    report = report_of(tmp_path)
    assert report["slices_not_leaked"] == 0 and report["slices_certified"] == 0


def test_an_unknown_defense_is_told_before_anything_is_loaded(tmp_path, capsys):
    assert main([*SMALL, "--data", str(tmp_path / "none.npz"), "--defense", "noise:size=3", "--out", str(tmp_path / "o")]) == 2
    assert "'noise' must be one of fake, dp" in capsys.readouterr().err and not (tmp_path / "o").exists()
