"""What the paper reports (arXiv 2110.15122), PSNR in dB, by table, data set and place; one value each, without a spread.

The rows and columns are named as in ``tables``; Linnaeus 5 has a table of its own name and no data here.
"""

from __future__ import annotations

_ROWS2 = ("CAFE, single loop", "dlg", "cosine", "sapag", "bn", "gc")
_ROWS4 = ("CAFE", "alpha = 0", "xi = 0", "beta = 0", "gamma = 0")
_K = (10, 20, 40, 80, 100)


def _column(rows, values) -> dict:
    return {(row, "PSNR"): value for row, value in zip(rows, values)}


def _line(letter, names, values) -> dict:
    return {("CAFE, single loop", f"{letter} = {name}"): value for name, value in zip(names, values)}


PAPER = {
    "table2": {
        "cifar10": _column(_ROWS2, (31.83, 9.29, 7.38, 6.07, 18.94, 13.63)),
        "mnist": _column(_ROWS2, (43.15, 7.96, 7.84, 3.86, 13.38, 9.24)),
        "linnaeus5": _column(_ROWS2, (33.22, 7.14, 8.31, 6.74, 8.09, 12.32)),
    },
    "table3": {
        "cifar10": _line("K", _K, (30.83, 35.70, 31.83, 36.87, 38.94)),
        "mnist": _line("K", _K, (32.60, 39.00, 43.15, 47.05, 47.50)),
        "linnaeus5": _line("K", _K, (28.00, 30.53, 33.22, 30.43, 29.18)),
    },
    "table4": {
        "cifar10": _column(_ROWS4, (31.83, 33.93, 25.57, 18.25, 12.51)),
        "linnaeus5": _column(_ROWS4, (33.22, 28.62, 25.29, 23.22, 12.37)),
        "mnist": _column(_ROWS4, (43.15, 31.93, 34.51, 31.98, 6.34)),
    },
    "table6": {
        "cifar10": _line("M", (4, 16), (31.83, 28.39)),
        "linnaeus5": _line("M", (4, 16), (33.22, 39.85)),
        "mnist": _line("M", (4, 16), (43.15, 39.28)),
    },
}
TABLE5 = {  # rounds to the level in dB, and the most that were run, section 4.2
    "cifar10": {"level": 27, "single-loop": 7300, "nested-loops": (8000, 2404, 1635), "most": 8000},
    "mnist": {"level": 38, "single-loop": 6600, "nested-loops": (8000, 8000, 2468), "most": 8000},
    "linnaeus5": {"level": 30, "single-loop": 12400, "nested-loops": (12428, 20000, 20000), "most": 20000},
}
TABLE10 = {  # Linnaeus 5, appendix F.2: epochs to PSNR by K
    100: (12.30, 14.76, 15.33, 11.84, 11.79),
    150: (15.83, 17.92, 16.26, 14.28, 13.21),
    200: (17.63, 19.38, 17.20, 16.24, 14.46),
    250: (21.80, 21.49, 19.09, 18.11, 16.14),
    300: (22.92, 24.00, 21.14, 19.83, 17.29),
    350: (24.86, 25.86, 22.62, 21.05, 18.90),
}
YALE = 42.0  # "above 42", section 4.5
