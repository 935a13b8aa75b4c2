"""What ``experiment`` does: check the options, measure, put the JSON in place with its provenance."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
from pathlib import Path

from ..attack import PRESETS
from ..checks import whole_numbers
from ..data import Table, load
from ..options import check_seed, choose_device
from ..report import check_output, provenance, put_in_place
from . import tables
from .sweep import Interrupted, Unfinished, kept_beside, run_cells
from .training import measure

FIXED = ("certificates", "span-certificates")  # one size, one seed
MEASURED = ("labels", "order", "speed")  # by size, without attacks to go on with
SIZED = (*tables.NAMES, *MEASURED)
HELP = {
    "table2": "CAFE and the baselines in the same loop", "table3": "batch sizes", "table4": "the terms of eq. 9, one set to zero at a time",
    "table5": "single against nested loops", "table6": "4 and 16 workers", "table10": "epochs by batch size", "yale": "faces",
    "variants": "what holds the single loop back", "floor": "what bounds it after many rounds", "horizontal": "the baselines on one batch of one worker", "defenses": "defences against attacks that do not know them", "fakes": "with and without fake gradients, by each reading",
    "table7": "attacked while training, by learning rate", "table8": "the attack and the training on one curve", "trained": "attacks on trained models",
    "learning": "training under every defence", "accuracy": "training with and without fake gradients", "averaging": "noise against rounds", "order": "slices from fake gradients, by their order and by their uncut entries", "tradeoff": "noise against accuracy",
    "labels": "class counts from one batch, labels from many",
    "speed": "an iteration's time by workers, steps I and III, whole attacks by rows", "certificates": "the exact attack's certified slices against the truth",
    "span-certificates": "the same for few-rounds and one-round",
}  # fmt: skip


def add_arguments(e: argparse.ArgumentParser) -> None:
    e.add_argument("name", choices=tuple(HELP), metavar="NAME", help="; ".join(f"{k}: {v}" for k, v in HELP.items()))
    e.add_argument("--size", choices=tuple(tables.SIZES), help="smoke takes seconds, laptop minutes on two cores, paper has the paper's sizes and is meant for a GPU (default: laptop)")
    e.add_argument("--data", metavar="NAME|PATH", help="what is attacked, as for attack (default: mnist-sample; digits for horizontal and for smoke)")
    e.add_argument("--preset", help="table 9's hyperparameters, as for attack")
    e.add_argument("--seeds", type=lambda text: tuple(whole_numbers(text, "0,1,2")), metavar="S1,S2,…", help="seeds of the fast methods; the slow ones take the first, and under defences all but exact do (default: 0,1,2; order: 3,4,5; smoke: 0)")
    e.add_argument("--methods", type=lambda text: tuple(part.strip() for part in text.split(",")), metavar="M1,M2,…", help="only these methods of a table")
    e.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    e.add_argument("--seed", type=int, help=f"for {', '.join(FIXED)} (default: 0)")
    e.add_argument("--out", metavar="FILE", help="JSON file to write (default: print only); a table's attacks are kept in FILE.unfinished until all are done, and the same command goes on from there")
    e.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out) if arguments.out else None
    device = choose_device(arguments.device)
    _check(arguments)
    if out is not None:
        _check_out(arguments, out)
    record = Unfinished(None, {})
    if arguments.name in SIZED:
        result, record = _sized(arguments, device, out)
    else:
        module = importlib.import_module(f".{arguments.name.replace('-', '_')}", __package__)
        result = module.run(device=device, seed=arguments.seed or 0, progress=not arguments.quiet)
    seed = (arguments.seeds or result.get("seeds") or (arguments.seed or 0,))[0]
    try:
        return _put(arguments, out, result, device, seed, record)
    except KeyboardInterrupt as stop:
        if record.file is None or not record.file.exists():
            raise
        raise Interrupted(f"all attacks are kept in {record.file.name}; the same command writes the result") from stop


def _put(arguments, out: Path | None, result: dict, device, seed: int, record: Unfinished) -> int:
    """Print the result or put it in place, and clear the record of its attacks."""
    text = json.dumps({**result, **provenance(device, seed, command(arguments))}, indent=2, allow_nan=False) + "\n"
    if out is None:
        print(text, end="")
        return 0
    with put_in_place(out.absolute().parent, (out.name,)) as folder:
        (folder / out.name).write_text(text)
    record.remove()
    print(f"written  {out}")
    return 0


def _check_out(arguments: argparse.Namespace, out: Path) -> None:
    """Whether the result and its unfinished record can be written where they are to be."""
    kept = kept_beside(out)
    if len(os.fsencode(kept.name)) > 255:
        raise ValueError(f"out={arguments.out!r} has too long a name; .unfinished is added to it while the work lasts")
    for path in (out, kept):
        if path.is_dir():
            raise ValueError(f"out={arguments.out!r}: {path.name} is a folder; name another file")
    check_output(out.absolute().parent)


def _check(arguments: argparse.Namespace) -> None:
    given = {k: getattr(arguments, k) for k in ("size", "data", "preset", "seeds", "methods") if getattr(arguments, k) is not None}
    if arguments.name in FIXED and given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}={value!r} is for {', '.join(SIZED)}; {arguments.name} has no use for it")
    if arguments.name in SIZED and arguments.seed is not None:
        raise ValueError(f"seed={arguments.seed} is for {', '.join(FIXED)}; use seeds={arguments.seed}")
    for name in ("methods", "preset"):
        if arguments.name in MEASURED and name in given:
            raise ValueError(f"{name}={given[name]!r} is for {', '.join(tables.NAMES)}; {arguments.name} has no use for it")
    if len(set(arguments.seeds or ())) < len(arguments.seeds or ()):
        raise ValueError(f"seeds={arguments.seeds} must be different; the same seed gives the same attack")
    if arguments.preset is not None and arguments.preset not in PRESETS:
        raise ValueError(f"preset={arguments.preset!r} must be one of {', '.join(PRESETS)}")
    for seed in (*(arguments.seeds or ()), arguments.seed or 0):
        check_seed(seed)


def _sized(arguments, device, out: Path | None) -> tuple[dict, Unfinished]:
    size, progress = arguments.size or "laptop", not arguments.quiet
    small = arguments.name == "horizontal" or size == "smoke"
    data = arguments.data if arguments.data is not None else "digits" if small else "mnist-sample"
    if arguments.name == "yale" and size != "smoke" and arguments.data is None:
        raise ValueError("data: yale is about faces, which no package ships; name a file of them with --data, images (165, 32, 32) and labels")
    images = load(data)  # a wrong name or file is told at once
    if isinstance(images, Table):
        raise ValueError(f"data={data!r} is a table; the experiments are about images")
    preset = arguments.preset or ("cifar10" if images.images.shape[1] == 3 else "mnist")
    if arguments.name in MEASURED:
        module = importlib.import_module(f".{arguments.name}", __package__)
        result = module.run(device=device, size=size, data=data, seeds=arguments.seeds, progress=progress)
        return {"experiment": arguments.name, "size": size, **result}, Unfinished(None, {})
    chosen = tables.cells(arguments.name, size=size, data=data, preset=preset, seeds=arguments.seeds, methods=arguments.methods)
    what = {
        "experiment": arguments.name, "size": size, "data": images.name, "data_sha256": images.sha256, "preset": preset,
        "seeds": sorted({c.seed for c in chosen}), "methods": arguments.methods,
    }  # fmt: skip
    if out is not None:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    return run_cells(chosen, what, device=device, out=None if out is None else out.absolute(), progress=progress, attack=measure)


def command(arguments: argparse.Namespace) -> str:
    """The command again, without the output file, and with the data's name for its path."""
    parts = [f"cafe-tutorial experiment {arguments.name}"]
    for name in ("size", "data", "preset", "seeds", "methods", "seed"):
        value = getattr(arguments, name)
        if value is not None:
            text = Path(value).name if name == "data" else ",".join(map(str, value)) if isinstance(value, tuple) else value
            parts.append(f"--{name} {shlex.quote(str(text))}")
    return " ".join([*parts, f"--device {arguments.device}"])
