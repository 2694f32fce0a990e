"""A tensor most of whose rows were never touched: what a checkpoint saves of it, and what it loads into.

A checkpoint keeps the touched rows and how the others begin (`initial`: seed and standard deviation, 0 for zeros), so
it is as large as what was learned, and can be loaded into an ordinary tensor too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdall.tiers.host_rows import HostRows


@dataclass(frozen=True)
class LazyTensor:
    """Rows `start` to `start + num_rows` of far rows, a table's share of a pack."""

    far: HostRows
    all_touched: Tensor
    start: int
    num_rows: int
    initial: dict[str, Any]
    is_sharded = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.far.tensor.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.far.tensor.dtype

    def touched(self) -> Tensor:
        """[T] int64: the rows that were ever written, ascending."""
        return self.all_touched[self.start : self.start + self.num_rows].nonzero()[:, 0]

    def read(self, rows: Tensor) -> Tensor:
        return self.far.read(rows + self.start)

    def read_raw(self, rows: Tensor) -> Tensor:
        return self.far.read_raw(rows + self.start)

    def decode_(self, rows: Tensor, raw: Tensor) -> Tensor:
        return self.far.decode_(rows + self.start, raw)

    def write(self, rows: Tensor, values: Tensor) -> None:
        self.far.write(rows + self.start, values)
        self.all_touched[rows + self.start] = True

    def reset(self) -> None:
        """Let every row begin anew; how it begins is said by `initial`, which is not changed."""
        rows = self.touched()
        if rows.numel():
            like = torch.zeros(rows.numel(), *self.shape[1:], dtype=self.dtype)
            self.far.write_raw(rows + self.start, like)

    def clear_touched(self) -> None:
        """Mark no row as touched, once everything that shares `all_touched` has been reset."""
        self.all_touched[self.start : self.start + self.num_rows] = False
