"""What a defence costs: the model trained with what the server receives, without an attack."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from ..data import load
from ..options import AttackOptions, choose_device, defense, optimizer, parties
from ..protocol import VerticalFL
from ..run import progress_of, run_attack, unseen


@dataclass(frozen=True)
class Trained:
    """``report`` is what a cell keeps; ``curve`` in it has the model's progress."""

    report: dict


def measure(options: AttackOptions):
    """A cell's attack, or its training."""
    return train(options) if options.method == "training" else run_attack(options)


def train(options: AttackOptions) -> Trained:
    """``options.rounds`` rounds with batches of ``options.batch_size``, both given; the progress every ``options.curve`` of them; a training that diverges ends there."""
    device, data = choose_device(options.device), load(options.data, rows=options.rows, seed=options.seed)
    split, model = parties(options, data)
    held_out, start = unseen(options, data), time.perf_counter()
    vfl = VerticalFL(
        model, split.split(data.features), data.labels, batch_size=options.batch_size, schedule="epochs", optimizer=optimizer(options, model),
        defense=defense(options), seed=options.seed, device=device,
    )  # fmt: skip
    curve = [{"rounds": 0, **progress_of(vfl, split, held_out)}]
    for view in vfl.rounds(options.rounds):
        if (view.round + 1) % (options.curve or options.rounds) and view.round + 1 < options.rounds:
            continue
        curve.append({"rounds": view.round + 1, **progress_of(vfl, split, held_out)})
        if curve[-1]["training_loss"] is None:
            break
    last = {k: v for k, v in curve[-1].items() if k != "rounds"}
    return Trained({
        **dataclasses.asdict(options), "data": data.name, "data_sha256": data.sha256, "workers": split.workers, "schedule": "epochs", "rounds": curve[-1]["rounds"],
        "seconds": round(time.perf_counter() - start, 2), "curve": curve, **last, "slices_leaking": 0, "slices_certified": 0, "certified_false": 0,
        "notes": [] if last["training_loss"] is not None else ["the training diverged"],
    })  # fmt: skip
