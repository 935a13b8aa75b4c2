"""What an attack takes from the command line: its options, their checks, and the parties they describe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from .attack import OBJECTIVES, PRESETS, Hyperparameters, NotIdentifiable
from .data import Images, Table
from .defense import Defense, defense_from
from .model import VFLModel
from .partition import ColumnPartition, GridPartition
from .protocol import SCHEDULES

ITERATIONS = 8000  # of an iterative method, the paper's maximum for digits
ITERATIVE = ("single-loop", "nested-loops")
BASELINES = tuple(OBJECTIVES)
METHODS = ("exact", "patient", "few-rounds", "one-round", *ITERATIVE, *BASELINES)
PATIENCE = 10  # rounds of patient, times N
EPOCHS = 4  # of few-rounds
TRAINED = ("all", "above")
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
NETWORKS = ("released", "smooth")


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
    network: str = "released"
    double_softmax: bool = False
    pretrain: int = 0
    learning_rate: float = 0.0
    train: str = "all"
    optimizer: str = "adam"
    local_bottom: bool = False
    defense: str | None = None
    curve: int = 0
    device: str = "auto"
    seed: int = 0
    progress: bool = True


def choose_device(name: str) -> torch.device:
    """``auto`` takes a GPU where torch sees one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' was asked for, but torch sees no CUDA GPU; use auto or cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} must be auto, cpu or cuda")
    return torch.device(name)


def check(options: AttackOptions) -> None:
    for name, value, least in (("rounds", options.rounds, 1), ("epochs", options.epochs, 1), ("pretrain", options.pretrain, 0), ("curve", options.curve, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    check_seed(options.seed)
    if options.method not in ITERATIVE:
        for name, given in (("curve", options.curve and options.method not in BASELINES), ("preset", options.preset), ("set", options.overrides)):
            if given:
                whose = "the paper's schedules (single-loop, nested-loops)" + " and the baselines" * (name == "curve")
                raise ValueError(f"{name} is for {whose}; method={options.method!r} has no use for it")
    if options.epochs is not None and (options.method != "few-rounds" or options.rounds is not None):
        raise ValueError(f"epochs={options.epochs} is for method='few-rounds', in place of rounds; got method={options.method!r}, rounds={options.rounds}")
    if not 0 <= options.learning_rate < 10:
        raise ValueError(f"learning_rate={options.learning_rate} must be from 0 (Θ fixed) to below 10")
    for name, value, known in (("method", options.method, METHODS), ("schedule", options.schedule, (*SCHEDULES, None)), ("train", options.train, TRAINED), ("optimizer", options.optimizer, tuple(OPTIMIZERS)), ("network", options.network, NETWORKS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(filter(None, known))}")
    if options.local_bottom and options.method in (*ITERATIVE, *BASELINES):
        raise ValueError(f"local_bottom hides gradients that method={options.method!r} compares; use exact, patient, few-rounds or one-round")
    for name, usual in (("train", "all"), ("optimizer", "adam")):
        if getattr(options, name) != usual and not options.learning_rate:
            raise ValueError(f"{name}={getattr(options, name)!r} is for a learning_rate above 0; got learning_rate={options.learning_rate:g}")
    if options.preset is not None and options.preset not in PRESETS:
        raise ValueError(f"preset={options.preset!r} must be one of {', '.join(PRESETS)}")
    defense(options)


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be from 0 to {2**32 - 1}")


def parties(options: AttackOptions, data):
    """The partition and the public model."""
    if isinstance(data, Table):
        if options.columns is not None:
            split = ColumnPartition.widths(options.columns)
            if options.workers not in (None, split.workers):
                raise ValueError(f"workers={options.workers} and columns={options.columns} disagree; the columns name {split.workers} workers")
        else:
            split = ColumnPartition.even(data.records.shape[1], 3 if options.workers is None else options.workers)
        if options.local_bottom:
            raise ValueError("local_bottom=True: the workers of a table have no layers below the first; use images")
        if options.network != "released":
            raise ValueError(f"network={options.network!r} is for images; a table's model is fully connected, use released")
        kind = VFLModel.mlp
    else:
        if options.columns is not None:
            raise ValueError(f"columns={options.columns} is for tables; images are cut into tiles by workers=…")
        split = GridPartition.for_workers(4 if options.workers is None else options.workers, *data.images.shape[2:])
        kind = VFLModel.smooth if options.network == "smooth" else VFLModel.convolutional
    model = kind(split.part_shapes(data), classes=data.classes, d2=options.d2, seed=options.seed, double_softmax=options.double_softmax)
    return split, model


def hyperparameters(options: AttackOptions, data) -> Hyperparameters:
    colour = isinstance(data, Images) and data.images.shape[1] == 3
    base = PRESETS[options.preset or ("cifar10" if colour else "mnist")]
    known = {f.name for f in dataclasses.fields(Hyperparameters)}
    for name in options.overrides:
        if name not in known:
            raise ValueError(f"set: {name!r} is not a hyperparameter; known: {', '.join(sorted(known))}")
    return dataclasses.replace(base, **options.overrides)


def optimizer(options: AttackOptions, model: VFLModel):
    """Adam or SGD on all weights, or on those of the first layers and above."""
    chosen = [i for i, name in enumerate(model.parameters) if options.train == "all" or ".representation." not in name]
    return lambda weights: OPTIMIZERS[options.optimizer]([weights[i] for i in chosen], lr=options.learning_rate)


def defense(options: AttackOptions) -> Defense | None:
    """What the parties put between their gradients and the server, with the attack's seed."""
    return None if options.defense is None else defense_from(options.defense, seed=options.seed)


def refuse_hopeless(options: AttackOptions, rows: int, batch_size: int) -> None:
    """The schedules whose incidence matrix can never reach rank N, and fewer rounds than rows."""
    if options.rounds is not None and options.method == "patient" and options.rounds < 2 * rows:
        raise ValueError(f"rounds={options.rounds} must be at least {2 * rows} for method='patient', twice the number of rows")
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
