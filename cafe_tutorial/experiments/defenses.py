"""Defences as lists of attacks and of trainings: what each stops, and what it costs.

A defence with an ε has the budget for as many rounds as its cell runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sweep import Cell, cell

if TYPE_CHECKING:
    from .tables import Size

RELATIVE = "relative=true"
FAKES = {
    "none": {},
    "fake, clip, σ² = 1.1": {"defense": "fake"},
    "fake, clip, σ = 3 rms": {"defense": f"fake:sigma=3,{RELATIVE}"},
    "fake, clip, σ = 1 rms": {"defense": f"fake:sigma=1,{RELATIVE}"},
    "fake, order, σ = 1 rms": {"defense": f"fake:sigma=1,{RELATIVE},reading=order"},
    "fake, order, σ² = 1.1": {"defense": "fake:reading=order"},
}
ALIKE = ("largest 10 %", "DP, C = 3, ε = 10", "DP, C = 0.1, z = 0.0001")  # left out where the slow attack is concerned; fakes have a table of their own
LOOPED = ("none", "fake, clip, σ = 1 rms", "fake, order, σ = 1 rms", "fake, order, σ² = 1.1")  # clip with σ² = 1.1 is none
COMPRESSED = {
    "float16": {"defense": "half"}, "8 bits": {"defense": "quantized:bits=8"},
    "largest 10 %": {"defense": "top-k:share=0.1"}, "largest 1 %": {"defense": "top-k:share=0.01"},
}  # fmt: skip
LEARNING_RATES = (1e-4, 5e-4, 1e-3)  # of table 7 for digits
EPSILONS = (10, 5, 1, 0.1)
NOISE = (1e-4, 1e-3, 1e-2, 0.1)  # multipliers far below what any ε asks for
KEPT_FOR = 60  # rounds that the workers train on before the attack, without showing the layers below the first
TRAINED = (0, 30, 60, 100, 200)  # rounds before the attack


def private(steps: int) -> dict[str, dict]:
    """Differential privacy of a row for a budget of ``steps`` rounds."""
    return {f"DP, C = {C:g}, ε = 10": {"defense": f"dp:epsilon=10,clip_norm={C:g},steps={steps}"} for C in (3, 0.1)}


def noise(*multipliers: float) -> dict[str, dict]:
    """The same mechanism with a noise multiplier instead of ε."""
    return {f"DP, C = 0.1, z = {z:g}": {"defense": f"dp:noise_multiplier={z:g},clip_norm=0.1"} for z in multipliers}


def grid(size: Size, preset) -> list[Cell]:
    """The defences against the attacks that do not know them; the single loop at the size of table 2, whose rounds it needs, and
    not for all."""
    rows, batch_size, steps = size.guarded
    fast, slow = {"rows": rows, "batch_size": batch_size}, {"rows": size.rows, "batch_size": size.batch_size, "rounds": size.rounds}
    settings = {
        **{k: FAKES[k] for k in ("none", "fake, clip, σ = 1 rms", "fake, order, σ = 1 rms")}, **COMPRESSED, **private(steps), **noise(1e-4, 1e-2),
    }  # fmt: skip
    found = []
    for name, changed in settings.items():
        found += _fast(name, **fast, **changed)
        if "fake" not in name and name not in ALIKE:
            found.append(cell(name, "single-loop", "single-loop", **slow, **private(size.rounds).get(name, changed)))
    found += _fast("d2 = 4K/5", d2=batch_size * 4 // 5, **fast)
    found.append(cell("d2 = 4K/5", "single-loop", "single-loop", d2=size.batch_size * 4 // 5, **slow))
    found.append(cell("fixed batches", "one-round", "one-round", schedule="fixed", **fast))
    return found + _fast("bottoms kept", pretrain=KEPT_FOR, local_bottom=True, **fast)


def _fast(row: str, **base) -> list[Cell]:
    return [cell(row, method, method, **base) for method in ("exact", "few-rounds", "one-round")]


def fakes(size: Size, preset) -> list[Cell]:
    """The paper's comparison with and without fake gradients, by every reading, for its attack and the exact one."""
    base = {"rows": size.rows, "batch_size": size.batch_size}
    found = [cell(name, "exact", "exact", **base, **changed) for name, changed in FAKES.items()]
    slow = {**base, "rounds": size.rounds, "curve": max(1, size.rounds // 32)}
    return found + [cell(name, "single-loop", "single-loop", **slow, **FAKES[name]) for name in LOOPED]


def table7(size: Size, preset) -> list[Cell]:
    """Attacked while Adam trains all weights, by learning rate."""
    rows, batch_size, _ = size.guarded
    found = []
    for rate in LEARNING_RATES:
        base = {"learning_rate": rate}
        found.append(cell("CAFE, single loop", f"{rate:g}", "single-loop", rows=size.rows, batch_size=size.batch_size, rounds=size.rounds, **base))
        found.append(cell("exact", f"{rate:g}", "exact", rows=rows, batch_size=batch_size, **base))
        found.append(cell("one-round, 2 rounds", f"{rate:g}", "one-round", rows=rows, batch_size=batch_size, rounds=2, **base))
    return found


def table8(size: Size, preset) -> list[Cell]:
    """The paper's attack and the model's progress on one curve, the loss as in the released code."""
    base = {"rows": size.rows, "batch_size": size.batch_size, "rounds": size.rounds, "curve": max(1, size.rounds // 10), "double_softmax": True}
    return [cell("CAFE, single loop", f"{rate:g}", "single-loop", learning_rate=rate, **base) for rate in (1e-6, 1e-4)]


def trained(size: Size, preset) -> list[Cell]:
    """What is left of the attacks on a model that has been trained before."""
    rows, batch_size, _ = size.guarded
    return [cell(method, f"{steps}", method, rows=rows, batch_size=batch_size, pretrain=steps) for steps in TRAINED for method in ("exact", "one-round")]


def learning(size: Size, preset) -> list[Cell]:
    """Trainings by SGD under the defences, at the paper's rate 0.1; where rows are clipped to a tenth of their usual norm at ten times it."""
    rows, batch_size, rounds = size.learning
    settings = {k: (_rate(k), v) for k, v in {**{n: FAKES[n] for n in LOOPED}, **COMPRESSED, **noise(*NOISE)}.items()}
    for epsilon in EPSILONS:
        settings[f"DP a batch, C = 3, ε = {epsilon:g}"] = 0.1, {"defense": f"dp:epsilon={epsilon:g},per=batch,steps={rounds}"}
    for part in (1, 0.1):
        settings |= {f"{k}, rate {part * _rate(k):g}": (part * _rate(k), v) for k, v in private(rounds).items()}
    base = {"rows": rows, "batch_size": batch_size, "rounds": rounds, "curve": max(4, rounds // 4), "optimizer": "sgd"}
    return [cell(name, "training", "training", learning_rate=rate, **base, **changed) for name, (rate, changed) in settings.items()]


def accuracy(size: Size, preset) -> list[Cell]:
    """Of those trainings the ones with and without fake gradients, as in the authors' table to a reviewer."""
    return [c for c in learning(size, preset) if c.row in LOOPED]


def _rate(name: str) -> float:
    return 1.0 if "C = 0.1" in name else 0.1


def averaging(size: Size, preset) -> list[Cell]:
    """Noise on every entry, and how many rounds of it the attacker waits for."""
    rows, batch_size, times = size.patient
    base = {"rows": rows, "batch_size": batch_size, "d2": 64}
    found = []
    for name, changed in noise(*NOISE).items():
        found.append(cell(name, "exact", "exact", **changed, **base))
        found += [cell(name, f"{t} rounds a row", "patient", rounds=t * rows, **changed, **base) for t in times]
    return found


def tradeoff(size: Size, preset) -> list[Cell]:
    """What noise does to the exact attack, and to a training with the same rows and batches."""
    rows, batch_size, steps = size.guarded
    base = {"rows": rows, "batch_size": batch_size}
    found = []
    for name, changed in {"none": {}, **noise(*NOISE), **private(steps)}.items():
        found.append(cell(name, "exact", "exact", **base, **changed))
        found.append(cell(name, "training", "training", rounds=steps, curve=max(1, steps // 4), learning_rate=_rate(name), optimizer="sgd", **base, **changed))
    return found


TABLES = {
    "accuracy": accuracy, "averaging": averaging, "defenses": grid, "fakes": fakes, "learning": learning, "table7": table7, "table8": table8, "tradeoff": tradeoff,
    "trained": trained,
}  # fmt: skip
