"""Popularity of a raw stream in bounded memory: one pass, whatever the number of rows and ids.

Of every feature a `HeavyHitters` table counts the frequent ids and a `DistinctSample` represents the remaining ids;
together they give the whole curve, with deterministic bounds. Fully hot inputs are counted in a random sample of rows
that is kept (`RowReservoir`), since hot rows are known at the end only.

With `sample`, the kept rows are of slices of the stream that are not counted. Hot ids are chosen on the counted slices
and evaluated on these held-out slices; the interval of the coverage is over slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import DataError
from holdall.data.columns import Ragged
from holdall.data.layout import RawFeature
from holdall.popularity.curves import ClusterShares, cumulative_at, log_grid, rounded
from holdall.popularity.drift import DriftTracker
from holdall.popularity.profile import Curve, FeatureProfile, HotCurve
from holdall.popularity.reuse import ReuseTimes
from holdall.popularity.sketch import DistinctSample, HeavyHitters
from holdall.popularity.thresholds import HotInputs, coldest_level, cuts_of, levels_of, rows_at, threshold_grid

Array = npt.NDArray[Any]

SAMPLED_IDS = 1 << 14
KEPT_ROWS = 1 << 16
GROUPS = 64  # of kept rows, over which an interval is taken when they were drawn one by one


class FeatureStream:
    """Counts of one feature, from 64-bit hashes of its values."""

    def __init__(self, counters: int, follow: bool):
        self.heavy = HeavyHitters(counters)
        self.sample = DistinctSample(min(SAMPLED_IDS, counters))
        self.times = ReuseTimes() if follow else None
        self.drift = DriftTracker()
        self.lookups = 0
        self._window_start = 0

    def add(self, hashes: Array) -> tuple[Array, Array, Array]:
        """The next lookups, in order; returns distinct hashes, counts and last places for a shared table."""
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(hashes) else order
        distinct = ordered[starts]
        counts = np.diff(np.append(starts, len(hashes)))
        first = order[starts] + self.lookups
        last = order[starts + counts - 1] + self.lookups
        rate = self.sample.rate
        tracked, before = self.heavy.add(distinct, counts, last)
        sampled, sampled_before = self.sample.add(distinct, counts, last)
        if self.times is not None:
            inside = order[1:] - order[:-1]
            self.times.add(inside[ordered[1:] == ordered[:-1]])
            self.times.add((first - before)[tracked])
            again = sampled & ~tracked & (sampled_before >= 0)
            self.times.add((first - sampled_before)[again], 1.0 / rate)
            self.times.add_first(first[sampled & (sampled_before < 0)] + 1, 1.0 / rate)
        self.lookups += len(hashes)
        return distinct, counts, last

    def end_window(self) -> None:
        hashes, counts = self.heavy.since_window()

        def counts_of(others: Array) -> Array:
            places = np.minimum(np.searchsorted(hashes, others), len(hashes) - 1)
            return np.where(hashes[places] == others, counts[places], 0)

        self.drift.end_window(hashes, counts, self.lookups - self._window_start, counts_of)
        self._window_start = self.lookups

    def ids(self) -> tuple[Array, Array]:
        """Counts, falling, and how many ids each stands for.

        Every id looked up more than `error` times is in the table; ids with uncertain counts are represented by the
        sampled ids that are not among the certain ones, scaled to the lookups that are left.
        """
        hashes, counts, _ = self.heavy.top()
        if self.heavy.error == 0:
            return counts, np.ones(len(counts))
        sure = counts > self.heavy.error
        rest = ~np.isin(self.sample.hashes, hashes[sure])
        left = self.lookups - int(counts[sure].sum())
        tail = self.sample.counts[rest]
        weight = left / max(int(tail.sum()), 1)
        both = np.concatenate([counts[sure], tail])
        weights = np.concatenate([np.ones(int(sure.sum())), np.full(len(tail), weight)])
        order = np.argsort(-both, kind="stable")
        return both[order], weights[order]

    def coverage(self, counts: Array, weights: Array) -> Curve:
        """The curve, with certain bounds from the table alone."""
        grid = log_grid(max(1, round(float(weights.sum()))))
        share = np.clip(cumulative_at(counts, grid, weights) / self.lookups, 0.0, 1.0)
        low = high = share
        if self.heavy.error:
            _, known, missed = self.heavy.top()
            most = np.sort(known + missed)[::-1]
            beyond = np.maximum(grid - len(known), 0) * self.heavy.error
            low = cumulative_at(known, grid) / self.lookups
            high = np.minimum((cumulative_at(most, grid) + beyond) / self.lookups, 1.0)
            share = np.clip(share, low, high)
        return _curve(grid, share, low, high)

    def held_out(self, values: Ragged, groups: Array) -> Curve:
        """The coverage of the k most frequent ids among kept rows that were not counted, with an interval."""
        hashes, _, _ = self.heavy.top()
        grid = log_grid(len(hashes))
        order = np.argsort(hashes)
        places = np.minimum(np.searchsorted(hashes[order], values.flat), len(hashes) - 1)
        rank = np.where(hashes[order][places] == values.flat, order[places], len(hashes))
        at = np.searchsorted(grid, rank, side="right")  # the first k > rank
        covered = ClusterShares(len(grid))
        of_group = np.repeat(groups, values.lengths)
        for group in np.unique(groups):
            mine = at[of_group == group]
            covered.add(np.cumsum(np.bincount(mine, minlength=len(grid) + 1))[:-1], len(mine))
        return _curve(grid, covered.share(), *covered.interval(0.0))


class RowReservoir:
    """A random sample of rows of a stream of unknown length: those with the smallest random numbers.

    Memory: 8 bytes for each lookup of at most two times `capacity` rows.
    """

    def __init__(self, num_features: int, capacity: int, seed: int):
        self._capacity = capacity
        self._rng = np.random.default_rng(seed)
        self._limit = 1.0
        self._draws = np.zeros(0)
        self.groups = np.zeros(0, dtype=np.int64)
        """[R] which slice of the stream each kept row is from."""
        self.features = [Ragged(np.zeros(0, dtype=np.uint64), np.zeros(1, dtype=np.int64))] * num_features
        self.rows_seen = 0

    def add(self, features: Sequence[Ragged], groups: Array) -> None:
        draws = self._rng.random(len(groups))
        self.rows_seen += len(groups)
        rows = np.flatnonzero(draws < self._limit)
        self._draws = np.concatenate([self._draws, draws[rows]])
        self.groups = np.concatenate([self.groups, groups[rows]])
        pairs = zip(self.features, features, strict=True)
        self.features = [Ragged.concatenate([kept, new.take(rows)]) for kept, new in pairs]
        if len(self._draws) > 2 * self._capacity:
            self.shrink()

    def shrink(self) -> None:
        """Reduce the sample to `capacity` rows."""
        if len(self._draws) > self._capacity:
            self._limit = float(np.partition(self._draws, self._capacity)[self._capacity])
            rows = np.flatnonzero(self._draws < self._limit)
            self._draws, self.groups = self._draws[rows], self.groups[rows]
            self.features = [feature.take(rows) for feature in self.features]

    def __len__(self) -> int:
        return len(self.groups)


class StreamCount:
    """Counts of all features of a raw stream."""

    def __init__(self, features: Sequence[RawFeature], counters: int, sampled: bool, seed: int):
        self.layout = tuple(features)
        self.sampled = sampled
        self.features = [FeatureStream(counters, follow=not sampled) for _ in features]
        self.reservoir = RowReservoir(len(features), KEPT_ROWS, seed)
        self.rows_counted = 0
        names = [feature.table_name for feature in features]
        self._shared = {name: HeavyHitters(counters) for name in names if names.count(name) > 1}

    @property
    def tables(self) -> dict[str, HeavyHitters]:
        """The counters of every table: a feature's own, or the pooled ones of a shared table."""
        own = {f.table_name: stream.heavy for f, stream in zip(self.layout, self.features, strict=True)}
        return own | self._shared

    def count(self, features: Sequence[Ragged], num_rows: int) -> None:
        """Rows that popularity is counted on."""
        self.rows_counted += num_rows
        for feature, stream, values in zip(self.layout, self.features, features, strict=True):
            block = stream.add(values.flat)
            if feature.table_name in self._shared:
                self._shared[feature.table_name].add(*block)

    def end_window(self) -> None:
        for stream in self.features:
            stream.end_window()

    def feature_profiles(self, ordered: bool, windows: int) -> tuple[FeatureProfile, ...]:
        self.reservoir.shrink()
        made = []
        for place, (feature, stream) in enumerate(zip(self.layout, self.features, strict=True)):
            if not stream.lookups:
                raise DataError(
                    f"feature '{feature.name}' has no lookups in the {self.rows_counted:,} rows counted, so it has no "
                    f"popularity: leave it out of the schema{', or read a larger sample' if self.sampled else ''}"
                )
            counts, weights = stream.ids()
            curve = stream.coverage(counts, weights)
            lru = None
            if stream.times is not None:
                distinct = float(weights.sum())
                lru = rounded(stream.times.miss_ratio(stream.lookups, distinct, np.array(curve.k)))
            if self.sampled:
                curve = stream.held_out(self.reservoir.features[place], self.reservoir.groups)
            drift = stream.drift.finish(stream.heavy.top()[1], stream.lookups, windows) if ordered else None
            made.append(
                FeatureProfile(
                    name=feature.name, kind=feature.kind, table=feature.table_name, num_rows=None,
                    lookups=stream.lookups, distinct=round(float(weights.sum())),
                    singletons=round(float(weights[counts == 1].sum())), coverage=curve, lru=lru, drift=drift,
                )
            )  # fmt: skip
        return tuple(made)

    def hot(self) -> HotCurve:
        """Hot rows at each threshold that the counts resolve, and hot inputs among the kept rows."""
        self.reservoir.shrink()
        tables = self.tables
        # Below the largest error a count is not known well enough to call a row hot.
        lowest = max(table.error for table in tables.values()) + 1
        thresholds = threshold_grid(self.rows_counted, lowest)
        cuts = cuts_of(thresholds, self.rows_counted)
        kept = self.reservoir
        lookups = (
            (levels_of(tables[feature.table_name].count_of(values.flat), cuts), values.offsets)
            for feature, values in zip(self.layout, kept.features, strict=True)
        )
        coldest = coldest_level(len(kept), lookups, len(cuts))
        inputs = HotInputs(len(cuts))
        groups = kept.groups if self.sampled else np.arange(len(kept)) * GROUPS // max(len(kept), 1)
        for group in np.unique(groups):
            inputs.add(coldest[groups == group])
        fraction = 0.0 if self.sampled else len(kept) / max(kept.rows_seen, 1)
        low, high = inputs.shares.interval(fraction)
        share = inputs.shares.share()
        if fraction == 1.0:
            low = high = share
        rows = {
            name: tuple(rows_at(levels_of(table.top()[1], cuts), len(cuts)).tolist()) for name, table in tables.items()
        }
        digits = tuple(float(f"{value:.6g}") for value in thresholds)
        return HotCurve(threshold=digits, rows=rows, inputs=rounded(share), low=rounded(low), high=rounded(high))


def _curve(grid: Array, share: Array, low: Array, high: Array) -> Curve:
    return Curve(k=tuple(grid.tolist()), share=rounded(share), low=rounded(low), high=rounded(high))
