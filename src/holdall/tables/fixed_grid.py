"""Table of 8-bit codes that train on one grid for all rows, from -1 to 1: a byte for each number and nothing else.

A factor that is multiplied with the rows, such as the projection of `MixedDimension`, has their scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.tables.fitting import block_slices, check_shape, relative_error, row_blocks
from holdall.tables.method import TableOptions, dense_std
from holdall.tables.quantized import Quantized, StochasticRoundingTable
from holdall.tables.rounding import dequantize, quantize
from holdall.tables.table import Table

STEP = 1 / 128
"""Distance of two levels; a power of 2, so that 0 is a level."""


class FixedGridTable(StochasticRoundingTable):
    """`codes` [num_rows, dim] uint8, and `grid` [1, 2], the zero and step of all rows, which do not change.

    Updates are rounded stochastically, and clipped at the ends of the grid. Optimizer state of one number a row takes a
    byte of its own.
    """

    METHOD = Quantized(8, "stochastic", trainable=True, state_bits=8)
    has_one_grid = True

    def __init__(self, num_rows: int, dim: int, options: TableOptions):
        super().__init__(self.METHOD, num_rows, dim, options)
        self.grid = torch.tensor([[-1.0, STEP]], dtype=options.dtype, device=options.device)
        self.initialize(dense_std(num_rows) if options.init_std is None else options.init_std, options.generator)

    @staticmethod
    def bytes_of(num_rows: int, dim: int, dtype: torch.dtype) -> int:
        """Bytes of such a table."""
        return num_rows * dim + 2 * dtype.itemsize

    def initialize(self, std: float, generator: torch.Generator | None = None) -> None:
        """Draw fresh rows, block by block; those beyond the grid are clipped. None on the meta device."""
        if self.codes.is_meta:
            return
        for place in block_slices(self.num_rows, self.dim):
            rows = torch.empty(place.stop - place.start, self.dim, device=self.device)
            rows.normal_(0.0, std, generator=generator)
            if self.padding_idx is not None and place.start <= self.padding_idx < place.stop:
                rows[self.padding_idx - place.start] = 0
            self.codes[place] = quantize(rows, self.grid, self.method.levels, True, generator)

    def _stored_rows(self, ids: Tensor) -> Tensor:
        return dequantize(self.codes.index_select(0, ids), self.grid)

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """Round every number to the nearest level."""
        assert isinstance(table, FixedGridTable)
        check_shape(weight, table)
        for ids, rows in row_blocks(weight, table.device):
            table.codes[ids] = quantize(rows, table.grid, table.method.levels)
        table.fit_error = relative_error(weight, table)
        return table
