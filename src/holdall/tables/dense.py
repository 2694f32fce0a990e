"""Dense table: every row stored, `num_rows * dim` numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.tables.initial_rows import draw_seed, fill_with_initial_rows
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table


@dataclass(frozen=True)
class Dense(Method):
    """Every row stored as it is."""

    name: ClassVar[str] = "dense"

    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    """Type of the stored numbers; the one asked for at `build` when None."""

    def __post_init__(self) -> None:
        known = (None, "float64", "float32", "bfloat16", "float16")
        require(self.dtype in known, self.name, f"dtype must be one of {known[1:]}, not {self.dtype!r}")

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return num_rows * dim

    def num_bytes(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> int:
        return self.num_parameters(num_rows, dim) * self._stored(dtype).itemsize

    def _stored(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.dtype is None else getattr(torch, self.dtype)

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> DenseTable:
        return DenseTable(self, num_rows, dim, replace(options, dtype=self._stored(options.dtype)))


class DenseTable(Table):
    """`weight` [num_rows, dim]; with `sparse` a step costs the rows it touches, not those stored."""

    has_weight = True

    def __init__(self, method: Method, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.init_std = dense_std(num_rows) if options.init_std is None else options.init_std
        self.seed: int | None = None
        """Seed of the initial rows, once they are drawn."""
        self.weight = nn.Parameter(torch.empty(num_rows, dim, dtype=options.dtype, device=options.device))
        if not self.weight.is_meta:
            self.initialize(options.generator)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draw a seed, if there is none yet, and set every row to its initial values (see `initial_rows`).

        A table on the meta device has no rows, but draws its seed.
        """
        if self.seed is None:
            self.seed = draw_seed(generator)
        if self.weight.is_meta:
            return
        fill_with_initial_rows(self.weight, self.seed, self.init_std)
        if self.padding_idx is not None:
            self.weight[self.padding_idx].zero_()

    def _rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, self.padding_idx, sparse=self.sparse)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if self.mode == "max":  # torch has no sparse gradient for max: pool the distinct rows instead
            return super().forward(input, offsets, per_sample_weights)
        input, offsets = self._bags(input, offsets, per_sample_weights)
        return F.embedding_bag(
            input,
            self.weight,
            offsets,
            mode=self.mode,
            sparse=self.sparse,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.reshape(-1),
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )

    def row_parameters(self) -> dict[str, nn.Parameter]:
        return {"weight": self.weight}

    @classmethod
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        assert isinstance(table, DenseTable)
        with torch.no_grad():
            table.weight.copy_(weight)
        return table
