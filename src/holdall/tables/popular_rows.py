"""Division of a byte budget by popularity: a row of its own for every popular id, one row for the rest of a table.

Rows are kept over all tables together, in the order of expected lookups per byte. What an id seen a few times learns in
a row of its own is mostly noise: ids that share a row lose little, or even gain. Where bytes are scarce, ids in between
get a narrow row: a few numbers, widened by one matrix of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.falling_estimate import falling_estimate
from holdall.common.sizes import readable_bytes
from holdall.tables.bands import Band, Bands
from holdall.tables.dense import Dense
from holdall.tables.expected_lookups import expected_lookups
from holdall.tables.method import Method
from holdall.tables.mixed_dimension import MixedDimension
from holdall.tables.quantized import Quantized
from holdall.tables.shared import Shared
from holdall.tables.table_size import TableSize

CODED_BELOW = 1 / 15
"""Share of the dense bytes below which kept rows are 8-bit codes, which are more rows, instead of floating point.

Decided by validation AUC on the Criteo sample, mean of two seeds that differ by up to 0.005, floating point against
codes: 0.7589 and 0.7577 at 1/10, 0.7566 and 0.7596 at 1/20, 0.7546 and 0.7571 at 1/40. Book-Crossing confirmed codes at
1/20 and 1/40, and had them ahead at 1/10 too (0.7964 and 0.8008), so the place of the threshold is not confirmed.
"""
CODED = Quantized(8, "stochastic", trainable=True, scales="float16", state_bits=8)
"""Codes with 16-bit grids and row-wise state of a byte: 21 bytes a row of dim 16 instead of 28, and as good at 1/40
within the spread of seeds."""
NARROWER = 4
"""Numbers of a row for each number of a narrow one."""
NARROW_GAIN = 0.8
"""Gain of a narrow row, over one row for all, as a share of the gain of a wide row.

