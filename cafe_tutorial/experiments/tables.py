"""The paper's tables as lists of attacks, in three sizes, each beside this package's own attacks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..attack import PRESETS
from ..options import BASELINES, ITERATIVE
from . import defenses
from .paper import TABLE5
from .sweep import Cell, cell

SLOW = (*ITERATIVE, *BASELINES)  # these run with the first seed alone; under defences all but the exact attack
LOOP = tuple(b for b in BASELINES if b != "idlg")  # in the federated loop iDLG's rule does not apply
NAMES = ("table2", "table3", "table4", "table5", "table6", "table10", "yale", "variants", "floor", "horizontal", *defenses.TABLES)


@dataclass(frozen=True)
class Size:
    """How large the attacks are.

    rows, batch_size, rounds : N, K and T of the iterative methods; seeds : of the fast methods; batch_sizes : table
    3's, of ``many`` rows in ``many_rounds``; epochs : table 10's, for ``epoch_sizes`` batches; horizontal : batch
    sizes and rounds of the horizontal comparison; guarded : N and K for the defences and the rounds their budget is for;
    learning : N, K and rounds of a training;
    patient : N, K and the rounds a row of the attack that averages
    """

    rows: int
    batch_size: int
    rounds: int
    seeds: int
    many: int
    batch_sizes: tuple[int, ...]
    many_rounds: int
    epochs: tuple[int, ...]
    epoch_sizes: tuple[int, ...]
    horizontal: tuple[int, ...]
    horizontal_rounds: int
    guarded: tuple[int, int, int]
    learning: tuple[int, int, int]
    patient: tuple[int, int, tuple[int, ...]]


SIZES = {
    "smoke": Size(8, 2, 16, 1, 12, (2, 3), 12, (2, 4), (2, 4), (1, 2), 16, (12, 3, 16), (20, 5, 8), (12, 3, (2, 4))),
    "laptop": Size(40, 10, 800, 3, 100, (5, 10, 20, 40, 50), 400, (100, 150, 200, 250, 300, 350), (5, 10, 20), (1, 4, 16, 40), 1000, (200, 20, 220), (800, 40, 300), (60, 6, (2, 8, 32))),
    "paper": Size(800, 40, 8000, 3, 800, (10, 20, 40, 80, 100), 8000, (100, 150, 200, 250, 300, 350), (10, 20, 40, 80, 100), (1, 4, 16, 40), 6000, (800, 40, 840), (800, 40, 8000), (200, 20, (2, 10, 50, 250))),
}
TABLE4 = {"CAFE": {}, "alpha = 0": {"alpha": 0.0}, "xi = 0": {"xi": 0.0}, "beta = 0": {"beta": 0.0}, "gamma = 0": {"gamma": 0.0}}


def cells(name: str, *, size: str, data: str, preset: str, seeds: tuple[int, ...] | None, methods: tuple[str, ...] | None) -> list[Cell]:
    """The attacks of one table.

    name : one of ``NAMES``; data : a built-in name or a path; preset : table 9's hyperparameters; seeds : of the fast
    methods, the slow ones take the first; methods : only these, all of the table's when None.
    """
    own = SIZES[size]
    seeds = seeds or tuple(range(own.seeds))
    found = _TABLES[name](own, preset)
    known = list(dict.fromkeys(c.options["method"] for c in found))
    for method in methods or ():
        if method not in known:
            raise ValueError(f"methods: {method!r} is not in {name}; it has {', '.join(known)}")
    chosen = []
    for one in (c for c in found if not methods or c.options["method"] in methods):
        method = one.options["method"]
        common = {"data": data, "preset": preset} if method in ITERATIVE else {"data": data}
        chosen += [replace(one, seed=seed, options={**common, **one.options}) for seed in (seeds[:1] if method in SLOW or name in defenses.TABLES and method != "exact" else seeds)]
    return chosen


def _few_rounds(column: str, epochs: int, **base) -> Cell:
    return cell(f"few-rounds, {epochs} epochs", column, "few-rounds", epochs=epochs, **base)


def _ours(column: str, **base) -> list[Cell]:
    """This package's own attacks in one column."""
    return [cell("exact", column, "exact", **base), _few_rounds(column, 4, **base), cell("one-round", column, "one-round", **base)]


