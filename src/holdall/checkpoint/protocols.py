"""Protocol of tensors that a checkpoint saves by rows.

Packages below this one implement it without importing it: `tiers.LazyTensor` (rows of one process, most of them never
updated) and `distributed.ShardedTensor` (rows sharded over processes).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class TensorByRows(Protocol):
    """Tensor of which a checkpoint saves the touched rows and how the others were initialised, and that it loads into.

    Such a checkpoint is as large as the updated rows. It can be loaded into an ordinary tensor too.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def initial(self) -> dict[str, Any]:
        """`std` and `seed` of the rows that were never touched; `std` 0 means zeros."""

    @property
    def is_sharded(self) -> bool:
        """Whether every process has rows of its own.

        If so, `touched` names the rows that this process saves and no other does, and `write` may be given rows of
        other processes, which it ignores.
        """

    def touched(self) -> Tensor:
        """[T] int64, distinct, on the host."""

    def read(self, rows: Tensor) -> Tensor:
        """[U, ...] on the host, in memory of their own: `decode_(rows, read_raw(rows))`."""

    def read_raw(self, rows: Tensor) -> Tensor:
        """[U, ...] as stored: a copy of everything that training changes."""

    def decode_(self, rows: Tensor, raw: Tensor) -> Tensor:
        """Turn what `read_raw` returned into values, in place; at any later time, on any thread."""

    def write(self, rows: Tensor, values: Tensor) -> None: ...
    def reset(self) -> None:
        """Set every row to its initial value; `touched` stays."""

    def clear_touched(self) -> None:
        """Mark no row as touched. Called after all tensors were reset: weights and optimizer state share the marks."""
