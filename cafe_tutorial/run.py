"""One attack from data to report: what the command line runs."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tqdm.auto import tqdm

from .attack import PRESETS, ExactCAFE, FewRoundsCAFE, Hyperparameters, Leak, NestedLoopsCAFE, NotIdentifiable, OneRoundCAFE, SingleLoopCAFE
from .data import Images, Table, load
from .metrics import Score, score
from .model import VFLModel
from .partition import ColumnPartition, GridPartition
from .protocol import SCHEDULES, VerticalFL
from .report import provenance
from .reveal import row_gradients

ITERATIONS = 8000  # of an iterative method, the paper's maximum for digits
ITERATIVE = ("single-loop", "nested-loops")
METHODS = ("exact", "few-rounds", "one-round", *ITERATIVE)
EPOCHS = 4  # of few-rounds
TRAINED = ("all", "above")


@dataclass
class AttackOptions:
    """What ``attack`` takes; None means the default that fits the data: see ``--help``."""

    data: str = "mnist-sample"
    rows: int | None = None
    workers: int | None = None
    columns: list[int] | None = None
    batch_size: int | None = None
    method: str = "exact"
    rounds: int | None = None
    epochs: int | None = None
    schedule: str | None = None
    preset: str | None = None
    overrides: dict[str, float] = field(default_factory=dict)
    d2: int = 256
    double_softmax: bool = False
    pretrain: int = 0
    learning_rate: float = 0.0
    train: str = "all"
    curve: int = 0
    device: str = "auto"
    seed: int = 0
    progress: bool = True


@dataclass(frozen=True)
class Outcome:
    """What :func:`run_attack` returns; ``report`` is what ``report.json`` holds."""

    report: dict
    leak: Leak
    score: Score
    data: Images | Table
    split: GridPartition | ColumnPartition


def choose_device(name: str) -> torch.device:
    """``auto`` takes a GPU where torch sees one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' was asked for, but torch sees no CUDA GPU; use auto or cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} must be auto, cpu or cuda")
    return torch.device(name)