def _curve(rounds: int) -> int:
    return max(1, rounds // 32)


def _table2(size: Size, preset) -> list[Cell]:
    base = {"rows": size.rows, "batch_size": size.batch_size, "rounds": size.rounds, "curve": _curve(size.rounds)}
    found = [cell("CAFE, single loop", "PSNR", "single-loop", **base)]
    found += [cell(method, "PSNR", method, **base) for method in LOOP]
    return _ours("PSNR", rows=size.rows, batch_size=size.batch_size) + found


def _table3(size: Size, preset) -> list[Cell]:
    found = []
    for K in size.batch_sizes:
        base = {"rows": size.many, "batch_size": K}
        found += [*_ours(f"K = {K}", **base), cell("CAFE, single loop", f"K = {K}", "single-loop", rounds=size.many_rounds, **base)]
    return found


def _table4(size: Size, preset) -> list[Cell]:
    base = {"rows": size.rows, "batch_size": size.batch_size, "rounds": size.rounds, "curve": _curve(size.rounds)}
    return [cell(row, "PSNR", "single-loop", overrides=changed, **base) for row, changed in TABLE4.items()]


def _table5(size: Size, preset) -> list[Cell]:
    levels = (15.0, 20.0, 25.0, float(TABLE5.get(preset, TABLE5["mnist"])["level"]))
    base = {"rows": size.rows, "batch_size": size.batch_size, "rounds": size.rounds, "curve": _curve(size.rounds)}
    return [Cell(name, "rounds", 0, {"method": name, **base}, levels) for name in ("single-loop", "nested-loops")]


def _table6(size: Size, preset) -> list[Cell]:
    found = []
    for M in (4, 16):
        base = {"rows": size.rows, "batch_size": size.batch_size, "workers": M}
        found += [*_ours(f"M = {M}", **base), cell("CAFE, single loop", f"M = {M}", "single-loop", rounds=size.rounds, **base)]
    return found


def _table10(size: Size, preset) -> list[Cell]:
    found = []
    for K in size.epoch_sizes:
        batches = -(-size.rows // K)
        step = size.epochs[1] - size.epochs[0]
        options = {"method": "single-loop", "rows": size.rows, "batch_size": K, "schedule": "epochs", "rounds": size.epochs[-1] * batches, "curve": step * batches}
        found += [_few_rounds(f"K = {K}", e, rows=size.rows, batch_size=K) for e in (2, 4)]
        found.append(Cell("CAFE, single loop", f"K = {K}", 0, options, (), size.epochs))
    return found


def _yale(size: Size, preset) -> list[Cell]:
    base = {"rows": min(size.rows, 165), "batch_size": size.batch_size}
    return [*_ours("PSNR", **base), cell("CAFE, single loop", "PSNR", "single-loop", rounds=size.rounds, curve=_curve(size.rounds), **base)]


def _variants(size: Size, preset) -> list[Cell]:
    """The single loop under other settings, to see what holds it back."""
    K, known = size.batch_size, PRESETS[preset]
    changes = {
        "table 9": {}, "step I at 1/(2K)": {"lr_step1": 1 / (2 * K)}, "V starts near zero": {"init_V": 1e-6},
        "both": {"lr_step1": 1 / (2 * K), "init_V": 1e-6}, "both, step II at three times its rate": {"lr_step1": 1 / (2 * K), "init_V": 1e-6, "lr_step2": 3 * known.lr_step2},
        "both, step III at three times its rate": {"lr_step1": 1 / (2 * K), "init_V": 1e-6, "lr_step3": 3 * known.lr_step3},
        "section 4.2's thresholds": {"switch_step2": 1e-9, "switch_step3": 5e-9},
        "released code's Adam": {"double_bias_correction": True, "global_step_count": True},
    }  # fmt: skip
    base = {"rows": size.rows, "batch_size": K, "curve": _curve(size.rounds)}
    found = [cell(row, "PSNR", "single-loop", overrides=changed, rounds=size.rounds, **base) for row, changed in changes.items()]
    found.append(cell("second softmax", "PSNR", "single-loop", double_softmax=True, rounds=size.rounds, **base))
    found.append(cell("d2 = 1024", "PSNR", "single-loop", d2=1024, rounds=size.rounds, **base))
    return [*found, cell("2.5 times the rounds", "PSNR", "single-loop", rounds=5 * size.rounds // 2, **base)]


def _floor(size: Size, preset) -> list[Cell]:
    """The single loop after 2.5 times the rounds, as many more as the released code runs, to see what bounds it then."""
    I, rounds = {"lr_step1": 1 / (2 * size.batch_size)}, 5 * size.rounds // 2
    changes = {"table 9": {}, "alpha = 0": {"alpha": 0.0}, "beta = 0": {"beta": 0.0}, "step I at 1/(2K)": I, "all three": {"alpha": 0.0, "beta": 0.0, **I}}
    base = {"rows": size.rows, "batch_size": size.batch_size, "rounds": rounds, "curve": _curve(rounds)}
    return [cell(row, "PSNR", "single-loop", overrides=changed, **base) for row, changed in changes.items()]


def _horizontal(size: Size, preset) -> list[Cell]:
    """One worker, one batch of K rows, again and again: where the baselines come from."""
    found = []
    for network in ("smooth", "released"):
        for K in size.horizontal:
            base = {"rows": K, "batch_size": K, "workers": 1, "network": network}
            column = f"{network}, K = {K}"
            for method in BASELINES:
                if method != "idlg" or K == 1:
                    found.append(cell(method, column, method, schedule="fixed", rounds=size.horizontal_rounds, **base))
            if network == "released":
                found.append(cell("one-round", column, "one-round", rounds=1, schedule="fixed", **base))
    return found


_TABLES = {
    "table2": _table2, "table3": _table3, "table4": _table4, "table5": _table5, "table6": _table6, "table10": _table10, "yale": _yale,
    "variants": _variants, "floor": _floor, "horizontal": _horizontal, **defenses.TABLES,
}  # fmt: skip
