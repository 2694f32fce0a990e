"""Shared table: a few rows for all ids, each for a range of the popularity order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.tables.fitting import add_rows, check_counts, check_shape, relative_error, row_blocks
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table, adds_sparse_gradients


@dataclass(frozen=True)
class Shared(Method):
    """`row_i = stored[i * rows // num_rows]`: neighbours in the popularity order have one row, which trains.

    Stores `rows * dim` numbers and no index. It is meant for the last of the `Bands` of a table: ids that were seen
    once or twice. With at least as many rows as ids every id has its own.
    """

    name: ClassVar[str] = "shared"

    rows: int = 1
    """Rows that are stored."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the stored rows; that of the table when None."""

    def __post_init__(self) -> None:
        known = (None, "float32", "bfloat16", "float16")
        require(self.dtype in known, self.name, f"dtype must be one of {known[1:]}, not {self.dtype!r}")
        valid = isinstance(self.rows, int) and not isinstance(self.rows, bool) and self.rows >= 1
        require(valid, self.name, f"rows must be at least 1, not {self.rows!r}")

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return min(self.rows, num_rows) * dim

    def num_bytes(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> int:
        return self.num_parameters(num_rows, dim) * self.stored(dtype).itemsize

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """Type of the rows of a table of type `dtype`."""
        return dtype if self.dtype is None else getattr(torch, self.dtype)

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> SharedTable:
        return SharedTable(self, num_rows, dim, options)

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> Shared:
        """As many rows as fit, at most `num_rows`."""
        least = 4 * dim
        require(num_bytes >= least, cls.name, f"a table of dim {dim} takes at least {least} bytes, not {num_bytes}")
        return cls(rows=min(num_rows, num_bytes // least))


class SharedTable(Table):
    """`stored` [rows, dim], gathered by row."""

    def __init__(self, method: Shared, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.method: Shared = method
        self.num_stored = min(method.rows, num_rows)
        std = dense_std(num_rows) if options.init_std is None else options.init_std
        stored = torch.empty(self.num_stored, dim, dtype=method.stored(options.dtype), device=options.device)
        self.stored = nn.Parameter(stored.normal_(0.0, std, generator=options.generator))

    def places(self, ids: Tensor) -> Tensor:
        """The stored row of each id."""
        return ids if self.num_stored == self.num_rows else ids * self.num_stored // self.num_rows

    def _rows(self, ids: Tensor) -> Tensor:
        sparse = self.sparse and adds_sparse_gradients(self.stored)
        return F.embedding(self.places(ids), self.stored, sparse=sparse)

    def row_parameters(self) -> dict[str, nn.Parameter]:
        return {"stored": self.stored}

    @classmethod
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        table.fit_rows(weight)
        return table

    @torch.no_grad()
    def fit_rows(self, weight: Tensor, counts: Tensor | None = None) -> None:
        """Every stored row becomes the mean of its rows, weighted by `counts`; the plain mean where those are all 0.

        Two passes over `weight` (the second measures the error, in which rows count alike), a block at a time.
        """
        check_shape(weight, self)
        weights = check_counts(counts, self)
        sums = torch.zeros(2, self.num_stored, self.dim + 1, dtype=torch.float64, device=self.device)
        for ids, rows in row_blocks(weight, self.device):
            places, rows = self.places(ids), F.pad(rows, (0, 1), value=1.0)
            add_rows(sums[0], places, rows)
            if weights is not None:
                add_rows(sums[1], places, rows * weights[ids][:, None])
        chosen = torch.where(sums[1, :, -1:] > 0, sums[1], sums[0])
        self.stored.copy_(chosen[:, :-1] / chosen[:, -1:])
        self.fit_error = relative_error(weight, self)
