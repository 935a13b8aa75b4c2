"""How often a certificate is wrong: the exact attack over many settings, certified slices against the truth."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from tqdm.auto import tqdm

from ..options import AttackOptions
from ..run import run_attack


@dataclass(frozen=True)
class Setting:
    """One attack to judge; ``pretrain`` steps of Adam at 1e-3 come first. ``epochs`` are those of few-rounds."""

    data: str
    rows: int
    batch_size: int
    workers: int | None = None
    columns: tuple[int, ...] | None = None
    d2: int = 256
    pretrain: int = 0
    method: str = "exact"
    epochs: int | None = None
    schedule: str | None = None
    seeds: int = 1


SETTINGS = (
    Setting("breast-cancer", 569, 28, columns=(5, 10, 15), seeds=2),
    Setting("breast-cancer", 569, 28, columns=(5, 10, 15), pretrain=300),
    Setting("digits", 600, 30, workers=4, seeds=2),
    Setting("digits", 300, 10, workers=4, d2=32, pretrain=100),
    Setting("mnist-sample", 400, 20, workers=4, seeds=2),
    Setting("mnist-sample", 200, 20, workers=16),
    Setting("mnist-sample", 200, 20, workers=4, pretrain=60),
    Setting("mnist-sample", 60, 40, workers=1),
    Setting("photos", 24, 4, workers=4, seeds=2),
)


def run(*, device: torch.device, seed: int = 0, progress: bool = True, settings: tuple[Setting, ...] = SETTINGS) -> dict:
    """Attack every setting and count.

    Returns the counts by setting, and their sums: slices, those that leak, those certified, and *false*, the
    certified ones truly below 60 dB (for tables: off by more than 1e-4 of their norm, what a certificate allows).
    """
    rows = []
    runs = [(s, seed + k) for s in settings for k in range(s.seeds)]
    for setting, own_seed in tqdm(runs, desc="certificates", unit="attack", leave=False, disable=not progress):
        columns = list(setting.columns) if setting.columns else None
        chosen = {k: v for k, v in asdict(setting).items() if k not in ("seeds", "columns")}
        outcome = run_attack(AttackOptions(**chosen, columns=columns, device=device.type, seed=own_seed, progress=False))
        score, certified = outcome.score, outcome.score.certified
        rows.append({
            **chosen, "columns": columns, "seed": own_seed, "slices": certified.numel(), "leak": int(score.leaks.sum()),
            "certified": int(certified.sum()), "false": int(score.false.sum()),
            "worst_psnr": outcome.report["certified_psnr_min"], "worst_error": outcome.report["certified_error_max"],
        })  # fmt: skip
    total = {name: sum(row[name] for row in rows) for name in ("slices", "leak", "certified", "false")}
    return {**total, "settings": rows}
