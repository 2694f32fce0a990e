"""Miss ratio of an LRU cache of k rows, from the times between two lookups of the same row.

Keeping the stack of an LRU cache costs a tree operation a lookup. Reuse times cost one array read: the reuse time of
a lookup is how many lookups of the feature ago its row was looked up before. With r(t) lookups of reuse time t, m
first lookups of a row, at places f (from 1), out of N:

    g(v)  = (#{t > v} + #{f > v}) / (N - v)    chance that a lookup is of a row not among the v before it
    fp(w) = g(0) + ... + g(w - 1)              rows among w lookups in a row: the average footprint
    miss(fp(w)) = (m + #{t > w}) / N           a lookup misses when more than fp(w) rows came since its last

(Hu et al., "Kinetic modeling of data eviction in cache", 2016, and Xiang et al., "HOTL", 2013.) The only step that is
not exact is to take the average footprint of windows of a length for each of them; tests compare the curve with the
cache itself. First lookups count as misses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PER_OCTAVE = 16
_OCTAVES = np.arange(0, 52 * PER_OCTAVE + 1) / PER_OCTAVE
EDGES = np.unique(np.round(2.0**_OCTAVES).astype(np.int64))
"""Upper ends of the bins of a histogram of times: all whole numbers up to 20, then 16 an octave."""

HOT_SLOTS = 1 << 18
"""Rows whose lookups are all followed, the most popular ones; of those behind them every n-th stands for n."""


class ReuseTimes:
    """Histograms of reuse times and of first lookups; a few kilobytes, whatever the stream."""

    def __init__(self) -> None:
        self._again = np.zeros(len(EDGES) + 1)
        self._first = np.zeros(len(EDGES) + 1)

    def add(self, times: Array, weights: float | Array = 1.0) -> None:
        """Lookups that came `times` lookups of the feature after the last one of the same row."""
        self._again += _histogram(times, weights)

    def add_first(self, places: Array, weights: float | Array = 1.0) -> None:
        """First lookups of a row, at these places in the stream, counted from 1."""
        self._first += _histogram(places, weights)

    def miss_ratio(self, num_lookups: int, distinct: float, sizes: Array) -> npt.NDArray[np.float64]:
        """Share of the lookups that miss in an LRU cache of each of `sizes` rows, empty at first.

        Weights of what was added need not sum to anything: they are scaled to `num_lookups` and `distinct`.
        """
        again = self._again * ((num_lookups - distinct) / max(self._again.sum(), 1e-9))
        first = self._first * (distinct / max(self._first.sum(), 1e-9))
        lengths = np.concatenate([[0], EDGES])
        use = lengths < num_lookups
        later_again = np.concatenate([[again.sum()], again.sum() - np.cumsum(again[:-1])])[use].clip(min=0.0)
        later_first = np.concatenate([[first.sum()], first.sum() - np.cumsum(first[:-1])])[use].clip(min=0.0)
        lengths = lengths[use]
        growth = np.minimum((later_again + later_first) / (num_lookups - lengths), 1.0)
        steps = np.diff(lengths) * (growth[1:] + growth[:-1]) / 2
        footprint = np.minimum(np.concatenate([[0.0], np.cumsum(steps)]), distinct)
        miss = (distinct + later_again) / num_lookups
        footprint = np.append(footprint, distinct)  # a cache of all rows misses first lookups alone
        miss = np.append(miss, distinct / num_lookups)
        return np.interp(sizes, footprint, np.minimum.accumulate(miss)).clip(0.0, 1.0)


class ReuseTracker:
    """Reuse times of a stream of ids in popularity order. Memory: 8 bytes for each of at most 2 * `hot_slots` rows.

    Every lookup of a followed row updates where it was last seen; times are taken only in the blocks that the caller
    chooses, since finding repetitions inside a block takes a sort.
    """

    def __init__(self, num_rows: int, hot_slots: int = HOT_SLOTS):
        self.times = ReuseTimes()
        self._hot = min(num_rows, hot_slots)
        self._stride = max(1, -(-(num_rows - self._hot) // hot_slots))
        self._last = np.full(self._hot + -(-(num_rows - self._hot) // self._stride), -1, dtype=np.int64)
        self._position = 0

    def add(self, ids: Array, measure: bool) -> None:
        """The next lookups of the feature, in order."""
        places = np.arange(self._position, self._position + len(ids))
        self._position += len(ids)
        slots = ids
        if self._stride > 1:
            tail = ids - self._hot
            followed = (tail < 0) | (tail % self._stride == 0)
            slots, places = ids[followed], places[followed]
            slots = np.where(slots < self._hot, slots, self._hot + (slots - self._hot) // self._stride)
        before = self._last[slots]
        new = np.flatnonzero(before < 0)
        if len(new):
            distinct, at = np.unique(slots[new], return_index=True)
            self.times.add_first(places[new[at]] + 1, self._weights(distinct))
        if measure:
            order = np.argsort(slots, kind="stable")
            same = slots[order][1:] == slots[order][:-1]
            before[order[1:][same]] = places[order[:-1][same]]
            known = before >= 0
            self.times.add((places - before)[known], self._weights(slots[known]))
        self._last[slots] = places  # of a row that occurs several times the last place is kept

    def _weights(self, slots: Array) -> float | Array:
        return 1.0 if self._stride == 1 else np.where(slots < self._hot, 1.0, float(self._stride))


def _histogram(values: Array, weights: float | Array) -> npt.NDArray[np.float64]:
    bins = np.searchsorted(EDGES, values)
    if isinstance(weights, float):
        return np.bincount(bins, minlength=len(EDGES) + 1).astype(np.float64) * weights
    return np.bincount(bins, weights=weights, minlength=len(EDGES) + 1).astype(np.float64)
