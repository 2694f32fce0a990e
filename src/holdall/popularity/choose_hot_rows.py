"""Choice of hot rows by lookups per byte, over all tables, and the inputs that need no other rows.

Ids are in popularity order, so the hot rows of a table are its first ones, and a choice is one number per table. It is
used for `--hot-bytes` (`training.strategies.hot_bytes`). A plan chooses by seconds saved (`planning.hot_row_selector`),
and `two-fold` by the cost of its exchange (`planning.two_fold_cut`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import ConfigError, DataError
from holdall.common.sizes import readable_bytes
from holdall.data.dataset import DataSet
from holdall.data.schema import Schema

Array = npt.NDArray[Any]

BLOCK_ROWS = 1 << 18
"""Samples read at a time: 26 features of int32 are 27 MB."""


def hot_rows(
    counts: Mapping[str, Array], row_bytes: int | Mapping[str, int], budget: int, *, at_most: Mapping[str, int] = {}
) -> dict[str, int]:
    """Number of hot rows of each table, where all hot rows take at most `budget` bytes.

    The value of a row is its lookups per byte, and rows are taken in the order of their value over all tables; there
    is no per-table quota. `counts` has the lookups of every row of a table, in the order of its ids. Where counts are
    not non-increasing, as in a table whose tail is in another order, a row counts for no more than those before it,
    since only a prefix can be hot. `at_most` limits single tables. Rows that were never looked up are not hot.
    """
    sizes = {name: row_bytes if isinstance(row_bytes, int) else row_bytes[name] for name in counts}
    smallest = min(sizes.values(), default=0)
    if budget < smallest:
        raise ConfigError(
            f"{readable_bytes(budget)} for hot rows is less than the {readable_bytes(smallest)} of a single row with "
            f"its optimizer state: raise the budget"
        )
    values = {}
    for name, lookups in counts.items():
        falling = np.minimum.accumulate(np.asarray(lookups)[: at_most.get(name)])
        values[name] = falling[: np.searchsorted(-falling, 0)] / sizes[name]
    threshold = _threshold(values, sizes, budget)
    chosen = {name: int(np.searchsorted(-of_rows, -threshold)) for name, of_rows in values.items()}  # value above it
    left = budget - sum(rows * sizes[name] for name, rows in chosen.items())
    while True:  # then the next ones, as long as one fits: few turns, since at the threshold not all did
        fitting = [name for name in values if sizes[name] <= left and chosen[name] < len(values[name])]
        if not fitting:
            return chosen
        name = max(fitting, key=lambda name: values[name][chosen[name]])
        equal = int(np.searchsorted(-values[name], -values[name][chosen[name]], side="right")) - chosen[name]
        more = min(equal, left // sizes[name])
        chosen[name] += more
        left -= more * sizes[name]


def _threshold(values: Mapping[str, Array], sizes: Mapping[str, int], budget: int) -> float:
    """Smallest value such that all rows above it fit the budget."""

    def fits_above(value: float) -> bool:
        return sum(int(np.searchsorted(-rows, -value)) * sizes[name] for name, rows in values.items()) <= budget

    steps = np.unique(np.concatenate([np.zeros(1), *values.values()]))
    low, high = 0, len(steps) - 1  # above the highest there is nothing, which fits
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits_above(steps[middle]) else (middle + 1, high)
    return float(steps[low])


def count_lookups(data: DataSet) -> dict[str, Array]:
    """[rows] int64 by table: how often a split looks each row up. Reads the ids once, a block of samples at a time."""
    counts = {}
    for feature in data.schema.features:
        counts[feature.table or feature.name] = np.zeros(feature.num_rows, dtype=np.int64)
    tables = {
        one_hot: [feature.table or feature.name for feature in data.schema.features if feature.one_hot == one_hot]
        for one_hot in (True, False)
    }
    for columns in _blocks(data):
        for name, ids in (
            *zip(tables[True], columns.ids.T, strict=True),
            *((name, bag.flat) for name, bag in zip(tables[False], columns.bags, strict=True)),
        ):
            np.add.at(counts[name], ids, 1)  # not bincount: a block touches few of a large table's rows
    return counts


def hot_inputs(data: DataSet, rows: Mapping[str, int]) -> Array:
    """[R] bool: the samples of a split all of whose lookups are hot; a sample without lookups is.

    `rows` is hot rows by table. Reads the ids once, `BLOCK_ROWS` samples at a time.
    """
    limits = feature_limits(data.schema, rows)
    found = [np.zeros(0, dtype=bool)]
    one_hot = [limit for limit, feature in zip(limits, data.schema.features, strict=True) if feature.one_hot]
    in_bags = [limit for limit, feature in zip(limits, data.schema.features, strict=True) if not feature.one_hot]
    for columns in _blocks(data):
        hot = (columns.ids < np.asarray(one_hot, dtype=np.int64)).all(axis=1)
        for bag, limit in zip(columns.bags, in_bags, strict=True):
            cold_before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(bag.values >= limit)])
            hot &= cold_before[bag.offsets[1:]] == cold_before[bag.offsets[:-1]]
        found.append(hot)
    return np.concatenate(found)


def ranked_rows(schema: Schema) -> dict[str, int]:
    """Rows of every table that are in order of popularity: all of them, unless its tail was put into another order."""
    found: dict[str, int] = {}
    for feature in schema.features:
        found[feature.table or feature.name] = feature.num_ranked
    return found


def feature_limits(schema: Schema, rows: Mapping[str, int]) -> list[int]:
    """Hot rows of every feature's table, in the order of the features."""
    return [rows[feature.table or feature.name] for feature in schema.features]


def smallest_useful_budget(data: DataSet, counts: Mapping[str, Array], row_bytes: int, share: float = 0.1) -> int:
    """Bytes of hot rows, to the next power of two, at which `share` of the inputs are hot."""
    budget = row_bytes * len(counts)
    total = row_bytes * sum(len(lookups) for lookups in counts.values())
    while budget < total and hot_inputs(data, hot_rows(counts, row_bytes, budget)).mean() < share:
        budget *= 2
    return budget


def _blocks(data: DataSet) -> Iterator[Any]:
    if len(data) == 0:
        raise DataError(f"split '{data.split}' of {data.folder} has no rows: choose another split or prepare more")
    for start in range(0, len(data), BLOCK_ROWS):
        yield data.columns(start, min(start + BLOCK_ROWS, len(data)))
