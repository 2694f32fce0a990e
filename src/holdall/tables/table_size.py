"""Size of a table of a model, as far as a budget needs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdall.tables.dense import Dense
from holdall.tables.method import Method


@dataclass(frozen=True)
class TableSize:
    """Size of one table of a model, as far as a budget needs it."""

    num_rows: int
    dim: int
    dtype: torch.dtype = torch.float32
    """Type of the table's numbers, dense or compressed."""
    extra_bytes: int = 0
    """Bytes that a compressed table takes beside those of its method."""
    training: bool = False
    """Whether the table is to train from fresh rows, by `Optimizers`: its method is one that trains."""
    row_state: int = 0
    """Bytes of optimizer state of a row."""

    @property
    def dense_state(self) -> int:
        """Bytes of the optimizer state of the dense table."""
        return self.num_rows * self.row_state

    @property
    def dense_bytes(self) -> int:
        return self.num_rows * self.dim * self.dtype.itemsize

    def bytes_by(self, method: Method) -> int:
        """Bytes of the table when `method` stores it."""
        extra = 0 if isinstance(method, Dense) else self.extra_bytes
        return method.num_bytes(self.num_rows, self.dim, self.dtype) + extra
