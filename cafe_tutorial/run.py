"""One attack from data to report: what the command line runs."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm

from .attack import OBJECTIVES, ExactCAFE, FewRoundsCAFE, Leak, MatchingAttack, NestedLoopsCAFE, OneRoundCAFE, PatientCAFE, SingleLoopCAFE
from .data import Images, Table, load
from .metrics import Score, score
from .options import BASELINES, EPOCHS, ITERATIONS, ITERATIVE, PATIENCE, AttackOptions, check, choose_device, defense, hyperparameters, optimizer, parties, refuse_hopeless
from .partition import ColumnPartition, GridPartition
from .protocol import VerticalFL
from .report import provenance
from .reveal import row_gradients

HELD_OUT = 1000  # rows to test a model on that is trained while it is attacked


@dataclass(frozen=True)
class Outcome:
    """What :func:`run_attack` returns; ``report`` is what ``report.json`` holds."""

    report: dict
    leak: Leak
    score: Score
    data: Images | Table
    split: GridPartition | ColumnPartition


def run_attack(options: AttackOptions) -> Outcome:
    """Load, split, run the protocol, attack, score.

    Raises ``ValueError`` (also for too few rounds) and ``FileNotFoundError`` before or after the long
    work, never with anything written.
    """
    check(options)
    options = dataclasses.replace(options, schedule=options.schedule or ("epochs" if options.method == "few-rounds" else "random"))
    device = choose_device(options.device)
    data = load(options.data, rows=options.rows, seed=options.seed, at_most=800)
    rows = len(data)
    if data.classes < 2:
        raise ValueError(f"data={data.name!r} has a single class, so its loss and every gradient are zero; at least two are needed")
    batch_size = options.batch_size if options.batch_size is not None else max(1, min(40, rows // 20))
    split, model = parties(options, data)
    settings = hyperparameters(options, data)
    parts = split.split(data.features)
    if options.method in ("exact", "patient") and 1 <= batch_size <= rows:
        refuse_hopeless(options, rows, batch_size)
    start = time.perf_counter()
    trained, known = {}, {k: v for k, v in model.parameters.items() if ".representation." in k}
    if options.pretrain:
        trained = pretrain(options, model, parts, data, batch_size, device)
    trainer = optimizer(options, model) if options.learning_rate else None
    held_out = unseen(options, data) if trainer else None
    vfl = VerticalFL(
        model, parts, data.labels, batch_size=batch_size, schedule=options.schedule, optimizer=trainer,
        below=options.method in (*ITERATIVE, *BASELINES) or (trainer is not None and options.train == "all") or options.defense is not None,
        stale=known if options.local_bottom else None, defense=defense(options), seed=options.seed, device=device,
    )  # fmt: skip
    if options.local_bottom:
        model.parameters = {**model.parameters, **known}
    leaking = torch.stack([v.norm(dim=1) > 0 for v in row_gradients(vfl)[0]], 1)

    def judge(leak: Leak) -> Score:
        return score(leak, data, split, leaking=leaking)

    def learned() -> dict:
        return progress_of(vfl, split, held_out) if trainer else {}

    curve: list[dict] = []
    if options.method == "few-rounds":
        attack = FewRoundsCAFE(model, rows=rows, seed=options.seed, progress=options.progress)
        _observe(attack, vfl, options, options.rounds or (options.epochs or EPOCHS) * -(-rows // batch_size), judge, curve, learned)
    elif options.method == "one-round":
        attack = OneRoundCAFE(model, seed=options.seed, progress=options.progress)
        _observe(attack, vfl, options, options.rounds or 1, judge, curve, learned)
    elif options.method == "patient":
        attack = PatientCAFE(model, rows=rows, rounds=options.rounds or PATIENCE * rows, seed=options.seed, progress=options.progress)
        _observe_until_ready(attack, vfl, options, attack.rounds)
    elif options.method == "exact":
        attack = ExactCAFE(model, rows=rows, seed=options.seed, progress=options.progress)
        _observe_until_ready(attack, vfl, options, options.rounds or rows + -(-rows // 20))
    else:
        attack = _iterative(options, model, rows, settings, vfl, device)
        total = (options.rounds or ITERATIONS) * (3 if options.method == "nested-loops" else 1)
        _observe(attack, vfl, options, total, judge, curve, learned)
    leak = attack.solve()
    seconds = time.perf_counter() - start
    result = judge(leak)
    report = {
        "method": options.method,
        "data": data.name,
        "data_sha256": data.sha256,
        "rows": rows,
        "workers": split.workers,
        "partition": dataclasses.asdict(split),
        "batch_size": batch_size,
        "schedule": options.schedule,
        "rounds": leak.rounds,
        "seconds": round(seconds, 2),
        **result.summary(),
        "settings": dataclasses.asdict(settings) if options.method in ITERATIVE else None,
        "d2": options.d2,
        "network": options.network,
        "double_softmax": options.double_softmax,
        "pretrain": options.pretrain,
        **trained,
        "learning_rate": options.learning_rate,
        "train": options.train,
        "optimizer": options.optimizer,
        **learned(),
        "local_bottom": options.local_bottom,
        "defense": options.defense,
        "notes": leak.notes,
        "curve": curve,
        **provenance(device, options.seed),
    }
    return Outcome(report, leak, result, data, split)


def _bar(options: AttackOptions, total: int, what: str) -> tqdm:
    slow = not sys.stderr.isatty()
    return tqdm(total=total, desc=what, unit="round", disable=not options.progress, mininterval=20 if slow else 0.1, leave=False)


def pretrain(options, model, parts, data, batch_size, device) -> dict:
    """Train Θ before the attack with Adam at 1e-3; the trained weights become the public model's."""
    vfl = VerticalFL(
        model, parts, data.labels, batch_size=batch_size, schedule="epochs", seed=options.seed + 1, device=device,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-3),
    )  # fmt: skip
    with _bar(options, options.pretrain, "training") as bar:
        for _ in vfl.rounds(options.pretrain):
            bar.update()
    model.parameters = {k: v.detach().clone() for k, v in vfl.parameters.items()}
    loss, accuracy = vfl.evaluate()
    if not math.isfinite(loss):
        raise ValueError(f"pretrain={options.pretrain}: training diverged, the loss is {loss}")
    return {"pretrain_loss": loss, "pretrain_accuracy": accuracy}


