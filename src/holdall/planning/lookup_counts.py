"""Lookup counts of a table's rows, grouped by equal counts, and the expectations that the cost model takes from them.

A table of millions of rows has a few thousand different counts. Sums over rows are sums over groups, so planning takes
as long for a terabyte as for a megabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import DataError
from holdall.data.schema import Schema
from holdall.popularity.profile import Profile

Array = npt.NDArray[Any]

TAIL_SEGMENTS = 64
"""Segments of consecutive ids into which a renumbered tail is divided."""


def _groups(values: Array) -> tuple[Array, Array]:
    """Values of a non-increasing array, and the number of times each occurs."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return values[starts], np.diff(np.append(starts, len(values)))


@dataclass(frozen=True)
class LookupCounts:
    """Lookup counts of one table's rows in groups, most popular first."""

    counts: Array
    """[G] lookups of each row of a group, in the order of ids: non-increasing, unless the tail was renumbered."""
    rows: Array
    """[G] rows in each group."""
    num_samples: int
    """Samples that were counted."""

    @classmethod
    def from_counts(cls, counts: Array, num_samples: int) -> LookupCounts:
        """From the lookups of every row, in the order of ids.

        Where counts increase, as in a tail that `holdall order` renumbered, the tail is divided into segments of
        consecutive ids, each with its own counts. A cut inside a segment is assumed to divide it by popularity.
        """
        counts = np.asarray(counts)
        rises = np.flatnonzero(counts[1:] > counts[:-1])
        ranked = len(counts) if len(rises) == 0 else int(rises[0]) + 1
        parts = [_groups(counts[:ranked])]
        if ranked < len(counts):
            segments = np.array_split(counts[ranked:], min(TAIL_SEGMENTS, len(counts) - ranked))
            parts.extend(_groups(np.sort(segment)[::-1]) for segment in segments)
        values, rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return cls(values.astype(np.float64), rows, num_samples)

    @classmethod
    def from_curve(cls, profile: Profile, feature: str, num_rows: int) -> LookupCounts:
        """From a coverage curve; rows between two of its points are assumed to be equally popular."""
        found = profile.feature(feature)
        k = np.minimum(np.array((0, *found.coverage.k), dtype=np.int64), num_rows)
        rows = np.diff(k)
        lookups = np.diff(np.array((0.0, *found.coverage.share))) * found.lookups
        keep = rows > 0
        rows, lookups = rows[keep], lookups[keep]
        rest = num_rows - int(rows.sum())
        if rest > 0:
            rows, lookups = np.append(rows, rest), np.append(lookups, max(0.0, found.lookups - lookups.sum()))
        return cls(lookups / rows, rows, profile.rows_read)

    @property
    def num_rows(self) -> int:
        return int(self.rows.sum())

    @cached_property
    def total(self) -> float:
        return float((self.counts * self.rows).sum())

    @property
    def per_sample(self) -> float:
        """Average lookups per sample."""
        return self.total / self.num_samples

    @cached_property
    def _sums(self) -> dict[tuple[str, int, int], tuple[Array, Array]]:
        """Cache of `_sum` by quantity, batch size and block: planning asks for the same sums many times."""
        return {}

    @cached_property
    def _ends(self) -> Array:
        """[G + 1] number of rows before each group, and of all rows."""
        return np.concatenate([[0], np.cumsum(self.rows)])

    def share(self, first_rows: int) -> float:
        """Share of the lookups that go to the first rows."""
        if self.total == 0:
            return 1.0 if first_rows >= self.num_rows else 0.0
        return self._sum(("counts", 0, 1), lambda: self.counts, 0, first_rows) / self.total

    def distinct(self, batch_size: int, start: int = 0, stop: int | None = None) -> float:
        """Expected distinct rows among `start`..`stop` that a batch looks up: the sum of 1 - (1 - q)^n.

        q is a row's share of the lookups and n the number of lookups of a batch.
        """
        stop = self.num_rows if stop is None else stop
        return self._sum(("touched", batch_size, 1), lambda: self.touched_by_group(batch_size), start, stop)

    def distinct_blocks(self, batch_size: int, block: int, start: int = 0) -> float:
        """Expected distinct blocks of `block` consecutive rows, from `start` on, that a batch looks up.

        Rows of a block have nearly equal counts, since ids are in popularity order: a block is looked up `block` times
        as often as one of its rows.
        """
        return self._sum(
            ("blocks", batch_size, block),
            lambda: self.touched_by_group(batch_size, block) / block,
            start,
            self.num_rows,
        )

    def variance(self, batch_size: int, start: int = 0) -> float:
        """Upper bound of the variance of `distinct`: the rows of a batch are negatively correlated."""

        def variance() -> Array:
            touched = self.touched_by_group(batch_size)
            return touched * (1 - touched)

        return self._sum(("variance", batch_size, 1), variance, start, self.num_rows)

    def touched(self, batch_size: int, row: int) -> float:
        """Probability that a batch looks up a row."""
        group = int(np.searchsorted(self._ends, row, side="right")) - 1
        return float(self.touched_by_group(batch_size)[group]) if group < len(self.rows) else 0.0

    def touched_by_group(self, batch_size: int, block: int = 1) -> Array:
        """[G] probability that a batch looks up a given row of the group, or a block of `block` such rows."""
        if self.total == 0:
            return np.zeros(len(self.counts))
        shares = np.minimum(self.counts / self.total * block, 1.0)
        with np.errstate(divide="ignore"):
            return -np.expm1(batch_size * self.per_sample * np.log1p(-shares))

    def _sum(self, key: tuple[str, int, int], values: Callable[[], Array], start: int, stop: int) -> float:
        """Sum over rows start..stop of a value that is equal for all rows of a group."""
        if start >= stop:
            return 0.0
        if key not in self._sums:
            found = values()
            self._sums[key] = found, np.concatenate([[0.0], np.cumsum(found * self.rows)])
        each, before = self._sums[key]

        def up_to(row: int) -> float:
            group = int(np.searchsorted(self._ends, row, side="right")) - 1
            if group >= len(self.rows):
                return float(before[-1])
            return float(before[group] + each[group] * (row - self._ends[group]))

        return max(0.0, up_to(stop) - up_to(start))


def table_lookups(schema: Schema, counts: Mapping[str, Array], num_samples: int) -> dict[str, LookupCounts]:
    """Lookups of every table, from the counts of its rows."""
    found = {}
    for feature in schema.features:
        table = feature.table or feature.name
        if table not in counts:
            raise DataError(f"there are no counts for table '{table}': profile the data set again")
        if len(counts[table]) != feature.num_rows:
            raise DataError(
                f"there are counts for {len(counts[table]):,} rows of table '{table}', which has {feature.num_rows:,}"
            )
        if table not in found:
            found[table] = LookupCounts.from_counts(counts[table], num_samples)
    return found
