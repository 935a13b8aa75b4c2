"""Where a result comes from, and writing it so that no half of it is ever seen."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from .data import Table


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    names = ("cafe-tutorial", "torch", "torchvision", "numpy", "scikit-learn", "scikit-image", "mlxtend")
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def source() -> str:
    """sha256 of the package's own files."""
    whole = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        whole.update(file.read_bytes())
    return whole.hexdigest()


OUTPUTS = ("leak.npz", "leak.png", "report.json")  # in the order in which they are put in place


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"


def provenance(device: torch.device, seed: int, command: str | None = None) -> dict:
    """Where a result comes from: command, seed, device, versions and date."""
    own = {"device": device_name(device), "seed": seed, "versions": versions(), "date": datetime.date.today().isoformat()}
    return {"command": command, **own} if command else own


@contextlib.contextmanager
def put_in_place(folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """A scratch folder to write ``names`` into; each replaces its namesake in ``folder``, in order, once all are whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as scratch:
        yield Path(scratch)
        for name in names:
            os.replace(Path(scratch) / name, folder / name)


def check_output(path: str | os.PathLike) -> None:
    """Find out before the long work whether ``path`` can become or is a writable folder; leaves nothing behind."""
    target = Path(path).absolute()
    try:
        existing = next(p for p in (target, *target.parents) if p.exists() or p.is_symlink())
        with tempfile.TemporaryFile(dir=existing):
            pass
        if not str(path) or len(os.fsencode(target.name)) > 255:
            raise OSError(None, "no name" if not str(path) else "name too long")
        taken = [name for name in OUTPUTS if (target / name).is_dir()]
    except OSError as error:
        raise ValueError(f"out={str(path)!r} cannot be written ({error.strerror}); name a folder that can") from error
    if taken:
        raise ValueError(f"out={str(path)!r} holds a folder named {taken[0]}; name another folder, or move that one")


def write_outputs(path: str | os.PathLike, outcome) -> None:
    """``leak.npz``, ``leak.png`` and ``report.json`` into the folder ``path``, each whole, the report last."""
    from . import plots

    leak, data, split = outcome.leak.to("cpu"), outcome.data, outcome.split
    recovered = split.merge(leak.slices)
    arrays = {
        "recovered": recovered.numpy(), "labels": leak.labels.numpy(), "label_values": np.array(data.label_values),
        "leaks": leak.leaks.numpy(), "certified": leak.certified.numpy(), "residual": leak.residual.numpy(),
        "row_numbers": (data.row_numbers if leak.numbers is None else data.row_numbers[leak.numbers]).numpy(),
    }  # fmt: skip
    if isinstance(data, Table):
        arrays["recovered_original_units"] = data.original_units(recovered.double()).numpy()
        arrays["columns"] = np.array(data.columns)
    with put_in_place(Path(path), OUTPUTS) as folder:
        np.savez_compressed(folder / "leak.npz", **arrays)
        plots.true_beside_recovered(leak, data, split).savefig(folder / "leak.png", dpi=150, facecolor="white", bbox_inches="tight")
        (folder / "report.json").write_text(json.dumps(outcome.report, indent=2, allow_nan=False) + "\n")