Both were decided by validation AUC at 1/40, tables and row-wise state, on the Criteo sample (4 seeds) and Book-Crossing
(2 to 4 seeds): 0.7562 and 0.8015, where dense tables have 0.7557 and 0.8020, and wide rows alone 0.7553 at 1/43 and
0.7944 at 1/44. Gains of 0.65 and 0.9 had 0.7556 and 0.7532, 0.7999 and 0.8009; narrow rows of a half and an eighth of
the numbers 0.7552 and 0.7555, 0.7985 and 0.8020. Avazu (0.7299 against 0.7229 of wide rows alone) and Taobao (0.7921
against 0.7857) confirmed narrow rows; on planted clicks they were behind (0.7627 against 0.7651, dense 0.7612).
"""
REST = Shared(1)
ROW_WISE_STATE = 4
"""Bytes of the state of a row, where it is one number."""


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


class Kept(NamedTuple):
    """Rows of a table that are not the row of the rest: the first `wide`, and from there to `end` narrow ones."""

    wide: int
    end: int


NONE = Kept(0, 0)


@dataclass(frozen=True)
class Popularity:
    """One table, with the use of its rows."""

    size: TableSize
    kept: Method
    """Method of a row of its own."""
    narrow: MixedDimension | None
    """Method of narrow rows; None where there are none."""
    lookups: npt.NDArray[np.float64]
    """[num_rows] expected lookups, falling; 0 for rows that training never looks up."""

    def method(self, kept: Kept) -> Method:
        """Bands of so many rows; the last of them takes in the rest where that takes no more bytes."""
        wide, end = kept
        size, rest = self.size, REST.num_bytes(1, self.size.dim, self.size.dtype)
        last_bytes = self._wide.stored if wide == end else self._narrow.stored
        if last_bytes * (size.num_rows - end) <= rest:
            wide, end = (size.num_rows if wide == end else wide), size.num_rows
        bands: list[tuple[int, Method]] = [(wide, self.kept)] if wide else []
        if end > wide:
            assert self.narrow is not None
            bands.append((end, self.narrow))
        if end < size.num_rows:
            bands.append((size.num_rows, REST))
        if len(bands) == 1:
            return bands[0][1]
        return Bands((*bands[:-1], (None, bands[-1][1])))

    def cost(self, kept: Kept) -> Cost:
        """Bytes of the bands of so many rows."""
        method, num_rows = self.method(kept), self.size.num_rows
        bands = method.bands_of(num_rows) if isinstance(method, Bands) else [Band("", 0, num_rows, method)]
        stored, state = self.size.bytes_by(method), 0
        for band in bands:
            rows = band.end - band.start
            if band.method == REST:
                state += self.size.row_state
            else:
                state += rows * self._state_of_row(band.method)
            if band.method == self.narrow:
                state += self._projection_state
        return Cost(stored, stored + state)

    def best_at(self, price: float) -> Kept:
        """Rows to keep where a byte costs `price` lookups: those that are worth more than their bytes."""
        alone = self._num_above(price, self._wide.with_state)
        if self.narrow is None:
            return Kept(alone, alone)
        end = self._num_above(price, self._narrow.with_state / NARROW_GAIN)
        wide = self._num_above(price, (self._wide - self._narrow).with_state / (1 - NARROW_GAIN))
        if wide >= end:
            return Kept(alone, alone)
        gain = NARROW_GAIN * self._lookups_before[end] + (1 - NARROW_GAIN) * self._lookups_before[wide]
        further = gain - self._lookups_before[alone]
        more_bytes = self.cost(Kept(wide, end)).with_state - self.cost(Kept(alone, alone)).with_state
        return Kept(wide, end) if further > price * more_bytes else Kept(alone, alone)

    def _num_above(self, price: float, num_bytes: float) -> int:
        """Rows whose lookups are worth more than so many bytes."""
        worth = self.lookups / num_bytes
        return len(worth) - int(np.searchsorted(worth[::-1], price, side="right"))

    @cached_property
    def _lookups_before(self) -> npt.NDArray[np.float64]:
        return np.concatenate(([0.0], np.cumsum(self.lookups)))

    @cached_property
    def _wide(self) -> Cost:
        """Bytes of a row of its own."""
        stored = self.kept.num_bytes(1, self.size.dim, self.size.dtype)
        return Cost(stored, stored + self._state_of_row(self.kept))

    @cached_property
    def _narrow(self) -> Cost:
        """Bytes of a narrow row."""
        stored = 0 if self.narrow is None else self.narrow.dim
        return Cost(stored, stored + (0 if self.narrow is None else self._state_of_row(self.narrow)))

    def _state_of_row(self, method: Method) -> int:
        size = self.size
        if size.row_state == ROW_WISE_STATE and size.dim > 1:
            return 1 if method in (CODED, self.narrow) else size.row_state
        return size.row_state * method.dim // size.dim if isinstance(method, MixedDimension) else size.row_state

    @property
    def _projection_state(self) -> int:
        """Bytes of the optimizer state of the projection: as many numbers for each of its own as a row has, or one."""
        size = self.size
        if not size.row_state or self.narrow is None:
            return 0
        slots = max(1, size.row_state // (4 * size.dim))
        return slots * self.narrow.num_parameters(0, size.dim) * size.dtype.itemsize + 4


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
        least = _total_cost(tables, dict.fromkeys(tables, NONE)) + taken
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
    narrow = None
    if coded and CODED.num_bytes(1, size.dim, size.dtype) < kept.num_bytes(1, size.dim, size.dtype):
        kept = CODED
        if size.dim >= NARROWER:
            narrow = MixedDimension(size.dim // NARROWER, bits=8, trainable=True)
    lookups = torch.where(counts > 0, expected_lookups(counts), 0).numpy()
    if bool((lookups[1:] > lookups[:-1]).any()):
        lookups = falling_estimate(lookups)
    return Popularity(size, kept, narrow, lookups)


def _most_worth(tables: Mapping[str, Popularity], limit: Cost) -> dict[str, Kept]:
    """Rows that each table keeps: all that are worth more than a price, then rows worth the price, by table.

    The price is found by bisection of the bits of a float, whose order is that of the numbers.
    """

    def at(bits: int) -> dict[str, Kept]:
        price = float(np.int64(bits).view(np.float64))
        return {name: table.best_at(price) for name, table in tables.items()}

    highest = max((float(table.lookups[0]) for table in tables.values()), default=0.0)
    low, high = 0, int(np.float64(highest).view(np.int64))
    if _total_cost(tables, at(low)).fits(limit):
        return at(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _total_cost(tables, at(middle)).fits(limit) else (middle, high)
    kept, most = at(high), at(low)
    left = limit - _total_cost(tables, kept)
    for name, table in tables.items():
        taken = table.cost(kept[name])
        kept[name] = _fill(table, kept[name], most[name], taken + left)
        left -= table.cost(kept[name]) - taken
    return kept


def _fill(table: Popularity, kept: Kept, most: Kept, limit: Cost) -> Kept:
    """As many of the further rows of `most` as fit: wide ones first, then narrow ones."""
    if table.cost(most).fits(limit):
        return most
    in_one_band = kept.wide == kept.end
    if in_one_band != (most.wide == most.end):  # `most` has other bands: more rows in those of `kept`
        seen = int(np.count_nonzero(table.lookups))
        most = Kept(seen, seen) if in_one_band else Kept(kept.end, kept.end)
    wide = _largest(kept.wide, most.wide, lambda n: table.cost(Kept(n, n if in_one_band else kept.end)).fits(limit))
    if in_one_band:
        return Kept(wide, wide)
    return Kept(wide, _largest(kept.end, most.end, lambda n: table.cost(Kept(wide, n)).fits(limit)))


def _largest(fewest: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from `fewest`, which fits, to `most` that fits."""
    too_many = most + 1
    while too_many - fewest > 1:
        middle = (fewest + too_many) // 2
        fewest, too_many = (middle, too_many) if fits(middle) else (fewest, middle)
    return fewest


def _total_cost(tables: Mapping[str, Popularity], kept: Mapping[str, Kept]) -> Cost:
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
