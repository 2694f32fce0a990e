"""A tensor most of whose rows were never touched: what a checkpoint saves of it, and what it loads into.

A checkpoint keeps the touched rows and how the others begin (`initial`: seed and standard deviation, 0 for zeros), so
it is as large as what was learned, and can be loaded into an ordinary tensor too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from holdall.tables.initial_rows import fill_with_initial_rows
from holdall.tiers.host_rows import HostRows


class TensorByRows(Protocol):
    """What a checkpoint asks of a tensor of which it saves some rows only, and that it loads into.

    An attribute `by_rank = True` says that its rows are spread over processes: `touched` are then those that this
    process writes and no other does, and `write` takes those that it keeps out of any rows. A method `forget()`, where
    there is one, is called when all tensors have been reset: weights and optimizer state share what is touched.
    Methods `read_raw(rows)` and `decode_(rows, raw)`, where there are any, are the two halves of `read`: a copy of what
    changes, and what makes rows of it, in place, at any later time and on any thread.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def initial(self) -> dict[str, Any]:
        """`std` and `seed` of the rows that were never touched."""

    def touched(self) -> Tensor:
        """[T] int64, distinct, on the host."""

    def read(self, rows: Tensor) -> Tensor:
        """[U, ...] on the host, in memory of their own."""

    def write(self, rows: Tensor, values: Tensor) -> None: ...
    def reset(self) -> None: ...


@dataclass(frozen=True)
class LazyTensor:
    """Rows `start` to `start + num_rows` of far rows, a table's share of a pack."""

    far: HostRows
    all_touched: Tensor
    start: int
    num_rows: int
    initial: dict[str, Any]

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

    def forget(self) -> None:
        """Call no row touched, now that everything that shares `all_touched` has been reset."""
        self.all_touched[self.start : self.start + self.num_rows] = False


def fill_initial(tensor: Tensor, initial: dict[str, Any]) -> None:
    """Give an ordinary tensor the beginning that a lazy one has."""
    if initial["std"] == 0:
        tensor.zero_()
    else:
        fill_with_initial_rows(tensor, initial["seed"], initial["std"])
