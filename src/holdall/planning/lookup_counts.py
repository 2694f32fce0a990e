"""How often the rows of a table are looked up, in groups of rows with equal counts: all that a plan needs to know.

A table of millions of rows has a few thousand different counts, so sums over rows are sums over groups, and planning
takes as long for a terabyte as for a megabyte.
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

STRETCHES = 64
"""Parts of a renumbered tail."""


def _groups(falling: Array) -> tuple[Array, Array]:
    """Values of a falling array and how often each occurs."""
    starts = np.flatnonzero(np.concatenate([[True], falling[1:] != falling[:-1]]))
    return falling[starts], np.diff(np.append(starts, len(falling)))


@dataclass(frozen=True)
class Lookups:
    """The lookups of one table's rows, most popular first."""

    counts: Array
    """[G] lookups of each row of a group, in the order of ids: falling, unless the tail was renumbered."""
    rows: Array
    """[G] rows in each group."""
    num_samples: int
    """Samples that were counted."""

    @classmethod
    def from_counts(cls, counts: Array, num_samples: int) -> Lookups:
        """From the lookups of every row, in the order of ids.

        Where they are not falling, as in a tail that `holdall order` renumbered, rows are taken in stretches of
        consecutive ids, each with its own counts: a cut inside a stretch is taken to part it by popularity.
        """
        counts = np.asarray(counts)
        rises = np.flatnonzero(counts[1:] > counts[:-1])
        ranked = len(counts) if len(rises) == 0 else int(rises[0]) + 1
        parts = [_groups(counts[:ranked])]
        if ranked < len(counts):
            stretches = np.array_split(counts[ranked:], min(STRETCHES, len(counts) - ranked))
            parts.extend(_groups(np.sort(stretch)[::-1]) for stretch in stretches)
        values, rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return cls(values.astype(np.float64), rows, num_samples)

    @classmethod
    def from_curve(cls, profile: Profile, feature: str, num_rows: int) -> Lookups:
        """From a coverage curve: rows between two of its points are taken as equally popular."""
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
        """Lookups of a sample, on average."""
        return self.total / self.num_samples

    @cached_property
    def _sums(self) -> dict[tuple[str, int, int], tuple[Array, Array]]:
        """What `_sum` has added up before, by what, batch size and block: planning asks for the same many times."""
        return {}

    @cached_property
    def _ends(self) -> Array:
        """[G + 1] rows before each group, and all of them."""
        return np.concatenate([[0], np.cumsum(self.rows)])

    def share(self, first_rows: int) -> float:
        """Share of the lookups that the first rows take."""
        if self.total == 0:
            return 1.0 if first_rows >= self.num_rows else 0.0
        return self._sum(("counts", 0, 1), lambda: self.counts, 0, first_rows) / self.total

    def distinct(self, batch_size: int, start: int = 0, stop: int | None = None) -> float:
        """Different rows, of those from `start` to `stop`, that a batch looks up on average: sum of 1 - (1 - q)^n.

        q is a row's share of the lookups and n the lookups of a batch.
        """
        stop = self.num_rows if stop is None else stop
        return self._sum(("touched", batch_size, 1), lambda: self.touched_by_group(batch_size), start, stop)

    def distinct_blocks(self, batch_size: int, block: int, start: int = 0) -> float:
        """Different blocks of so many consecutive rows, from `start` on, that a batch looks up on average.

        Rows of a block have nearly equal counts, since ids are in popularity order: it is looked up `block` times as
        often as one of them.
        """
        if self.total == 0:
            return 0.0

        def touched() -> Array:
            shares = np.minimum(self.counts / self.total * block, 1.0)
            with np.errstate(divide="ignore"):
                return -np.expm1(batch_size * self.per_sample * np.log1p(-shares)) / block

        return self._sum(("blocks", batch_size, block), touched, start, self.num_rows)

    def variance(self, batch_size: int, start: int = 0) -> float:
        """A bound on the variance of `distinct`: rows of a batch exclude each other if anything."""

        def variance() -> Array:
            touched = self.touched_by_group(batch_size)
            return touched * (1 - touched)

        return self._sum(("variance", batch_size, 1), variance, start, self.num_rows)

    def touched(self, batch_size: int, row: int) -> float:
        """Probability that a batch looks a row up."""
        group = int(np.searchsorted(self._ends, row, side="right")) - 1
        return float(self.touched_by_group(batch_size)[group]) if group < len(self.rows) else 0.0

    def touched_by_group(self, batch_size: int) -> Array:
        """[G] probability that a batch looks a row of the group up."""
        if self.total == 0:
            return np.zeros(len(self.counts))
        shares = np.minimum(self.counts / self.total, 1.0)
        with np.errstate(divide="ignore"):
            return -np.expm1(batch_size * self.per_sample * np.log1p(-shares))

    def _sum(self, what: tuple[str, int, int], values: Callable[[], Array], start: int, stop: int) -> float:
        """Sum over rows start..stop of a value that each group's rows have."""
        if start >= stop:
            return 0.0
        if what not in self._sums:
            found = values()
            self._sums[what] = found, np.concatenate([[0.0], np.cumsum(found * self.rows)])
        each, before = self._sums[what]

        def up_to(row: int) -> float:
            group = int(np.searchsorted(self._ends, row, side="right")) - 1
            if group >= len(self.rows):
                return float(before[-1])
            return float(before[group] + each[group] * (row - self._ends[group]))

        return max(0.0, up_to(stop) - up_to(start))


def lookups_of(schema: Schema, counts: Mapping[str, Array], num_samples: int) -> dict[str, Lookups]:
    """Groups for every table from the counts of its rows."""
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
            found[table] = Lookups.from_counts(counts[table], num_samples)
    return found


def choose_hot(lookups: Mapping[str, Lookups], worth: Mapping[str, float], row_bytes: int, budget: int, batch_size: int
) -> dict[str, int]:  # fmt: skip
    """Hot rows of each table such that the time saved, for all hot rows within `budget` bytes, is the most.

    Making a row hot saves `worth[table]` seconds whenever a batch looks it up: rows are taken in the order of that
    probability times worth. All rows have `row_bytes`, so the order is by seconds a byte; tables with worth 0 get none.
    """
    names = list(lookups)
    # Only a prefix can be hot: a row behind one that is looked up less is worth no more than that one.
    touched = [np.minimum.accumulate(lookups[name].touched_by_group(batch_size)) for name in names]
    saved = [values * worth.get(name, 0.0) for name, values in zip(names, touched, strict=True)]
    table = np.concatenate([np.full(len(values), place) for place, values in enumerate(saved)])
    rows = np.concatenate([lookups[name].rows for name in names])
    gain = np.concatenate(saved)
    order = np.argsort(-gain, kind="stable")
    order = order[gain[order] > 0]
    room = max(0, budget) // row_bytes
    taken = np.cumsum(rows[order])
    inside = rows[order].copy()
    full = int(np.searchsorted(taken, room, side="right"))  # groups that fit whole
    if full < len(order):
        inside[full] = room - (int(taken[full - 1]) if full else 0)
        inside[full + 1 :] = 0
    chosen = np.bincount(table[order], weights=inside, minlength=len(names))
    return {name: int(count) for name, count in zip(names, chosen, strict=True)}
