"""Results of ``tables`` as text, beside the paper's values."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from .paper import PAPER

WIDE = 77  # characters that a page shows
LABELS = {
    "dlg": "DLG", "idlg": "iDLG", "cosine": "cosine", "sapag": "SAPAG", "bn": "BN regularizer", "gc": "GC regularizer",
    "single-loop": "CAFE, single loop", "nested-loops": "CAFE, nested loops",
    "both, step II at three times its rate": "both, step II 3 times as fast", "both, step III at three times its rate": "both, step III 3 times as fast",
}  # fmt: skip


def beside(result: dict, like: str | None = None) -> str:
    """One line a place: the paper's PSNR, ours (mean of the slices, then over seeds, with the standard deviation), labels,
    certified share of the slices that leak, seconds.

    result : a results file of a table; like : the paper's data set to set beside it, ``mnist``, ``cifar10`` or ``linnaeus5``
    """
    paper = PAPER.get(result["experiment"], {}).get(like, {})
    head = f"{'':34}{'paper':>6}{'ours':>7}{'±':>5}{'seeds':>6}{'labels':>7}{'cert.':>6}{'s':>5}"
    lines = [head]
    several = len({e["column"] for e in result["summary"]}) > 1
    for entry in result["summary"]:
        place = LABELS.get(entry["row"], entry["row"]) + (f", {entry['column']}" if several else "")
        known = paper.get((entry["row"], entry["column"]))
        spread = entry["psnr_slice_mean_sd"]
        lines.append(
            f"{place:34}{_told(known, '.2f'):>6}{_told(entry['psnr_slice_mean'], '.1f'):>7}{_told(spread, '.1f'):>5}"
            f"{len(entry['seeds']):6}{_told(entry['label_accuracy'], '.0%'):>7}{_told(entry['certified_share'] or 0.0, '.0%'):>6}{entry['seconds']:5.0f}"
        )
    return "\n".join(lines)


def scored(report: dict) -> str:
    """One attack on a line: PSNR in the median of the slices, certificates, labels.

    report : of :func:`~cafe_tutorial.run.run_attack`, the summary of a score, or a cell of a results file
    """
    certificates = f"{report['slices_certified']} of {report['slices_leaking']} certified"
    wrong = f" ({report['certified_false']} falsely)" if report["certified_false"] else ""
    return f"{report['psnr_slice_median']:5.1f} dB, {certificates}{wrong}, labels {report['label_accuracy']:.0%}"


def grid(result: dict, group: str = "", value: str = "psnr_slice_mean") -> str:
    """PSNR by row and column of a table, mean over slices and seeds; columns that do not fit side by side follow below.

    group : only the columns whose name begins with it, shown without it; value : another figure of the summary, a share
    """
    form = ".1f" if value.startswith("psnr") else ".0%"
    columns = list(dict.fromkeys(e["column"] for e in result["summary"] if e["column"].startswith(group)))
    rows = list(dict.fromkeys(e["row"] for e in result["summary"] if e["column"] in columns))
    values = {(e["row"], e["column"]): e[value] for e in result["summary"]}
    name, width = max(len(LABELS.get(r, r)) for r in rows) + 1, max(8, *(len(c) - len(group) + 2 for c in columns))
    several, lines = max(1, (WIDE - name) // width), []
    for start in range(0, len(columns), several):
        block = columns[start : start + several]
        lines.append(" " * name + "".join(f"{c.removeprefix(group):>{width}}" for c in block))
        for row in rows:
            cells = [values.get((row, c)) for c in block]
            if any(v is not None for v in cells):
                lines.append(f"{LABELS.get(row, row):{name}}" + "".join(f"{_told(v, form):>{width}}" for v in cells))
    return "\n".join(lines)


def learned(result: dict, rows: Sequence[str] | None = None, what: str = "training_loss") -> str:
    """A training's progress by row of ``learning``: ``what`` at each recorded round, and the accuracies at the end.

    rows : only these, in this order
    """
    cells = {c["row"]: c for c in result["cells"]}
    chosen = [cells[row] for row in rows or cells]
    rounds = [point["rounds"] for point in max((c["curve"] for c in chosen), key=len)]
    lines = [f"{what.replace('_', ' '):30}" + "".join(f"{t:>6}" for t in rounds) + f"{'training':>9}{'test':>6}"]
    for c in chosen:
        values = [point[what] for point in c["curve"]]
        told = "".join(f"{'-' if v is None else f'{v:.2f}' if v < 100 else f'{v:.0e}':>6}" for v in [*values, *[None] * (len(rounds) - len(values))])
        ends = "".join(f"{'-' if v is None else f'{v:.0%}':>{w}}" for v, w in ((c["training_accuracy"], 9), (c["test_accuracy"], 6)))
        lines.append(f"{c['row']:30}{told}{ends}")
    return "\n".join(lines)


def shields(attacks: dict, slow: dict, learning: dict) -> str:
    """Every defence on a line: PSNR under each attack, and of the exact attack the certified share and the labels; false
    certificates of all attacks; and the accuracy of a model that was trained under the defence.

    attacks : a result of ``defenses``; slow : one of ``fakes``, for the single loop where the first has none; learning : one
    of ``learning``, of whose learning rates for one defence that counts which ends at the smaller training loss
    """
    columns = ("exact", "few-rounds", "one-round", "single-loop")
    found = {(e["row"], e["column"]): e for result in (slow, attacks) for e in result["summary"]}
    wrong = {row: sum(c["certified_false"] for c in attacks["cells"] if c["row"] == row) for row, _ in found}
    lines = [f"{'':24}" + "".join(f"{name:>6}" for name in ("exact", "few", "one", "loop")) + "".join(f"{name:>7}" for name in ("cert.", "false", "labels", "test"))]
    for row in dict.fromkeys(e["row"] for e in attacks["summary"]):
        decibels = [found.get((row, column), {}).get("psnr_slice_mean") for column in columns]
        exact = found.get((row, "exact"), {})
        shares = [exact.get("certified_share"), None, exact.get("label_accuracy"), _accuracy(learning, row)]
        told = [f"{_told(v, '.1f'):>6}" for v in decibels] + [f"{_told(v, '.0%'):>7}" for v in shares]
        told[5] = f"{wrong[row]:>7}"
        lines.append(f"{row:24}" + "".join(told))
    return "\n".join(lines)


def _accuracy(learning: dict, row: str) -> float | None:
    own = [c for c in learning["cells"] if c["row"] == row or c["row"].startswith(f"{row}, rate")]
    best = min(own, key=lambda c: math.inf if c["training_loss"] is None else c["training_loss"], default=None)
    return None if best is None else best["test_accuracy"]


def _told(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def measured(result: dict) -> str:
    """Size, device, date and command of a results file."""
    size = {k: sorted({c[k] for c in result["cells"]}) for k in ("rows", "workers", "batch_size", "rounds")}
    told = ", ".join(f"{name.replace('_', ' ')} {'/'.join(map(str, values))}" for name, values in size.items() if len(values) < 4)
    return f"{told}\n{result['device']}; {result['date']}\n{command_lines(result)}"


def command_lines(result: dict) -> str:
    """The command of a results file, on as many lines as a page needs, as a shell takes them."""
    return " \\\n    ".join(textwrap.wrap(result["command"], WIDE - 6, break_long_words=False, break_on_hyphens=False))
