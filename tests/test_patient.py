import pytest
import torch
from conftest import image_case, smooth_images, table_case, true_gradients

from cafe_tutorial.attack import ExactCAFE, NotIdentifiable
from cafe_tutorial.attack.invert import Attempt
from cafe_tutorial.attack.patient import PatientCAFE
from cafe_tutorial.defense import GaussianMechanism
from cafe_tutorial.metrics import score
from cafe_tutorial.protocol import RoundView
from cafe_tutorial.theory import patient_errors

SHORT = (Attempt("decoded", 20),)


def watched(model, vfl, rounds, **options):
    attack = PatientCAFE(model, rows=vfl.rows, rounds=rounds, **options)
    for view in vfl.rounds(rounds):
        assert not attack.ready
        attack.observe(view)
    return attack


def noisy(std, batch_size, *, seed=0, clip_norm=100.0):
    """Noise of standard deviation ``std`` an entry of the averaged gradient, and no row clipped by the norm as given."""
    return GaussianMechanism(noise_multiplier=std * batch_size / clip_norm, clip_norm=clip_norm, seed=seed)


def noisy_views(vfl, std, rounds, *, seed=0):
    """What noisy rounds show of its first layers and of the head's bias, from the true v_n and h_n: faster."""
    V, H = true_gradients(vfl)
    g = torch.Generator().manual_seed(seed)
    view = next(iter(vfl.rounds(1)))
    logits = vfl.model.forward(view.parameters, vfl.model.stack(vfl.parts))[1]
    head = logits.softmax(1) - torch.nn.functional.one_hot(vfl.labels, vfl.model.classes)  # (N, classes)
    for t in range(rounds):
        s = torch.randperm(vfl.rows, generator=g)[: vfl.batch_size]
        weights = vfl.model.stack([v[s].T @ h[s] / len(s) for v, h in zip(V, H)])
        biases = vfl.model.stack([v[s].mean(0) for v in V])
        gradients = {"head.bias": head[s].mean(0)}
        for i, (weight, bias) in enumerate(zip(weights, biases)):
            gradients |= {f"group{i}.first.weight": weight, f"group{i}.first.bias": bias}
        yield RoundView(t, s, view.parameters, {k: x + std * torch.randn(x.shape, generator=g, dtype=x.dtype) for k, x in gradients.items()})


def representations(attack, m):
    """Ĥ of worker m with all rows live, and its expected relative error."""
    return attack._representations(m, None, torch.ones(attack.rows, dtype=torch.bool), None, 2**-52, torch.Generator().manual_seed(0))


def relative(found, true):
    return (found - true).norm(dim=1) / true.norm(dim=1)


def test_without_noise_it_finds_what_the_exact_attack_finds():
    data = smooth_images(4, 1, 8, 8)
    split, model, vfl = image_case(data, (1, 2), batch_size=3)
    patient, exact = PatientCAFE(model, rows=4, rounds=40, learn=20, attempts=SHORT), ExactCAFE(model, rows=4, attempts=SHORT)
    for view in vfl.rounds(40):
        patient.observe(view)
        exact.observe(view)
    V, noise = exact.bias.solve(eps=2**-23)
    for m, v in enumerate(V.split([*model.d2, model.classes], 1)[:-1]):
        live = torch.ones(4, dtype=torch.bool)
        H, _ = exact._representations(m, v, live, noise, 2**-23, torch.Generator())
        assert (relative(patient._representations(m, v, live, noise, 2**-23, torch.Generator())[0], H) < 1e-5).all()
    leaks = [a.solve() for a in (patient, exact)]
    results = [score(leak, data, split) for leak in leaks]
    assert all(r.certified.double().mean() > 0.8 and (r.psnr_slice[r.certified] > 60).all() and r.label_accuracy == 1.0 for r in results)
    assert leaks[0].method == "patient" and leaks[0].rounds == 40 and leaks[0].leaks.all()


