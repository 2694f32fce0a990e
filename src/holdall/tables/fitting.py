"""Helpers of the fits of several methods: blocks of a dense table, and the error of a fit.

`weight` [num_rows, dim] may be a tensor over a memory map that is larger than memory: nothing here loads more than
`BLOCK_NUMBERS` of its numbers (or one row) at a time. Sums are taken in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.tables.table import Table

BLOCK_NUMBERS = 1 << 20
"""Numbers of a block: 8 MB in float64; a few such temporaries exist at a time."""

FIT_ROUNDS = 30
"""Most rounds of an iterative fit."""
FIT_GAIN = 1e-5
"""Share of the table's square norm that a round must gain for the fit to continue.

A planted table with noise takes 3 to 10 rounds, and is then within 2e-5 of the relative error that 1e-8 leads to.
"""


def check_shape(weight: Tensor, table: Table) -> None:
    """Raise a `ConfigError` unless `weight` has the shape of `table`."""
    if tuple(weight.shape) != (table.num_rows, table.dim):
        raise ConfigError(
            f"cannot fit a {table.method.name} table of {table.num_rows} rows of dim {table.dim} to a weight of "
            f"shape {tuple(weight.shape)}: build it for that shape"
        )


def check_counts(counts: Tensor | None, table: Table) -> Tensor | None:
    """`counts` in float64 on the device of `table`, or a `ConfigError` unless they are one number per row."""
    if counts is None:
        return None
    if counts.shape != (table.num_rows,) or not bool((counts >= 0).all()):
        raise ConfigError(
            f"counts must be {table.num_rows} numbers of at least 0, one per row, not a tensor of shape "
            f"{tuple(counts.shape)} with least value {counts.min().item() if counts.numel() else None}"
        )
    return counts.to(table.device, torch.float64)


def block_slices(num_rows: int, dim: int) -> Iterator[slice]:
    """Bounds of the blocks of a table's rows, for passes that write rows rather than read them."""
    step = max(1, BLOCK_NUMBERS // dim)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def row_blocks(weight: Tensor, device: torch.device | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids [n], rows [n, dim] in float64) of consecutive blocks of `weight`, on `device` (that of `weight` if None)."""
    num_rows, dim = weight.shape
    step = max(1, BLOCK_NUMBERS // dim)
    for start in range(0, num_rows, step):
        rows = weight[start : start + step].detach().to(device, torch.float64)
        yield torch.arange(start, start + rows.shape[0], device=rows.device), rows


def grid_tiles(weight: Tensor, width: int, device: torch.device | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of the rows laid out as a grid: row `q * width + r` at (q, r), the last line of the grid may be shorter.

    Yields (quotients, remainders, values [Q, R, dim] in float64), each row of `weight` in exactly one tile.
    """
    num_rows, dim = weight.shape
    step = max(1, BLOCK_NUMBERS // dim)

    def tile(q: int, lines: int, r: int, columns: int) -> tuple[slice, slice, Tensor]:
        start = q * width + r
        values = weight[start : start + lines * columns].detach().to(device, torch.float64)
        return slice(q, q + lines), slice(r, r + columns), values.reshape(lines, columns, dim)

    full = num_rows // width
    lines_at_once = step // width
    first_of_rest = full if lines_at_once else 0
    for q in range(0, first_of_rest, max(1, lines_at_once)):
        yield tile(q, min(lines_at_once, full - q), 0, width)
    for q in range(first_of_rest, -(-num_rows // width)):
        length = min(width, num_rows - q * width)
        for r in range(0, length, step):
            yield tile(q, 1, r, min(step, length - r))


def add_rows(sums: Tensor, index: Tensor, values: Tensor) -> None:
    """`sums[index[i]] += values[i]` for every i, repeated indices included.

    By `index_put_`: on the CPU it took a sixth to a hundredth of the time of `index_add_` and `scatter_add_` (64k rows
    of 16 and 64 numbers).
    """
    sums.index_put_((index,), values, accumulate=True)


def relative_error(weight: Tensor, table: Table, lookups: Tensor | None = None) -> float:
    """Frobenius norm of `weight` minus the rows of `table`, over that of `weight`; see `squared_error`."""
    missed, total = squared_error(weight, table, lookups)
    if total == 0.0:
        return 0.0 if missed == 0.0 else math.inf
    return math.sqrt(missed / total)


def squared_error(weight: Tensor, table: Table | None, lookups: Tensor | None = None) -> tuple[float, float]:
    """Squared norms of `weight` minus the rows of `table` and of `weight`, each row counted `lookups` [num_rows] times.

    Rows count once without `lookups`, and a table that is None has the rows of `weight`.
    """
    missed = total = 0.0
    for ids, rows in row_blocks(weight, None if table is None else table.device):
        times = 1.0 if lookups is None else lookups[ids.to(lookups.device)].to(rows.device, torch.float64)[:, None]
        total += float((rows.square() * times).sum())
        if table is not None:
            missed += float(((rows - table.materialize(ids)).square() * times).sum())
    return missed, total