def unseen(options: AttackOptions, data: Images | Table) -> Images | Table | None:
    """At most ``HELD_OUT`` rows of the same set that are not among the attacked ones; None where none are left."""
    if data.row_numbers is None:
        return None
    whole = load(options.data)
    others = torch.ones(len(whole), dtype=torch.bool)
    others[data.row_numbers] = False
    rows = others.nonzero()[:, 0]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.seed))
    return whole.take(rows[order[:HELD_OUT]]) if len(rows) else None


def progress_of(vfl: VerticalFL, split, held_out: Images | Table | None) -> dict:
    """How well the model has learned: loss and accuracy on the training rows, and on the rows held out; None where it diverged."""
    found = {}
    for name, given in (("training", ()), *([("test", (split.split(held_out.features), held_out.labels))] if held_out is not None else [])):
        loss, accuracy = vfl.evaluate(*given)
        found[f"{name}_loss"], found[f"{name}_accuracy"] = (loss, accuracy) if math.isfinite(loss) else (None, None)
    return found


def _observe_until_ready(attack: ExactCAFE, vfl: VerticalFL, options: AttackOptions, total: int) -> None:
    asked = options.rounds if options.method == "exact" else None
    with _bar(options, total, "rounds") as bar:
        while (attack.observed < asked) if asked else not (attack.ready or attack.stalled):
            for view in vfl.rounds(1):
                attack.observe(view)
            bar.update()


def _iterative(options, model, rows, settings, vfl, device):
    common = {"rows": rows, "seed": options.seed, "device": device}
    if options.method in BASELINES:
        statistics = vfl.statistics() if OBJECTIVES[options.method].statistics else None
        return MatchingAttack(model, objective=options.method, rounds=options.rounds or ITERATIONS, statistics=statistics, **common)
    if options.method == "single-loop":
        return SingleLoopCAFE(model, settings=settings, **common)
    return NestedLoopsCAFE(model, iterations=options.rounds or ITERATIONS, settings=settings, **common)


def _observe(attack, vfl, options, total: int, judge: Callable[[Leak], Score], curve: list[dict], learned: Callable[[], dict]) -> None:
    """Run ``total`` rounds; every ``curve`` of them the score is recorded for the report, and the attack never sees it."""
    with _bar(options, total, options.method) as bar:
        for view in vfl.rounds(total):
            attack.observe(view)
            bar.update()
            if options.curve and attack.observed % options.curve == 0:
                figures = judge(attack.solve()).summary()
                kept = ("psnr_slice_mean", "psnr_slice_median", "relative_error_median", "label_accuracy")
                steps = dict(zip(("step1", "step2", "step3"), attack.objectives))
                curve.append({"rounds": attack.observed, **{k: figures[k] for k in kept}, **{k: v if math.isfinite(v) else None for k, v in steps.items()}, **learned()})
