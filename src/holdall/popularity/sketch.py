"""Counters of the ids of a stream in bounded memory: frequent ids one by one, the others by a sample of ids.

Both work on 64-bit hashes of values, a block of the stream at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

COUNTER, COUNT, MISSED, LAST, BEFORE = range(5)


class HeavyHitters:
    """The frequent ids of a stream: space-saving in its mergeable form, with exact counts since an id was admitted.

    K counters (Misra and Gries, 1982; Agarwal et al., "Mergeable summaries", 2012). Ids of a block are added to the
    table; when it has more than K, the (K + 1)-th largest counter d is taken off all counters, those that reach 0
    leave, and d is added to `error`. Each such step takes d from K + 1 counters at least, hence, after N lookups,

        error <= N / (K + 1), and an id that is not in the table was looked up `error` times at most.

    For an id in the table `count` is how often it was looked up since it was admitted, and `missed` the error at that
    time, so that count <= true count <= count + missed: certain, for every order of the stream. Ids that are popular
    from the start have missed = 0 and are exact. A count-min sketch of the same bytes has a larger error, and holds
    only with a probability. Memory: 48 bytes a counter, for at most 2 K of them while a block is merged.
    """

    def __init__(self, capacity: int):
        assert capacity >= 1
        self.capacity = capacity
        self.error = 0
        self.lookups = 0
        self._hashes = np.zeros(0, dtype=np.uint64)
        self._columns = np.zeros((5, 0), dtype=np.int64)
        self._pending: list[tuple[Array, Array, Array]] = []
        self._num_pending = 0

    def add(self, hashes: Array, counts: Array, last: Array) -> tuple[Array, Array]:
        """A block of the stream: distinct hashes, ascending, their counts, and the place of each one's last lookup.

        Returns which of them were in the table before, and the place of their last lookup before this block.
        """
        self.lookups += int(counts.sum())
        where, found = _find(self._hashes, hashes)
        known = where[found]
        before = np.full(len(hashes), -1, dtype=np.int64)
        before[found] = self._columns[LAST, known]
        self._columns[COUNTER, known] += counts[found]
        self._columns[COUNT, known] += counts[found]
        self._columns[LAST, known] = last[found]
        if not found.all():
            self._pending.append((hashes[~found], counts[~found], last[~found]))
            self._num_pending += int((~found).sum())
            if self._num_pending >= max(self.capacity // 2, 1024):
                self._settle()
        return found, before

    def count_of(self, hashes: Array) -> Array:
        """Lower bounds of the counts of any hashes: 0 for those not in the table."""
        self._settle()
        where, found = _find(self._hashes, hashes)
        counts = np.zeros(len(hashes), dtype=np.int64)
        counts[found] = self._columns[COUNT, where[found]]
        return counts

    def top(self) -> tuple[Array, Array, Array]:
        """Hashes, counts and what each may have missed, most frequent first."""
        self._settle()
        order = np.lexsort((self._hashes, -self._columns[COUNT]))
        return self._hashes[order], self._columns[COUNT, order], self._columns[MISSED, order]

    def since_window(self) -> tuple[Array, Array]:
        """Hashes, ascending, and how often each was counted since this was last called."""
        self._settle()
        counts = self._columns[COUNT] - self._columns[BEFORE]
        self._columns[BEFORE] = self._columns[COUNT]
        return self._hashes, counts

    def _settle(self) -> None:
        """Merge the pending ids into the table, and reduce it to its capacity."""
        if not self._pending:
            return
        hashes = np.concatenate([part[0] for part in self._pending])
        counts = np.concatenate([part[1] for part in self._pending])
        last = np.concatenate([part[2] for part in self._pending])
        self._pending, self._num_pending = [], 0
        new, inverse = np.unique(hashes, return_inverse=True)
        columns = np.zeros((5, len(new)), dtype=np.int64)
        np.add.at(columns[COUNT], inverse, counts)
        columns[COUNTER] = columns[COUNT]
        columns[MISSED] = self.error
        np.maximum.at(columns[LAST], inverse, last)
        merged = np.concatenate([self._hashes, new])
        order = np.argsort(merged)
        self._hashes, self._columns = merged[order], np.concatenate([self._columns, columns], axis=1)[:, order]
        if len(self._hashes) > self.capacity:
            place = len(self._hashes) - self.capacity - 1
            least = int(np.partition(self._columns[COUNTER], place)[place])
            self.error += least
            self._columns[COUNTER] -= least
            kept = self._columns[COUNTER] > 0
            self._hashes, self._columns = self._hashes[kept], self._columns[:, kept]


class DistinctSample:
    """The ids with the smallest hashes, at most `capacity` of them, with their exact counts: a fair sample of ids.

    An id that is in the sample at the end had a hash below the limit all along, so nothing of it was missed. The share
    of ids sampled is `rate`, and 1 / rate is how many each stands for; the standard error of a number of distinct ids
    is 1 / sqrt(capacity) of it (Bar-Yossef et al., 2002). It is also how SHARDS samples a stream for caches.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.rate = 1.0
        self.hashes = np.zeros(0, dtype=np.uint64)
        self.counts = np.zeros(0, dtype=np.int64)
        self._last = np.zeros(0, dtype=np.int64)
        self._limit = np.uint64(2**64 - 1)

    def add(self, hashes: Array, counts: Array, last: Array) -> tuple[Array, Array]:
        """A block, as for `HeavyHitters`: which of its hashes are sampled, and where they were last, -1 if nowhere."""
        sampled = hashes <= self._limit
        before = np.full(len(hashes), -1, dtype=np.int64)
        hashes, counts, last = hashes[sampled], counts[sampled], last[sampled]
        where, found = _find(self.hashes, hashes)
        mine = np.full(len(hashes), -1, dtype=np.int64)
        mine[found] = self._last[where[found]]
        before[sampled] = mine
        self.counts[where[found]] += counts[found]
        self._last[where[found]] = last[found]
        if not found.all():
            merged = np.concatenate([self.hashes, hashes[~found]])
            order = np.argsort(merged)
            self.hashes = merged[order]
            self.counts = np.concatenate([self.counts, counts[~found]])[order]
            self._last = np.concatenate([self._last, last[~found]])[order]
            if len(merged) > self.capacity:
                first_out = self.hashes[self.capacity]
                self._limit, self.rate = first_out - np.uint64(1), float(first_out) / 2.0**64
                keep = slice(0, self.capacity)
                self.hashes, self.counts, self._last = self.hashes[keep], self.counts[keep], self._last[keep]
        return sampled, before

    @property
    def distinct(self) -> float:
        """Estimate of the number of different ids; exact while all fit."""
        return len(self.hashes) / self.rate


def _find(table: Array, hashes: Array) -> tuple[Array, Array]:
    """Places of `hashes` in an ascending table, and which of them are there."""
    where = np.searchsorted(table, hashes)
    found = where < len(table)
    found[found] = table[where[found]] == hashes[found]
    return where, found