def run_attack(options: AttackOptions) -> Outcome:
    """Load, split, run the protocol, attack, score.

    Raises ``ValueError`` (also for too few rounds) and ``FileNotFoundError`` before or after the long
    work, never with anything written.
    """
    _check(options)
    options = dataclasses.replace(options, schedule=options.schedule or ("epochs" if options.method == "few-rounds" else "random"))
    device = choose_device(options.device)
    data = load(options.data, rows=options.rows, seed=options.seed, at_most=800)
    rows = len(data)
    if data.classes < 2:
        raise ValueError(f"data={data.name!r} has a single class, so its loss and every gradient are zero; at least two are needed")
    batch_size = options.batch_size if options.batch_size is not None else max(1, min(40, rows // 20))
    split, model = _parties(options, data)
    settings = _settings(options, data)
    parts = split.split(data.features)
    if options.method == "exact" and 1 <= batch_size <= rows:
        _refuse_hopeless(options, rows, batch_size)
    start = time.perf_counter()
    trained = {}
    if options.pretrain:
        trained = _pretrain(options, model, parts, data, batch_size, device)
    optimizer = _optimizer(options, model) if options.learning_rate else None
    vfl = VerticalFL(
        model, parts, data.labels, batch_size=batch_size, schedule=options.schedule, optimizer=optimizer,
        below=options.method in ITERATIVE or (optimizer is not None and options.train == "all"), seed=options.seed, device=device,
    )  # fmt: skip
    leaking = torch.stack([v.norm(dim=1) > 0 for v in row_gradients(vfl)[0]], 1)

    def judge(leak: Leak) -> Score:
        return score(leak, data, split, leaking=leaking)

    curve: list[dict] = []
    if options.method == "few-rounds":
        attack = FewRoundsCAFE(model, rows=rows, seed=options.seed, progress=options.progress)
        _observe(attack, vfl, options, options.rounds or (options.epochs or EPOCHS) * -(-rows // batch_size), judge, curve)
    elif options.method == "one-round":
        attack = OneRoundCAFE(model, seed=options.seed, progress=options.progress)
        _observe(attack, vfl, options, options.rounds or 1, judge, curve)
    elif options.method == "exact":
        attack = ExactCAFE(model, rows=rows, seed=options.seed, progress=options.progress)
        _observe_exact(attack, vfl, options)
    else:
        attack = _iterative(options, model, rows, settings, device)
        total = (options.rounds or ITERATIONS) * (3 if options.method == "nested-loops" else 1)
        _observe(attack, vfl, options, total, judge, curve)
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
        "double_softmax": options.double_softmax,
        "pretrain": options.pretrain,
        **trained,
        "learning_rate": options.learning_rate,
        "train": options.train,
        "notes": leak.notes,
        "curve": curve,
        **provenance(device, options.seed),
    }
    return Outcome(report, leak, result, data, split)


def _check(options: AttackOptions) -> None:
    for name, value, least in (("rounds", options.rounds, 1), ("epochs", options.epochs, 1), ("pretrain", options.pretrain, 0), ("curve", options.curve, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    check_seed(options.seed)
    if options.method not in ITERATIVE:
        for name, given in (("curve", options.curve), ("preset", options.preset), ("set", options.overrides)):
            if given:
                raise ValueError(f"{name} is for the iterative methods (single-loop, nested-loops); method={options.method!r} has no use for it")
    if options.epochs is not None and (options.method != "few-rounds" or options.rounds is not None):
        raise ValueError(f"epochs={options.epochs} is for method='few-rounds', in place of rounds; got method={options.method!r}, rounds={options.rounds}")
    if not 0 <= options.learning_rate < 10:
        raise ValueError(f"learning_rate={options.learning_rate} must be from 0 (Θ fixed) to below 10")
    for name, value, known in (("method", options.method, METHODS), ("schedule", options.schedule, (*SCHEDULES, None)), ("train", options.train, TRAINED)):
        if value not in known:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(filter(None, known))}")
    if options.preset is not None and options.preset not in PRESETS:
        raise ValueError(f"preset={options.preset!r} must be one of {', '.join(PRESETS)}")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be from 0 to {2**32 - 1}")


def _parties(options: AttackOptions, data):
    """The partition and the public model."""
    if isinstance(data, Table):
        if options.columns is not None:
            split = ColumnPartition.widths(options.columns)
            if options.workers not in (None, split.workers):
                raise ValueError(f"workers={options.workers} and columns={options.columns} disagree; the columns name {split.workers} workers")
        else:
            split = ColumnPartition.even(data.records.shape[1], 3 if options.workers is None else options.workers)
        kind = VFLModel.mlp
    else:
        if options.columns is not None:
            raise ValueError(f"columns={options.columns} is for tables; images are cut into tiles by workers=…")
        split = GridPartition.for_workers(4 if options.workers is None else options.workers, *data.images.shape[2:])
        kind = VFLModel.convolutional
    model = kind(split.part_shapes(data), classes=data.classes, d2=options.d2, seed=options.seed, double_softmax=options.double_softmax)
    return split, model


def _settings(options: AttackOptions, data) -> Hyperparameters:
    colour = isinstance(data, Images) and data.images.shape[1] == 3
    base = PRESETS[options.preset or ("cifar10" if colour else "mnist")]
    known = {f.name for f in dataclasses.fields(Hyperparameters)}
    for name in options.overrides:
        if name not in known:
            raise ValueError(f"set: {name!r} is not a hyperparameter; known: {', '.join(sorted(known))}")
    return dataclasses.replace(base, **options.overrides)


def _bar(options: AttackOptions, total: int, what: str) -> tqdm:
    slow = not sys.stderr.isatty()
    return tqdm(total=total, desc=what, unit="round", disable=not options.progress, mininterval=20 if slow else 0.1, leave=False)


def _pretrain(options, model, parts, data, batch_size, device) -> dict:
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


def _optimizer(options: AttackOptions, model: VFLModel):
    """Adam on all weights, or on those of the first layers and above."""
    chosen = [i for i, name in enumerate(model.parameters) if options.train == "all" or ".representation." not in name]
    return lambda weights: torch.optim.Adam([weights[i] for i in chosen], lr=options.learning_rate)


def _refuse_hopeless(options: AttackOptions, rows: int, batch_size: int) -> None:
    """The schedules whose incidence matrix can never reach rank N, and fewer rounds than rows."""
    if options.rounds is not None and options.rounds < rows:
        raise NotIdentifiable(
            f"rounds={options.rounds} bring a rank of {options.rounds} at the most, and {rows} rows are unknown: "
            f"at least {rows - options.rounds} more rounds are needed"
        )
    batches = -(-rows // batch_size)
    repeated = batches if options.schedule == "fixed" else 1 if batch_size == rows else rows
    if repeated < rows:
        reason = "K = N: every batch holds all rows" if batch_size == rows else "fixed batches repeat themselves"
        raise NotIdentifiable(
            f"batch_size={batch_size}, schedule={options.schedule!r}: {reason}, so the incidence matrix stays at rank {repeated} "
            f"of {rows} rows and step I has no unique solution; use a redrawn schedule (random, epochs) and batch_size below {rows}"
        )


def _observe_exact(attack: ExactCAFE, vfl: VerticalFL, options: AttackOptions) -> None:
    with _bar(options, options.rounds or vfl.rows + -(-vfl.rows // 20), "rounds") as bar:
        while (attack.observed < options.rounds) if options.rounds else not (attack.ready or attack.stalled):
            for view in vfl.rounds(1):
                attack.observe(view)
            bar.update()


def _iterative(options, model, rows, settings, device):
    common = {"rows": rows, "settings": settings, "seed": options.seed, "device": device}
    if options.method == "single-loop":
        return SingleLoopCAFE(model, **common)
    return NestedLoopsCAFE(model, iterations=options.rounds or ITERATIONS, **common)


def _observe(attack, vfl, options, total: int, judge: Callable[[Leak], Score], curve: list[dict]) -> None:
    """Run ``total`` rounds; every ``curve`` of them the score is recorded for the report, and the attack never sees it."""
    with _bar(options, total, options.method) as bar:
        for view in vfl.rounds(total):
            attack.observe(view)
            bar.update()
            if options.curve and attack.observed % options.curve == 0:
                figures = judge(attack.solve()).summary()
                kept = ("psnr_slice_mean", "psnr_slice_median", "relative_error_median", "label_accuracy")
                steps = dict(zip(("step1", "step2", "step3"), attack.objectives))
                curve.append({"rounds": attack.observed, **{k: figures[k] for k in kept}, **{k: v if math.isfinite(v) else None for k, v in steps.items()}})
