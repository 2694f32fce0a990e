"""Tensor of lazy rows, as a checkpoint saves and loads it: the rows that were written, and the initial values.

A checkpoint has the written rows and the parameters of the others' initial values (`initial`: seed and standard
deviation, 0 for zeros). It is as large as what was learned, and can be loaded into an ordinary tensor too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdall.tiers.host_rows import HostRows


@dataclass(frozen=True)
class LazyTensor:
    """Rows `start` to `start + num_rows` of host rows: one table of a pack."""

    rows: HostRows
    all_touched: Tensor
    start: int
    num_rows: int
    initial: dict[str, Any]
    is_sharded = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.rows.tensor.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.tensor.dtype

    def touched(self) -> Tensor:
        """[T] int64: the rows that were ever written, ascending."""
        return self.all_touched[self.start : self.start + self.num_rows].nonzero()[:, 0]

    def read(self, rows: Tensor) -> Tensor:
        return self.rows.read(rows + self.start)

    def read_raw(self, rows: Tensor) -> Tensor:
        return self.rows.read_raw(rows + self.start)

    def decode_(self, rows: Tensor, raw: Tensor) -> Tensor:
        return self.rows.decode_(rows + self.start, raw)

    def write(self, rows: Tensor, values: Tensor) -> None:
        self.rows.write(rows + self.start, values)
        self.all_touched[rows + self.start] = True

    def reset(self) -> None:
        """Give every row its initial values again; `initial` is not changed."""
        rows = self.touched()
        if rows.numel():
            like = torch.zeros(rows.numel(), *self.shape[1:], dtype=self.dtype)
            self.rows.write_raw(rows + self.start, like)

    def clear_touched(self) -> None:
        """Mark no row as touched, once everything that shares `all_touched` has been reset."""
        self.all_touched[self.start : self.start + self.num_rows] = False
