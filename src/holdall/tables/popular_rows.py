"""Division of a byte budget by popularity: a row of its own for every popular id, one row for the rest of a table.

Rows are kept over all tables together, in the order of expected lookups per byte. What an id seen a few times learns in
a row of its own is mostly noise: ids that share a row lose little, or even gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.falling_estimate import falling_estimate
from holdall.common.sizes import readable_bytes
from holdall.tables.bands import Bands
from holdall.tables.dense import Dense
from holdall.tables.expected_lookups import expected_lookups
from holdall.tables.method import Method
from holdall.tables.quantized import Quantized
from holdall.tables.shared import Shared
from holdall.tables.table_size import TableSize

CODED_BELOW = 1 / 15
"""Share of the dense bytes below which kept rows are 8-bit codes, which are more rows, instead of floating point.

Decided by validation AUC on the Criteo sample, mean of two seeds that differ by up to 0.005, floating point against
codes: 0.7589 and 0.7577 at 1/10, 0.7566 and 0.7596 at 1/20, 0.7546 and 0.7571 at 1/40. Book-Crossing confirmed codes at
1/20 and 1/40, and had them ahead at 1/10 too (0.7964 and 0.8008), so the place of the threshold is not confirmed.
"""
CODED = Quantized(8, "stochastic", trainable=True, scales="float16")
"""Codes with 16-bit grids: 20 bytes a row of dim 16 instead of 24. At 1/40 they are as good as 32-bit grids within the
spread of seeds on Criteo (0.7571 against 0.7579), and better on Book-Crossing (0.7944 against 0.7927).
"""
REST = Shared(1)


def check_counts_by_table(counts: Mapping[str, Tensor], num_rows: Mapping[str, int]) -> dict[str, Tensor]:
    """`counts` [num_rows] of every table, or a `ConfigError` that names the table whose counts cannot be its own."""
    if unknown := [name for name in counts if name not in num_rows]:
        raise ConfigError(f"counts has '{unknown[0]}', which is no table{did_you_mean(unknown[0], num_rows)}")
    found: dict[str, Tensor] = {}
    for name, rows in num_rows.items():
        if name not in counts:
            raise ConfigError(f"table '{name}' has no counts: give the lookups of every row of every table")
        its = torch.as_tensor(counts[name])
        if its.shape != (rows,):
            shape = f"{len(its):,} counts" if its.dim() == 1 else f"counts of shape {tuple(its.shape)}"
            raise ConfigError(f"table '{name}' has {rows:,} rows and {shape}: are they of another data set?")
        wrong = ~((its >= 0) & its.isfinite())
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ConfigError(f"row {row} of table '{name}' has a count of {its[row].item()}: it must be 0 or more")
        found[name] = its
    return found


@dataclass(frozen=True)
class Cost:
    """Bytes of tables."""

    stored: int
    with_state: int
    """Bytes of the tables and of their optimizer state."""

    def fits(self, limit: Cost) -> bool:
        return self.stored <= limit.stored and self.with_state <= limit.with_state

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.stored + other.stored, self.with_state + other.with_state)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.stored - other.stored, self.with_state - other.with_state)


@dataclass(frozen=True)
class Popularity:
    """One table, with the use of its rows."""

    size: TableSize
    kept: Method
    """Method of a row of its own."""
    worth: npt.NDArray[np.float64]
    """[num_rows] expected lookups per byte, falling; 0 for rows that training never looks up."""

    def method(self, num_kept: int) -> Method:
        """Bands with so many rows of their own; the whole table where that takes no more bytes."""
        size, left = self.size, self.size.num_rows - num_kept
        if self._row_bytes * left <= REST.num_bytes(1, size.dim, size.dtype):
            return self.kept
        return Bands(((num_kept, self.kept), (None, REST))) if num_kept else REST

    def cost(self, num_kept: int) -> Cost:
        """Bytes of the bands with so many rows of their own."""
        method, num_rows = self.method(num_kept), self.size.num_rows
        num_stored = 1 if method == REST else num_kept + 1 if isinstance(method, Bands) else num_rows
        stored = self.size.bytes_by(method)
        return Cost(stored, stored + num_stored * self.size.row_state)

    def num_above(self, worth: float) -> int:
        """Rows that are worth more."""
        return len(self.worth) - int(np.searchsorted(self.worth[::-1], worth, side="right"))

    @property
    def _row_bytes(self) -> int:
        return self.kept.num_bytes(1, self.size.dim, self.size.dtype)


def keep_popular_rows(
    sizes: Mapping[str, TableSize], available: int, counts: Mapping[str, Tensor], *, min_rows: int = 0
) -> dict[str, Method]:
    """A method for every table: `available` bytes of all of them are spent on the rows that are worth most.

    The tables with their optimizer state take at most the same share of dense tables with theirs. Rows of equal worth
    are kept in the order of tables. Tables of fewer than `min_rows` rows stay dense, and need no counts.
    """
    by_rank = {name: size.num_rows for name, size in sizes.items() if size.num_rows >= min_rows}
    needed = {name: found for name, found in counts.items() if name in by_rank or name not in sizes}
    counts = check_counts_by_table(needed, by_rank)
    whole = sum(size.dense_bytes for size in sizes.values())
    if available >= whole:
        return dict.fromkeys(sizes, Dense())
    dense = Cost(whole, whole + sum(size.dense_state for size in sizes.values()))
    fixed = [size for size in sizes.values() if size.num_rows < min_rows]
    taken = Cost(sum(size.dense_bytes for size in fixed), sum(size.dense_bytes + size.dense_state for size in fixed))
    forms = [False]
    if all(size.training for size in sizes.values()):
        forms = [True] if available < CODED_BELOW * whole else [False, True]  # codes also where dense rows do not fit
    smallest, tables = 0, dict[str, Popularity]()
    for coded in forms:
        tables = {name: _popularity(sizes[name], counts[name], coded=coded) for name in by_rank}
        least = _total_cost(tables, dict.fromkeys(tables, 0)) + taken
        smallest = max(least.stored, -(-least.with_state * whole // dense.with_state))
        if smallest <= available:
            break
    if available < smallest:
        raise ConfigError(_too_small(len(sizes), available, smallest, min_rows if fixed else 0))
    limit = Cost(available, available * dense.with_state // whole) - taken
    kept = _most_worth(tables, limit)
    return {name: tables[name].method(kept[name]) if name in tables else Dense() for name in sizes}


def _popularity(size: TableSize, counts: Tensor, *, coded: bool) -> Popularity:
    kept: Method = Dense()
    if coded and CODED.num_bytes(1, size.dim, size.dtype) < kept.num_bytes(1, size.dim, size.dtype):
        kept = CODED
    lookups = torch.where(counts > 0, expected_lookups(counts), 0).numpy()
    if bool((lookups[1:] > lookups[:-1]).any()):
        lookups = falling_estimate(lookups)
    return Popularity(size, kept, lookups / (kept.num_bytes(1, size.dim, size.dtype) + size.row_state))


def _most_worth(tables: Mapping[str, Popularity], limit: Cost) -> dict[str, int]:
    """Rows that each table keeps: all that are worth more than a threshold, then rows at the threshold, by table.

    The threshold is found by bisection of the bits of a float, whose order is that of the numbers.
    """

    def above(bits: int) -> dict[str, int]:
        worth = float(np.int64(bits).view(np.float64))
        return {name: table.num_above(worth) for name, table in tables.items()}

    highest = max((float(table.worth[0]) for table in tables.values()), default=0.0)
    low, high = 0, int(np.float64(highest).view(np.int64))
    if _total_cost(tables, above(low)).fits(limit):
        return above(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _total_cost(tables, above(middle)).fits(limit) else (middle, high)
    kept, most = above(high), above(low)
    left = limit - _total_cost(tables, kept)
    for name, table in tables.items():
        taken, fewest, too_many = table.cost(kept[name]), kept[name], most[name] + 1
        while too_many - fewest > 1:
            middle = (fewest + too_many) // 2
            further = table.cost(middle) - taken
            fewest, too_many = (middle, too_many) if further.fits(left) else (fewest, middle)
        kept[name] = fewest
        left -= table.cost(fewest) - taken
    return kept


def _total_cost(tables: Mapping[str, Popularity], kept: Mapping[str, int]) -> Cost:
    """Bytes of all tables that keep so many rows."""
    return sum((table.cost(kept[name]) for name, table in tables.items()), Cost(0, 0))


def _too_small(num_tables: int, available: int, smallest: int, min_rows: int) -> str:
    """The error of a budget that cannot be kept: the smallest one that can, to the byte."""
    count = "this table" if num_tables == 1 else f"these {num_tables} tables"
    dense = f", with tables of fewer than {min_rows:,} rows kept dense," if min_rows else ""
    return (
        f"a budget of {readable_bytes(available)} is too small for {count}: one row for all ids of every table{dense} "
        f"takes {smallest}B"
    )