@pytest.mark.parametrize(("rows", "size", "schedule"), [(1, 1, "random"), (7, 3, "random"), (8, 4, "epochs"), (9, 8, "random"), (6, 1, "fixed")])
def test_any_rows_batch_size_and_schedule(rows, size, schedule):
    """Where the rank after ``learn`` rounds is below N, V is learned later and the watch is as much longer."""
    parts, labels, model, vfl = table_case(rows=rows, widths=(2, 5), batch_size=size, schedule=schedule)
    attack = PatientCAFE(model, rows=rows, rounds=3 * rows, learn=rows)
    while not attack.ready:
        for view in vfl.rounds(1):
            attack.observe(view)
    leak = attack.solve()
    assert 3 * rows <= leak.rounds < 30 * rows and torch.equal(leak.labels, labels) and leak.certified.all()
    assert all((s - p).norm() < 1e-6 * p.norm() for s, p in zip(leak.slices, parts))


def test_no_round_is_kept_but_its_bias_gradients():
    *_, model, vfl = table_case(rows=10, widths=(7, 4), batch_size=3)

    def size(sums):
        lists = [x for x in vars(sums).values() if isinstance(x, list)]
        assert all(len(x) == len(model.groups) for x in lists)  # one tensor a group, none a round
        return sum(x.numel() for x in [sums.together, *(t for x in lists for t in x)])

    short, long = watched(model, vfl, 40), watched(model, vfl, 200)
    assert size(short.weight) == size(long.weight) == 10 * 10 + 2 + 10 * (2 * 32 + 7 + 4)  # together, power, V and right
    assert short.weight.rounds == 40 - 15 and long.weight.rounds == 200 - 20
    kept = {k for k, v in vars(long).items() if isinstance(v, (list, dict, tuple)) and k != "attempts"}
    assert kept == {"_parameters"}


