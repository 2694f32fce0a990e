"""Co-occurrence graph of the ids in the tail of a table, counted in bounded memory.

Two lookups are together when they are in one bag or sequence, or, for features of one id per sample, when their samples
are less than a window apart in the file: such samples are often in one batch. Each lookup is paired with at most
`partners` later ones, so the work is linear in the lookups. At most `max_edges` edges are counted, so the memory is
bounded: when there are more, the least popular ids are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import ConfigError, DataError
from holdall.data.columns import Columns
from holdall.data.dataset import DataSet
from holdall.data.schema import Feature, Schema

Array = npt.NDArray[Any]

BLOCK_ROWS = 1 << 15  # samples read at a time: the lookups and draws of one feature are 4 MB
MOST_IDS = 3_037_000_499  # whose square still fits 63 bits


@dataclass(frozen=True)
class Edges:
    """E pairs of ids that occur together, each once, with `left` < `right`."""

    left: Array
    """[E] ids."""
    right: Array
    """[E] ids."""
    weight: Array
    """[E] how often the pair was seen; exact."""
    num_pairs: int = 0
    """Pairs that were seen in all."""
    stop: int = MOST_IDS
    """All pairs of ids below this are here; the ids from it on were left out to stay within memory."""

    def __len__(self) -> int:
        return len(self.left)


class EdgeCounter:
    """Counter of pairs of ids in popularity order, with at most `max_edges` counters.

    When there are more, the least popular ids are left out, as many as it takes. An id that was left out stays out, so
    the edges at the end are all those among the ids below `stop`, and their weights are exact. (Dropping the edges seen
    least, as Misra and Gries do, keeps those of the last pairs in place of those of the communities.) Pairs wait in a
    buffer of `max_edges` until they are counted. Memory: at most `BYTES_PER_EDGE * max_edges`, sorting included.
    """

    BYTES_PER_EDGE = 112

    def __init__(self, num_ids: int, max_edges: int):
        assert max_edges > 0
        if num_ids > MOST_IDS:
            raise ConfigError(f"a table of {num_ids:,} rows is too large to be ordered: {MOST_IDS:,} are the most")
        self.num_ids = num_ids
        self.max_edges = max_edges
        self.num_pairs = 0
        self.stop = num_ids
        self._keys = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros(0, dtype=np.int64)
        self._waiting = np.empty(max_edges, dtype=np.int64)
        self._num_waiting = 0

    def add(self, first: Array, second: Array) -> None:
        """Count the pairs (first[i], second[i]), in either direction; an id paired with itself does not count."""
        differ = first != second
        self.num_pairs += int(np.count_nonzero(differ))
        left, right = np.minimum(first, second).astype(np.int64), np.maximum(first, second)
        wanted = differ & (right < self.stop)
        keys = left[wanted] * self.num_ids + right[wanted]
        while len(keys):
            free = self.max_edges - self._num_waiting
            part, keys = keys[:free], keys[free:]
            self._waiting[self._num_waiting : self._num_waiting + len(part)] = part
            self._num_waiting += len(part)
            if self._num_waiting == self.max_edges:
                self._count()

    def edges(self) -> Edges:
        """Edges counted so far; frees the counter."""
        self._count()
        del self._waiting
        left, right = np.divmod(self._keys, self.num_ids)
        edges = Edges(left, right, self._counts, self.num_pairs, self.stop)
        del self._keys, self._counts
        return edges

    def _count(self) -> None:
        """Put the waiting pairs into the counters."""
        keys = self._waiting[: self._num_waiting]
        keys = keys[keys % self.num_ids < self.stop]  # it may have been lowered since they were added
        keys.sort()
        self._num_waiting = 0
        keys, counts = _sum_equal(keys, None)
        keys = np.concatenate([self._keys, keys])
        counts = np.concatenate([self._counts, counts])
        del self._keys, self._counts
        order = np.argsort(keys, kind="stable")  # of two sorted runs: merges them
        keys, counts = keys[order], counts[order]
        del order
        self._keys, self._counts = _sum_equal(keys, counts)
        del keys, counts
        if len(self._keys) > self.max_edges:
            right = self._keys % self.num_ids
            self.stop = int(np.partition(right, self.max_edges)[self.max_edges])
            kept = right < self.stop
            self._keys, self._counts = self._keys[kept], self._counts[kept]


def _sum_equal(keys: Array, counts: Array | None) -> tuple[Array, Array]:
    """Sorted keys without repeats, and the sum of their counts (of ones when None)."""
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    if counts is None:
        return keys[starts], np.diff(np.append(starts, len(keys)))
    return keys[starts], np.add.reduceat(counts, starts) if len(starts) else counts[:0]


def count_pairs(
    data: DataSet, table: str, first: int, *, window: int, partners: int, max_edges: int, seed: int
) -> Edges:
    """The edges among the ids of `table` from `first` on, over all features that look it up, in one pass over `data`.

    The unseen row is left out: it stands for many values, which have nothing in common.
    """
    features = features_of(data.schema, table)
    counter = EdgeCounter(features[0].num_rows, max_edges)
    rng = np.random.default_rng(seed)
    for feature in features:
        for ids, last in tail_lookups(data, feature, first, window):
            for j, partner in draw_partners(last, partners, rng):
                counter.add(ids[j], ids[partner])
    return counter.edges()


def features_of(schema: Schema, table: str) -> list[Feature]:
    """Features that look up a table."""
    return [feature for feature in schema.features if (feature.table or feature.name) == table]


def tail_lookups(data: DataSet, feature: Feature, first: int, window: int) -> Iterator[tuple[Array, Array]]:
    """Lookups [L] of ids from `first` on, in file order, and for each the end of those that it is together with [L].

    Lookup j is together with j + 1, ..., last[j] - 1, and with none when last[j] <= j + 1. Where a window reaches over
    the end of a block, its lookups come again with the next one; then `last` is 0 for pairs that were given before.
    """
    place = [f.name for f in data.schema.features if f.one_hot == feature.one_hot].index(feature.name)
    window = min(window, len(data))  # so that rows + window fits 64 bits
    carried_ids, carried_rows = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for start in range(0, len(data), BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, len(data))
        columns = data.columns(start, stop)
        ids, rows = lookups(columns, feature, place)
        rows += start
        check_ids(ids, feature, data)
        tail = (ids >= first) & (ids != feature.unseen)
        ids, rows = ids[tail], rows[tail]
        if not feature.one_hot:
            yield ids, np.searchsorted(rows, rows, side="right")
            continue
        ids, rows = np.concatenate([carried_ids, ids]), np.concatenate([carried_rows, rows])
        last = np.searchsorted(rows, rows + window)
        ends_later = rows + window > stop  # its window is not complete: it comes again with the next block
        if stop < len(data):
            last[ends_later] = 0
        yield ids, last
        carried_ids, carried_rows = ids[ends_later], rows[ends_later]


def lookups(columns: Columns, feature: Feature, place: int) -> tuple[Array, Array]:
    """Ids [L] of a feature, and the row of each [L]."""
    if feature.one_hot:
        return columns.ids[:, place].astype(np.int64), np.arange(len(columns))
    bag = columns.bags[place]
    return bag.flat.astype(np.int64), np.repeat(np.arange(len(columns)), bag.lengths)


def check_ids(ids: Array, feature: Feature, data: DataSet) -> None:
    """Refuse ids that the feature's map does not have."""
    wrong = ids[(ids < 0) | (ids >= feature.num_rows)]
    if len(wrong):
        raise DataError(
            f"split '{data.split}' of {data.folder} has id {int(wrong[0])} of feature '{feature.name}', which has "
            f"{feature.num_rows:,} rows: the folder is damaged, prepare it again"
        )


def draw_partners(last: Array, partners: int, rng: np.random.Generator) -> Iterator[tuple[Array, Array]]:
    """Pairs of places (j, j + distance), distance below last[j] - j: all there are, or `partners` drawn for each j.

    Distances are drawn log-uniformly, one from each of `partners` equal parts of the logarithm's range: a session of
    ten samples and one of five hundred are then both seen, whatever the window.
    """
    reach = last - 1 - np.arange(len(last))
    j = np.flatnonzero(reach > 0)
    reach = reach[j]
    few = reach <= partners
    wide = np.log(reach[~few] + 1.0)
    for turn in range(min(partners, int(reach.max(initial=0)))):  # none has more
        distance = np.full(len(j), turn + 1)
        distance[~few] = np.exp(wide * ((turn + rng.random(len(wide))) / partners)).astype(np.int64)
        np.minimum(distance, reach, out=distance, where=~few)  # exp(log(x)) may round up to x
        pairs = distance <= reach
        yield j[pairs], j[pairs] + distance[pairs]


def tables_of(schema: Schema) -> Sequence[str]:
    """Names of the tables of a data set, in the order of the features."""
    return list(dict.fromkeys(feature.table or feature.name for feature in schema.features))
