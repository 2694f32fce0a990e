"""Exact counts of a prepared set, or of a sample of its blocks: two passes over memory-mapped columns.

The first pass counts ids, follows reuse times and compares windows; the second, which knows the counts, finds for every
input its coldest lookup. Ids are in popularity order, so the top k ids are the ids below k and nothing is sorted.
Memory: 16 bytes per table row (24 with a sample), at most 4 MB a feature for reuse times, and a block of rows.

A sample is blocks of consecutive rows drawn at random within each window. Its coverage curve is unbiased, since which
ids are the top k does not depend on it. Hot inputs are cross-fitted: rows are hot by the counts of one half of the
blocks, inputs are judged in the other half, and the two results are pooled, so no input is judged by counts that
include it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import DataError, IdError
from holdall.common.falling_estimate import falling_estimate
from holdall.data.columns import Columns
from holdall.data.dataset import DataSet
from holdall.popularity.curves import CONFIDENCE, ClusterShares, cumulative_at, log_grid, rounded
from holdall.popularity.drift import Drift, DriftTracker
from holdall.popularity.profile import Curve, FeatureProfile, HotCurve, Profile, Sample, Source
from holdall.popularity.reuse import ReuseTracker
from holdall.popularity.thresholds import HotInputs, coldest_level, cuts_of, levels_of, rows_at, threshold_grid

Array = npt.NDArray[Any]
Progress = Callable[[str, int, int], None]

BLOCK_ROWS = 1 << 15
MEASURED_ROWS = 1 << 18  # of which reuse times are taken, at least: a share is then known to about 0.001
SAMPLE_BLOCK_ROWS = 4096  # a few hundred kilobytes on disk: worth a seek
SAMPLE_BLOCKS = 64  # at least, where there are enough rows: an interval over blocks needs some
UNORDERED_FORMATS = ("movielens", "taobao", "yelp", "bookcrossing", "synthetic")
"""Formats whose rows are in no order of time once prepared."""


@dataclass(frozen=True)
class RowBlock:
    """Rows start..stop, and the window they belong to."""

    start: int
    stop: int
    window: int
    number: int


def is_ordered(source: dict[str, Any]) -> bool:
    """Whether the rows of a data set from this source are in the order of a log."""
    return source.get("format") not in UNORDERED_FORMATS


def choose_blocks(num_rows: int, windows: int, sample: float | None, seed: int) -> list[RowBlock]:
    """All rows in blocks, or blocks drawn at random without replacement, equally many from every window."""
    rows = BLOCK_ROWS
    if sample is not None:
        rows = int(np.clip(num_rows * sample / SAMPLE_BLOCKS, 1, SAMPLE_BLOCK_ROWS))
    edges = np.linspace(0, num_rows, windows + 1).astype(np.int64)
    rng = np.random.default_rng(seed)
    blocks: list[RowBlock] = []
    for window, (first, last) in enumerate(pairwise(edges.tolist())):
        starts = np.arange(first, last, rows)
        if sample is not None:
            wanted = int(np.clip(round(len(starts) * sample), 1, len(starts)))
            starts = np.sort(rng.choice(starts, wanted, replace=False))
        for start in starts.tolist():
            blocks.append(RowBlock(start, min(start + rows, last), window, len(blocks)))
    return blocks


class FeatureCounts:
    """Counts of one feature, from the first pass."""

    def __init__(self, num_rows: int, halves: int, follow: bool):
        self.counts = np.zeros((halves, num_rows), dtype=np.int64)
        self.window = np.zeros(num_rows, dtype=np.int64)
        self.lookups = 0
        self.window_lookups = 0
        self.grid = log_grid(num_rows)
        self.covered = ClusterShares(len(self.grid)) if halves > 1 else None
        self.reuse = ReuseTracker(num_rows) if follow else None
        self.drift = DriftTracker()

    def add(self, ids: Array, half: int, measure: bool) -> None:
        np.add.at(self.counts[half], ids, 1)
        np.add.at(self.window, ids, 1)
        self.lookups += len(ids)
        self.window_lookups += len(ids)
        if self.reuse is not None:
            self.reuse.add(ids, measure)
        if self.covered is not None:
            place = np.searchsorted(self.grid, ids, side="right")  # the first k > id: from there on it is covered
            self.covered.add(np.cumsum(np.bincount(place, minlength=len(self.grid) + 1))[:-1], len(ids))

    def end_window(self) -> None:
        ids = np.flatnonzero(self.window)
        self.drift.end_window(ids, self.window[ids], self.window_lookups, lambda other: self.window[other])
        self.window[:] = 0
        self.window_lookups = 0

    def profile(self, total: Array, share: float) -> tuple[Curve, int, int, tuple[float, ...] | None]:
        """Coverage, distinct ids, singletons and the miss ratio of an LRU cache."""
        distinct, singletons = int(np.count_nonzero(total)), int(np.count_nonzero(total == 1))
        if self.covered is not None:
            covered, (low, high) = self.covered.share(), self.covered.interval(share)
        else:
            covered = low = high = cumulative_at(total, self.grid) / self.lookups
        lru = None
        if self.reuse is not None:
            lru = rounded(self.reuse.times.miss_ratio(self.lookups, distinct, self.grid))
        curve = Curve(k=tuple(self.grid.tolist()), share=rounded(covered), low=rounded(low), high=rounded(high))
        return curve, distinct, singletons, lru


class PreparedCount:
    """Both passes over one split."""

    def __init__(self, data: DataSet, sample: float | None, windows: int, seed: int):
        self.data = data
        self.sample = sample
        if not len(data):
            raise DataError(f"split '{data.split}' of {data.folder} has no rows to profile: prepare it with some")
        if not data.schema.features:
            raise DataError(f"{data.folder} has no categorical features: there is nothing to look up")
        self.windows = min(windows, len(data))
        self.blocks = choose_blocks(len(data), self.windows, sample, seed)
        self.rows_read = sum(block.stop - block.start for block in self.blocks)
        self.halves = 1 if sample is None else 2
        self.half_rows = [
            sum(b.stop - b.start for b in self.blocks if b.number % self.halves == half) for half in range(self.halves)
        ]
        self.features = [FeatureCounts(f.num_rows, self.halves, sample is None) for f in data.schema.features]
        self.tables = [feature.table or feature.name for feature in data.schema.features]

    def count(self, progress: Progress) -> None:
        """The first pass."""
        every = max(1, min(len(self.blocks) // self.windows, self.rows_read // MEASURED_ROWS))
        for place, block in enumerate(self.blocks):
            for counts, (ids, _) in zip(self.features, self._lookups(block), strict=True):
                self._check(counts, ids, block)
                counts.add(ids, block.number % self.halves, measure=place % every == every // 2)
            if place + 1 == len(self.blocks) or self.blocks[place + 1].window != block.window:
                for counts in self.features:
                    counts.end_window()
            progress("count", place + 1, len(self.blocks))
        for feature, counted in zip(self.data.schema.features, self.features, strict=True):
            if not counted.lookups:
                cure = "read a larger sample, or " if self.sample is not None else ""
                raise DataError(
                    f"feature '{feature.name}' of {self.data.folder} has no lookups in the {self.rows_read:,} rows "
                    f"read of split '{self.data.split}', so it has no popularity: {cure}leave it out of the data set"
                )

    def _check(self, feature: FeatureCounts, ids: Array, block: RowBlock) -> None:
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(feature.window)):
            name = self.data.schema.features[self.features.index(feature)].name
            wrong = ids[(ids < 0) | (ids >= len(feature.window))][0]
            raise IdError(
                f"feature '{name}' of {self.data.folder} has id {wrong} but its table has {len(feature.window):,} rows "
                f"(rows {block.start:,} to {block.stop:,} of split '{self.data.split}'): prepare it again"
            )

    def hot(self, progress: Progress) -> tuple[HotCurve, dict[str, Array]]:
        """The second pass; also the counts of every row, by table."""
        halves = [self._table_counts(half) for half in range(self.halves)]
        total = halves[0] if self.halves == 1 else {name: halves[0][name] + halves[1][name] for name in halves[0]}
        thresholds = threshold_grid(min(self.half_rows))
        # Inputs of a half are judged by the counts of the other; without a sample there is one, which judges itself.
        levels = [
            {name: levels_of(counts, cuts_of(thresholds, rows)) for name, counts in half.items()}
            for half, rows in zip(halves, self.half_rows, strict=True)
        ]
        inputs = HotInputs(len(thresholds))
        for place, block in enumerate(self.blocks):
            judge = levels[-1 - block.number % self.halves]
            lookups = (
                (judge[table][ids], offsets)
                for table, (ids, offsets) in zip(self.tables, self._lookups(block), strict=True)
            )
            inputs.add(coldest_level(block.stop - block.start, lookups, len(thresholds)))
            progress("hot inputs", place + 1, len(self.blocks))
        cuts = cuts_of(thresholds, self.rows_read)
        rows = {name: tuple(rows_at(levels_of(counts, cuts), len(cuts)).tolist()) for name, counts in total.items()}
        share = inputs.shares.share()
        low, high = (share, share) if self.sample is None else inputs.shares.interval(self.rows_read / len(self.data))
        hot = HotCurve(
            threshold=tuple(float(f"{value:.6g}") for value in thresholds),
            rows=rows,
            inputs=rounded(share),
            low=rounded(low),
            high=rounded(high),
        )
        return hot, total

    def feature_profiles(self, ordered: bool) -> tuple[FeatureProfile, ...]:
        made = []
        for feature, table, counted in zip(self.data.schema.features, self.tables, self.features, strict=True):
            total = counted.counts.sum(axis=0)
            curve, distinct, singletons, lru = counted.profile(total, self.rows_read / len(self.data))
            moved: Drift | None = None
            if ordered:
                moved = counted.drift.finish(np.sort(total)[::-1], counted.lookups, self.windows)
            made.append(
                FeatureProfile(
                    name=feature.name, kind=feature.kind, table=table, num_rows=feature.num_rows,
                    lookups=counted.lookups, distinct=distinct, singletons=singletons, coverage=curve, lru=lru,
                    drift=moved,
                )
            )  # fmt: skip
        return tuple(made)

    def _table_counts(self, half: int) -> dict[str, Array]:
        """Lookups by row and table; features that share a table are pooled."""
        tables: dict[str, Array] = {}
        for table, counted in zip(self.tables, self.features, strict=True):
            tables[table] = tables[table] + counted.counts[half] if table in tables else counted.counts[half]
        return tables

    def _lookups(self, block: RowBlock) -> Iterator[tuple[Array, Array | None]]:
        """Ids of every feature in schema order, with the offsets of bags; views of the file where they can be."""
        return lookups_of(self.data.columns(block.start, block.stop), [f.one_hot for f in self.data.schema.features])


def lookups_of(columns: Columns, one_hot: Sequence[bool]) -> Iterator[tuple[Array, Array | None]]:
    """Ids of every feature in order, and offsets where it is a bag."""
    singles = iter(np.ascontiguousarray(columns.ids.T))
    bags = iter(columns.bags)
    for single in one_hot:
        if single:
            yield next(singles), None
        else:
            bag = next(bags)
            yield bag.flat, bag.offsets


def profile_prepared(
    data: DataSet, sample: float | None, windows: int, seed: int, ordered: bool, progress: Progress
) -> tuple[Profile, dict[str, Array]]:
    """The profile of one split of a prepared data set, and the lookups of every row, by table.

    Of a sample these are the expected lookups in the whole split, falling with the id as popularity order does.
    """
    counting = PreparedCount(data, sample, windows, seed)
    counting.count(progress)
    hot, counts = counting.hot(progress)
    drawn = None
    if sample is not None:
        scale = len(data) / counting.rows_read
        counts = {name: (falling_estimate(rows) * scale).astype(np.float32) for name, rows in counts.items()}
        drawn = Sample(share=sample, seed=seed, blocks=len(counting.blocks), confidence=CONFIDENCE)
    profile = Profile(
        source=Source(
            kind="prepared",
            name=data.folder.name,
            fingerprint=data.fingerprint,
            split=data.split,
            rows=len(data),
        ),
        method="exact",
        rows_read=counting.rows_read,
        sample=drawn,
        order="time" if ordered else "none",
        windows=counting.windows,
        features=counting.feature_profiles(ordered),
        hot=hot,
    )
    return profile, counts