@pytest.mark.parametrize("widths", [(3,), (60,)])
def test_the_error_falls_with_the_rounds_as_predicted(widths):
    """A narrow part, where the error of V rules, and a wide one, where the noise of the weight gradients does."""
    std, rms = 1e-3, []
    for rounds in (200, 800):
        ratios = []
        for seed in range(4):
            *_, model, vfl = table_case(rows=20, widths=widths, batch_size=4, seed=seed)
            (V,), (H,) = true_gradients(vfl)
            attack = PatientCAFE(model, rows=20, rounds=rounds, learn=rounds // 2)
            for view in noisy_views(vfl, std, rounds, seed=seed):
                attack.observe(view)
            v = attack._learned.solve(eps=0)[0][:, : model.d2[0]]
            h, delta = representations(attack, 0)
            entry, error = patient_errors(V, H, 4, std, rounds, rounds // 2)
            ratios.append([(v - V).square().mean() / entry**2, *((relative(h, H) / e).square().mean() for e in (error, delta))])
        predicted_v, predicted_h, expected = torch.tensor(ratios).mean(0).sqrt()
        assert 0.8 < predicted_v < 1.25 and 0.8 < predicted_h < 1.25
        assert 0.2 < expected < 1.25  # the attack's own, which allows for rounding's habits as well
        rms.append(relative(h, H).square().mean().sqrt())
    assert rms[0] / rms[1] > 1.7  # 2 and more: step I after 100 rounds is not far from N


def test_the_expected_error_follows_the_noise_of_the_weight_gradients():
    """V from 800 rounds, H from 40: the error of H is nearly all the noise's own."""
    *_, model, vfl = table_case(rows=20, widths=(60,), batch_size=4)
    (_,), (H,) = true_gradients(vfl)
    attack = PatientCAFE(model, rows=20, rounds=840, learn=800)
    for view in noisy_views(vfl, 1e-3, 840):
        attack.observe(view)
    h, delta = representations(attack, 0)
    ratio = relative(h, H) / delta
    assert 0.6 < ratio.square().mean().sqrt() < 1.15 and ratio.max() < 2


def test_more_noise_than_one_solve_bears_is_averaged_away():
    """Slices from 2,000 rounds are several times better than the exact attack's from its N rounds."""
    parts, labels, model, vfl = table_case(rows=20, widths=(5, 30), batch_size=4)
    exact, patient = ExactCAFE(model, rows=20), PatientCAFE(model, rows=20, rounds=2000)
    for view in noisy_views(vfl, 3e-3, 2000):
        if not exact.ready:
            exact.observe(view)
        patient.observe(view)
    leaks = patient.solve(), exact.solve()
    near, far = ([relative(s, p).median() for s, p in zip(leak.slices, parts)] for leak in leaks)
    assert all(n < f / 4 and n < 0.2 for n, f in zip(near, far))
    assert torch.equal(leaks[0].labels, labels) and not any(leak.certified.any() for leak in leaks)


@pytest.mark.parametrize("std", [1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_certified_records_are_right_under_noise(std, seed):
    parts, _, model, vfl = table_case(rows=40, widths=(3, 10), batch_size=8, seed=seed, dtype=torch.float32, defense=noisy(std, 8, seed=seed))
    leak = watched(model, vfl, 160).solve()
    errors = torch.stack([relative(s, p.float()) for s, p in zip(leak.slices, parts)], 1)
    assert (errors[leak.certified] < 1e-4).all()
    assert leak.certified.all() if std <= 1e-8 else std < 1e-5 or not leak.certified.any()


@pytest.mark.parametrize("std", [1e-9, 1e-6, 1e-4])
def test_certified_slices_are_right_under_noise(std):
    data = smooth_images(4, 1, 8, 8)
    split, model, vfl = image_case(data, (1, 2), batch_size=2, defense=noisy(std, 2))
    result = score(watched(model, vfl, 24, attempts=SHORT).solve(), data, split)
    assert (result.psnr_slice[result.certified] > 60).all()
    assert result.certified.any() if std <= 1e-9 else std < 1e-4 or not result.certified.any()


def test_clipping_alone_changes_no_slice():
    """A clipped row has a smaller v_n and the same h_n."""
    parts, labels, model, vfl = table_case(rows=12, batch_size=4, defense=GaussianMechanism(noise_multiplier=0, clip_norm=1e-2))
    leak = watched(model, vfl, 60).solve()
    assert leak.certified.all() and torch.equal(leak.labels, labels)
    assert all((s - p).norm() < 1e-6 * p.norm() for s, p in zip(leak.slices, parts))


def test_bad_arguments_and_too_few_rounds_name_what_would_be_right():
    *_, model, vfl = table_case(rows=20, batch_size=4)
    for rounds, text in ((39, "rounds=39 must be at least 40"), (0, "rounds=0"), (50.5, "rounds=50.5"), (True, "rounds=True")):
        with pytest.raises(ValueError, match=text):
            PatientCAFE(model, rows=20, rounds=rounds)
    for learn, text in ((19, "learn=19 must be from 20.* to 59"), (60, "learn=60 .* rounds=60"), (0, "learn=0"), (30.5, "learn=30.5")):
        with pytest.raises(ValueError, match=text):
            PatientCAFE(model, rows=20, rounds=60, learn=learn)
    with pytest.raises(ValueError, match="rows=0"):
        PatientCAFE(model, rows=0, rounds=10)
    attack = PatientCAFE(model, rows=20, rounds=60)
    with pytest.raises(ValueError, match="after 0 rounds, with rounds=60: .* 60 more"):
        attack.solve()
    for view in vfl.rounds(59):
        attack.observe(view)
    with pytest.raises(ValueError, match="after 59 rounds, .* 1 more"):
        attack.solve()


def test_batches_that_repeat_are_refused_with_the_reason():
    *_, model, vfl = table_case(rows=20, batch_size=5, schedule="fixed")
    attack = watched(model, vfl, 60)
    with pytest.raises(NotIdentifiable, match="rank 4 of 20"):
        attack.solve()
