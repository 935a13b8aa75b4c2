"""Many attacks as one measurement: cells that are run one after another, kept as they come, and gone on with after an interruption."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..options import AttackOptions
from ..report import device_name, source, versions
from ..run import run_attack

KEPT = (
    "data", "data_sha256", "rows", "workers", "batch_size", "schedule", "rounds", "seconds", "psnr_slice_mean", "psnr_slice_median",
    "psnr_image_median", "ssim_mean", "label_accuracy", "slices_leaking", "slices_certified", "certified_psnr_min", "certified_false",
    "defense", "pretrain", "pretrain_accuracy", "learning_rate", "optimizer", "training_loss", "training_accuracy", "test_loss", "test_accuracy",
    "settings", "notes",
)  # fmt: skip
SPREAD = ("psnr_slice_mean", "psnr_slice_median", "label_accuracy", "training_loss", "training_accuracy", "test_accuracy", "seconds")
TIMES = ("seconds",)  # what another run of the same command may change


@dataclass(frozen=True)
class Cell:
    """One attack of a table: ``row`` and ``column`` name its place, ``options`` are those of ``attack``; ``levels`` in dB
    and ``epochs`` are read off the recorded curve afterwards."""

    row: str
    column: str
    seed: int
    options: dict
    levels: tuple[float, ...] = ()
    epochs: tuple[int, ...] = ()


def cell(row: str, column: str, method: str, **options) -> Cell:
    return Cell(row, column, 0, {"method": method, **options})


@dataclass
class Unfinished:
    """The cells done so far, in a file beside the result: the first line says of which measurement, then a line a cell."""

    file: Path | None
    what: dict
    done: list[dict] = field(default_factory=list)

    def read(self) -> None:
        """Take up what an interrupted run left; a last line that was cut short is cut off. Nothing else in the file is touched."""
        if self.file is None or not self.file.exists():
            return
        lines, good, content = [], 0, self.file.read_bytes()
        for raw in content.splitlines(keepends=True):
            line = _record(raw)
            if line is None:
                break
            lines.append(line)
            good += len(raw)
        if not lines and b"\n" in content or lines and "experiment" not in lines[0]:
            raise ValueError(f"out: {self.file.name} is no unfinished run; name another file, or move that one")
        if lines:
            self._check(lines[0])
        self.done = lines[1:]
        if good < len(content):
            os.truncate(self.file, good)

    def _check(self, kept: dict) -> None:
        differing = [k for k in self.what if kept.get(k) != self.what[k]]
        if differing:
            told = ", ".join(f"{k}={kept.get(k)!r} there and {self.what[k]!r} here" for k in differing if k not in ("cells", "source")) or ("the package has changed" if "source" in differing else "the attacks differ")
            raise ValueError(f"out: {self.file.name} holds an unfinished run with other options ({told}); repeat those, name another file, or remove it")

    def add(self, result: dict) -> None:
        """Keep one more attack."""
        self.done.append(result)
        if self.file is None:
            return
        with open(self.file, "a") as stream:
            new = stream.tell() == 0
            stream.writelines(json.dumps(line) + "\n" for line in ([self.what] if new else []) + [result])
            stream.flush()
            os.fsync(stream.fileno())

    def remove(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def kept_beside(out: Path) -> Path:
    """Where the attacks for the result ``out`` are kept until all are done."""
    return out.with_name(out.name + ".unfinished")


def _record(raw: bytes) -> dict | None:
    """A whole line as the object it holds; None for anything else."""
    try:
        line = json.loads(raw) if raw.endswith(b"\n") else None
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


class Interrupted(KeyboardInterrupt):
    """Interrupted with something kept."""


def run_cells(
    cells: Sequence[Cell], what: dict, *, device: torch.device, out: Path | None = None, progress: bool = True,
    attack: Callable[[AttackOptions], object] = run_attack,
) -> tuple[dict, Unfinished]:  # fmt: skip
    """Run the cells that are not done yet.

    what : names the measurement; an unfinished run of another one is refused. out : the result's file, beside which
    the cells done are kept until the result is in place; None keeps nothing. Returns the result without its
    provenance, and the record of cells, to be removed once the result is written.
    """
    place = {"versions": versions(), "source": source(), "device": device_name(device)}
    identity = {**what, **place, "cells": [dataclasses.asdict(c) for c in cells]}
    record = Unfinished(None if out is None else kept_beside(out), json.loads(json.dumps(identity)))
    record.read()
    try:
        with tqdm(total=len(cells), initial=len(record.done), desc=what["experiment"], unit="attack", disable=not progress) as bar:
            for cell in cells[len(record.done):]:
                bar.set_postfix_str(f"{cell.row}, {cell.column}")
                record.add(_result(cell, attack(AttackOptions(**cell.options, seed=cell.seed, device=device.type, progress=False)).report))
                bar.update()
    except KeyboardInterrupt as stop:
        if record.file is None or not record.done:
            raise
        raise Interrupted(f"{len(record.done)} of {len(cells)} attacks are kept in {record.file.name}; the same command goes on from there") from stop
    return {**what, "cells": record.done, "summary": summary(record.done)}, record


def _result(cell: Cell, report: dict) -> dict:
    """What a table keeps of one report."""
    found = {"row": cell.row, "column": cell.column, "method": report["method"], "seed": cell.seed, **{k: report.get(k) for k in KEPT}}
    if report.get("curve"):
        found["curve"] = report["curve"]
    if cell.levels:
        found["rounds_to"] = {str(level): rounds_to(report["curve"], level) for level in cell.levels}
    if cell.epochs:
        batches = -(-report["rows"] // report["batch_size"])
        found["at_epochs"] = {str(e): at_rounds(report["curve"], e * batches) for e in cell.epochs}
    return json.loads(json.dumps(found))


def rounds_to(curve: list[dict], level: float) -> int | None:
    """The first recorded round whose mean PSNR is at least ``level`` dB; None where none is."""
    return next((point["rounds"] for point in curve if point["psnr_slice_mean"] >= level), None)


def at_rounds(curve: list[dict], rounds: int) -> float | None:
    """The recorded mean PSNR after ``rounds`` rounds; None where that round was not recorded."""
    return next((point["psnr_slice_mean"] for point in curve if point["rounds"] == rounds), None)


def summary(cells: list[dict]) -> list[dict]:
    """Mean and standard deviation over the seeds, and the certified share, for each place of the table."""
    places = list(dict.fromkeys((c["row"], c["column"]) for c in cells))
    table = []
    for row, column in places:
        own = [c for c in cells if (c["row"], c["column"]) == (row, column)]
        entry = {"row": row, "column": column, "seeds": [c["seed"] for c in own]}
        for name in SPREAD:
            values = [c[name] for c in own if c.get(name) is not None]
            entry[name] = statistics.fmean(values) if values else None
            entry[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else None
        leaking, certified = (sum(c[f"slices_{kind}"] for c in own) for kind in ("leaking", "certified"))
        entry["certified_share"] = certified / leaking if leaking else None
        table.append(entry)
    return table


def without_times(result: dict) -> dict:
    """A result without what another run of the same command may change."""
    def clean(thing):
        if isinstance(thing, dict):
            return {k: clean(v) for k, v in thing.items() if k.removesuffix("_sd") not in (*TIMES, "date")}
        return [clean(v) for v in thing] if isinstance(thing, list) else thing

    return clean(result)
