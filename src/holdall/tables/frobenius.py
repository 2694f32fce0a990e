"""Frobenius-product (FPD) table: two thin factors over a grid of ids and one shared basis of the rows."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.eager import eager, has_values
from holdall.common.errors import ConfigError
from holdall.kernels.frobenius import bag_of, frobenius_bags, frobenius_rows_many
from holdall.tables.fitting import check_shape, relative_error
from holdall.tables.frobenius_fit import fit_factors
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table

SPARSE_SIDE = 1 << 15
"""Side of the grid above which gradients of the factors are sparse: tables of more than a billion rows.

At (8, 4) and batch 4,096 on one core, updating all of the factors takes SGD 0.1 ms at ten million rows, 0.5 at a
billion and 1.6 at ten billion, and Adagrad 0.4, 4.9 and 19 ms; updating the touched rows takes 0.1 to 0.5 ms always.
"""


def grid_side(num_rows: int) -> int:
    """Side q of the square grid of ids: ceil(sqrt(num_rows)) rounded up to a multiple of 8, exact at any size."""
    root = math.isqrt(num_rows - 1) + 1
    return -(-root // 8) * 8


@dataclass(frozen=True)
class Frobenius(Method):
    """Rows from a grid: with i = i1*q + i2, `u = sum_k A[i1, k, :] * B[i2, k, :]` (rank numbers) and `row = u @ W`.

    A and B are q x terms x rank, W is rank x dim, q about sqrt(num_rows): rank * (2*terms*q + dim) parameters, 0.81 MB
    for ten million rows of any dim at (8, 4). `terms` 1 is a CP decomposition; `rank` bounds the rank of the table. A
    lookup costs 2*terms*rank flops and 2*rank*dim for the product. Hajgato, "Review of compressed embedding layers and
    their applications for recommender systems", 2023, where it is the FPD layer.
    """

    name: ClassVar[str] = "frobenius"

    rank: int = 8
    """Length of u; more than dim adds capacity only through the terms."""
    terms: int = 4
    """Products of a left and a right factor that are summed for each number of u."""

    def __post_init__(self) -> None:
        for what, value in (("rank", self.rank), ("terms", self.terms)):
            require(isinstance(value, int) and value >= 1, self.name, f"{what} must be 1 or more, not {value!r}")

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return self.rank * (2 * self.terms * grid_side(num_rows) + dim)

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> FrobeniusTable:
        return FrobeniusTable(self, num_rows, dim, options)

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> Frobenius:
        """The widest setting (largest rank*terms) whose float32 table takes at most `num_bytes`.

        The published heuristic proposes (8, 4) and (16, 2), beside CP with (24, 1) and (32, 1): rank*terms of 24 to 32.
        Larger and smaller budgets change both: the rank is 1 to 8 times the terms, at most dim (then only terms grow)
        and a multiple of 4 from 8 on, for aligned rows; among equally wide ones the nearest to rank = 2*terms wins.
        """
        side = grid_side(num_rows)
        best: tuple[int, float, int, int] | None = None
        for rank in range(1, dim + 1):
            if rank > 8 and rank % 4 and rank != dim:
                continue
            terms = (num_bytes // 4 // rank - dim) // (2 * side)
            terms = min(terms, side if rank == dim else rank)
            if terms < 1:
                break
            if rank <= 8 * terms:
                best = max(best or (0, 0.0, 1, 1), (rank * terms, -abs(math.log2(rank / terms) - 1), rank, terms))
        if best is None:
            least = cls(rank=1, terms=1).num_bytes(num_rows, dim)
            raise ConfigError(
                f"{cls.name}: {num_rows} rows of dim {dim} need at least {least} bytes (rank 1, terms 1), "
                f"not {num_bytes}: raise the budget"
            )
        return cls(rank=best[2], terms=best[3])


class FrobeniusTable(Table):
    """`left` and `right` [q, terms*rank] with term-major columns, and `basis` [rank, dim].

    With `sparse`, gradients of left and right are sparse beyond `SPARSE_SIDE`. All others are dense.
    """

    def __init__(self, method: Frobenius, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.fast = True
        """False for the plain reference of the kernel, in tests."""
        self.rank, self.terms, self.side = method.rank, method.terms, grid_side(num_rows)
        self.has_large_sides = self.side > SPARSE_SIDE
        # Given signs on the left and basis columns of one norm, every number of a row is a sum of independent Gaussians
        # of the right with the same total variance: exactly Gaussian, whatever rank, terms and dim are. The deviation
        # is sqrt(terms) * left * right * column norm, and the three factors have the same root mean square.
        std = dense_std(num_rows) if options.init_std is None else options.init_std
        scale = (std / math.sqrt(self.rank * self.terms)) ** (1 / 3)

        def normal(*shape: int) -> Tensor:
            values = torch.empty(shape, dtype=options.dtype, device=options.device)
            return values.normal_(generator=options.generator)

        left, right = (normal(self.side, self.terms * self.rank) for _ in range(2))
        self.left = nn.Parameter(torch.copysign(left.new_tensor(scale), left, out=left))
        self.right = nn.Parameter(right.mul_(scale))
        self.basis = nn.Parameter(F.normalize(normal(self.rank, dim), dim=0) * (scale * math.sqrt(self.rank)))

    def _rows(self, ids: Tensor) -> Tensor:
        return self._sums(ids, None, None)

    def _sums(self, ids: Tensor, starts: Tensor | None, scale: Tensor | None) -> Tensor:
        factors = (self.left, self.right, self.basis)
        return frobenius_bags(*factors, ids, starts, scale, sparse=self._gives_sparse, fast=self.fast)

    def row_parameters(self) -> dict[str, nn.Parameter]:
        return {"left": self.left, "right": self.right} if self.has_large_sides else {}

    @property
    def _gives_sparse(self) -> bool:
        return self.sparse and self.has_large_sides

    def kernel_group(self) -> Hashable | None:
        if self._gives_sparse or self.mode == "max" or self.padding_idx is not None or not self.fast:
            return None
        return self.rank, self.terms, self.dim, self.basis.dtype, self.basis.device

    @staticmethod
    def rows_many(tables: Sequence[FrobeniusTable], ids: Tensor) -> Tensor:
        return frobenius_rows_many([(table.left, table.right, table.basis) for table in tables], ids)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if self.mode == "max":  # not linear in u
            return super().forward(input, offsets, per_sample_weights)
        if self.padding_idx is None and per_sample_weights is None and self._one_id_a_bag(input, offsets):
            return self._rows(self._checked(input).reshape(-1))
        ids, starts = self._bags(input, offsets, per_sample_weights)
        if not self.include_last_offset:
            starts = F.pad(starts, (0, 1), value=ids.numel())
        return self._sums(ids, starts, self._scale(ids, starts, per_sample_weights))

    def _one_id_a_bag(self, input: Tensor, offsets: Tensor | None) -> bool:
        """Whether every bag is one id, so that there is nothing to pool; True implies that the offsets are valid."""
        if input.dim() == 2:
            return input.shape[1] == 1 and offsets is None
        size = input.numel() + self.include_last_offset
        if input.dim() != 1 or offsets is None or offsets.shape != (size,) or not has_values(offsets):
            return False
        return _counts_up(offsets)

    def _scale(self, ids: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor | None:
        """Factor [L] on each row in its bag's sum: its weight, 1/length for the mean, 0 for padding."""
        dtype = self.basis.dtype
        keep = None if self.padding_idx is None else ids != self.padding_idx
        if weights is not None:
            scale = weights.reshape(-1).to(dtype)
            return scale if keep is None else scale.masked_fill(~keep, 0.0)
        if self.mode == "sum":
            return None if keep is None else keep.to(dtype)
        bag = bag_of(starts, ids.numel())
        keep = torch.ones_like(ids, dtype=torch.bool) if keep is None else keep
        lengths = torch.zeros_like(starts[1:]).index_add(0, bag, keep.long())
        return keep.to(dtype) / lengths.clamp(min=1)[bag].to(dtype)

    @classmethod
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """Best fit by alternating least squares, see `holdall.tables.frobenius_fit`; sets `fit_error`.

        Exact for a table of this method and setting when rank*terms is less than the grid's side. Reads `weight` block
        by block; besides a few blocks it needs 16 * q * min(rank, dim) * rank * terms bytes (13 MB for ten million rows
        at (8, 4), never more than 64 KB * q).
        """
        assert isinstance(table, FrobeniusTable)
        check_shape(weight, table)
        found = fit_factors(weight, table.side, table.rank, table.terms, device=table.device)
        with torch.no_grad():
            if found.W.any():
                table.left.copy_(found.A.permute(1, 2, 0).flatten(1))
                table.right.copy_(found.B.permute(1, 2, 0).flatten(1))
                table.basis.copy_(found.W)
            else:  # rows that are all zero: the other two keep their initial values, so that left can learn
                table.left.zero_()
        table.fit_error = relative_error(weight, table)
        return table


@eager
def _counts_up(offsets: Tensor) -> bool:
    """Whether offsets are 0, 1, 2, ..."""
    return torch.equal(offsets, torch.arange(offsets.numel(), dtype=offsets.dtype, device=offsets.device))
