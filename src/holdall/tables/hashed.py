"""Hashed table (the hashing trick): ids are hashed into fewer rows, and ids of one bucket share a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.tables.fitting import add_rows, check_shape, relative_error, row_blocks
from holdall.tables.hashing import check_seed, hash_buckets
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table


@dataclass(frozen=True)
class Hashed(Method):
    """`row(id) = stored[hash(id) mod buckets]`.

    Weinberger et al., "Feature hashing for large scale multitask learning", 2009. Stores `buckets * dim` numbers. With
    at least as many buckets as rows nothing is shared: the table stores `num_rows` rows and `row(id) = stored[id]`,
    without collisions.
    """

    name: ClassVar[str] = "hashed"

    buckets: int
    """Rows that are stored."""
    seed: int = 0
    """Number of the hash function; ids that collide under one seed do not under another."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.buckets, int) and self.buckets >= 1,
            self.name,
            f"buckets must be at least 1, not {self.buckets!r}",
        )
        check_seed(self.seed, self.name)

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return min(self.buckets, num_rows) * dim

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> Hashed:
        """As many buckets as fit, at most `num_rows`."""
        smallest = 4 * dim
        require(
            num_bytes >= smallest, cls.name, f"a table of dim {dim} takes at least {smallest} bytes, not {num_bytes}"
        )
        return cls(buckets=min(num_rows, num_bytes // smallest))

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> HashedTable:
        return HashedTable(self, num_rows, dim, options)


class HashedTable(Table):
    """`stored` [buckets, dim], gathered by row."""

    method: Hashed

    def __init__(self, method: Hashed, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.num_buckets = min(method.buckets, num_rows)
        self.init_std = dense_std(num_rows) if options.init_std is None else options.init_std
        stored = nn.Parameter(torch.empty(self.num_buckets, dim, dtype=options.dtype, device=options.device))
        self.register_parameter("weight", stored)
        if not stored.is_meta:
            self.initialize(options.generator)

    @property
    def stored(self) -> nn.Parameter:
        """Rows of the buckets; `weight` in state dicts, but it is not the table's weight."""
        stored = self._parameters["weight"]
        assert stored is not None
        return stored

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh rows."""
        self.stored.normal_(0.0, self.init_std, generator=generator)

    def buckets(self, ids: Tensor) -> Tensor:
        """The stored row of each id."""
        if self.num_buckets == self.num_rows:
            return ids
        return hash_buckets(ids, self.num_buckets, self.method.seed)

    def _hash_seed(self) -> int | None:
        return None if self.num_buckets == self.num_rows else self.method.seed

    def _rows(self, ids: Tensor) -> Tensor:
        return F.embedding(self.buckets(ids), self.stored, sparse=self.sparse)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        # Pooling the stored rows directly avoids finding the distinct ids. Not for max, which has no sparse gradient in
        # torch, nor with padding, whose bucket other ids share.
        if self.mode == "max" or self.padding_idx is not None:
            return super().forward(input, offsets, per_sample_weights)
        input, offsets = self._bags(input, offsets, per_sample_weights)
        return F.embedding_bag(
            self.buckets(input),
            self.stored,
            offsets,
            mode=self.mode,
            sparse=self.sparse,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.reshape(-1),
            include_last_offset=self.include_last_offset,
        )

    def row_parameters(self) -> dict[str, nn.Parameter]:
        return {"weight": self.stored}

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """Every stored row becomes the mean of the rows that share it: the least squares fit.

        Two passes over `weight` (the second measures the error), a block at a time, and `buckets * dim` float64 sums.
        """
        assert isinstance(table, HashedTable)
        check_shape(weight, table)
        device = table.stored.device
        sums = torch.zeros(table.stored.shape, dtype=torch.float64, device=device)
        counts = torch.zeros(table.num_buckets, dtype=torch.float64, device=device)
        for ids, rows in row_blocks(weight, device):
            index = table.buckets(ids)
            add_rows(sums, index, rows)
            add_rows(counts, index, torch.ones_like(index, dtype=torch.float64))
        table.stored.copy_(sums / counts.clamp_min(1)[:, None])
        table.fit_error = relative_error(weight, table)
        return table
