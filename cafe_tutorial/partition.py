"""Who holds which columns: image tiles for image sets, groups of columns for tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import at_least_one


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclass(frozen=True)
class GridPartition:
    """Cut images into a grid of ``rows`` x ``cols`` tiles, one tile a worker, numbered row by row.

    The released code's split is ``GridPartition(2, 2)``: four 14x14 quadrants of a 28x28 digit.
    """

    rows: int
    cols: int

    def __post_init__(self):
        for name in ("rows", "cols"):
            at_least_one(name, getattr(self, name))

    @classmethod
    def for_workers(cls, workers: int, height: int, width: int) -> GridPartition:
        """The grid of ``workers`` tiles nearest to square tiles that divides a ``height`` x ``width`` image."""
        at_least_one("workers", workers)

        def grids(count):
            return [(r, count // r) for r in _divisors(count) if height % r == 0 and width % (count // r) == 0]

        found = grids(workers) if workers <= height * width else []
        if not found:
            possible = [m for m in range(1, min(height * width, 64) + 1) if grids(m)]
            raise ValueError(
                f"workers={workers} tiles of equal size cannot be cut from {height}x{width} images; "
                f"these numbers can: {', '.join(map(str, possible))}"
            )
        return cls(*min(found, key=lambda g: abs(height // g[0] - width // g[1])))

    @property
    def workers(self) -> int:
        return self.rows * self.cols

    def part_shapes(self, data) -> list[tuple[int, int, int]]:
        """Each worker's part of one row, (C, h, w), for an image set or a tensor (N, C, H, W)."""
        images = data if isinstance(data, Tensor) else getattr(data, "images", None)
        if images is None or images.dim() != 4:
            raise ValueError("data must be an image set or a tensor of shape (N, C, H, W); tables take a ColumnPartition")
        _, channels, height, width = images.shape
        for name, size, parts in (("height", height, self.rows), ("width", width, self.cols)):
            if size % parts:
                below, above = size - size % parts, size + parts - size % parts
                sizes = f"{below} or {above}" if below else f"{above}"
                raise ValueError(
                    f"images of {name} {size} cannot be cut into {parts} equal tiles; a {name} of {sizes} would do, "
                    f"or one of {', '.join(map(str, _divisors(size)))} tiles"
                )
        return [(channels, height // self.rows, width // self.cols)] * self.workers

    def split(self, images: Tensor) -> list[Tensor]:
        """(N, C, H, W) to M tiles of shape (N, C, H/rows, W/cols)."""
        channels, h, w = self.part_shapes(images)[0]
        tiles = images.reshape(len(images), channels, self.rows, h, self.cols, w).permute(2, 4, 0, 1, 3, 5)
        return list(tiles.reshape(self.workers, len(images), channels, h, w).unbind(0))

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """M tiles of shape (N, C, h, w) back to (N, C, H, W); the inverse of :meth:`split`."""
        if len(parts) != self.workers or len({tuple(p.shape) for p in parts}) != 1 or parts[0].dim() != 4:
            raise ValueError(f"parts must be {self.workers} tensors of one shape (N, C, h, w), got {[tuple(p.shape) for p in parts]}")
        n, channels, h, w = parts[0].shape
        tiles = torch.stack(list(parts)).reshape(self.rows, self.cols, n, channels, h, w).permute(2, 3, 0, 4, 1, 5)
        return tiles.reshape(n, channels, self.rows * h, self.cols * w)


@dataclass(frozen=True)
class ColumnPartition:
    """Give each worker a group of a table's columns; ``groups[m]`` are worker m's column numbers.

    Every column 0 … D - 1 belongs to exactly one worker; the groups may be of unequal size.
    """

    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        groups = tuple(tuple(int(c) for c in group) for group in self.groups)
        object.__setattr__(self, "groups", groups)
        held = sorted(c for group in groups for c in group)
        if not groups or any(not group for group in groups):
            raise ValueError(f"groups={groups!r} must give every worker at least one column")
        if held != list(range(len(held))):
            raise ValueError(f"groups={groups!r} must hold each column from 0 to {len(held) - 1} exactly once")

    @classmethod
    def widths(cls, widths: Sequence[int]) -> ColumnPartition:
        """Consecutive groups of the given widths: ``widths([5, 10, 15])`` splits thirty columns."""
        if not widths or any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in widths):
            raise ValueError(f"widths={widths!r} must be whole numbers of at least 1")
        ends = torch.tensor(widths).cumsum(0).tolist()
        return cls(tuple(tuple(range(end - width, end)) for width, end in zip(widths, ends)))

    @classmethod
    def even(cls, columns: int, workers: int) -> ColumnPartition:
        """``columns`` columns over ``workers`` workers, as evenly as they go."""
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= columns:
            raise ValueError(f"workers={workers!r} must be from 1 to {columns}, the number of columns")
        return cls.widths([columns // workers + (m < columns % workers) for m in range(workers)])

    @property
    def workers(self) -> int:
        return len(self.groups)

    @property
    def columns(self) -> int:
        return sum(map(len, self.groups))

    def part_shapes(self, data) -> list[tuple[int]]:
        """Each worker's part of one row, (D_m,), for a table or a tensor (N, D)."""
        records = data if isinstance(data, Tensor) else getattr(data, "records", None)
        if records is None or records.dim() != 2:
            raise ValueError("data must be a table or a tensor of shape (N, D); images take a GridPartition")
        if records.shape[1] != self.columns:
            raise ValueError(f"data has {records.shape[1]} columns, the groups hold {self.columns}; they must agree")
        return [(len(group),) for group in self.groups]

    def split(self, records: Tensor) -> list[Tensor]:
        """(N, D) to M parts of shape (N, D_m)."""
        self.part_shapes(records)
        return [records[:, list(group)] for group in self.groups]

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """M parts of shape (N, D_m) back to (N, D); the inverse of :meth:`split`."""
        if [p.shape[-1] for p in parts] != [len(group) for group in self.groups]:
            raise ValueError(f"parts have widths {[p.shape[-1] for p in parts]}, the groups {[len(g) for g in self.groups]}")
        order = torch.tensor([c for group in self.groups for c in group])
        return torch.cat(list(parts), 1)[:, order.argsort().to(parts[0].device)]
