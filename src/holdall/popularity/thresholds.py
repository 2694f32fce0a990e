"""Share of hot inputs by threshold: inputs that look up hot rows only, where rows above a threshold are hot.

As in FAE, one threshold is shared by all tables: a row is hot when it is looked up at least `threshold` times an input
(for a feature with one id an input that is its share of the lookups). An input is hot when all its lookups are; one
without lookups is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.popularity.curves import ClusterShares

Array = npt.NDArray[Any]

PER_DECADE = 4
HIGHEST = 0.1


def threshold_grid(num_inputs: int, lowest_count: int = 1) -> npt.NDArray[np.float64]:
    """Falling thresholds, four a decade from 0.1 on, down to rows looked up `lowest_count` times by `num_inputs`."""
    lowest = max(lowest_count, 1) / max(num_inputs, 1)
    decades = max(0.0, np.log10(HIGHEST / lowest))
    steps = HIGHEST * 10.0 ** (-np.arange(int(decades * PER_DECADE) + 1) / PER_DECADE)
    return np.append(steps[steps > lowest * 1.001], lowest)


def cuts_of(thresholds: Array, num_inputs: int) -> npt.NDArray[np.int64]:
    """The lookups out of `num_inputs` inputs from which on a row is hot, at each threshold."""
    return np.maximum(np.ceil(thresholds * num_inputs - 1e-6), 1).astype(np.int64)


def levels_of(counts: Array, cuts: Array) -> npt.NDArray[np.uint8]:
    """Number of the falling cuts at which each row is hot: 0 never, `len(cuts)` at all of them. A byte a row."""
    assert len(cuts) < 256
    return np.searchsorted(cuts[::-1], counts, side="right").astype(np.uint8)


def rows_at(levels: Array, num_cuts: int) -> npt.NDArray[np.int64]:
    """Rows that are hot at each cut."""
    return _hot_at(np.bincount(levels, minlength=num_cuts + 1))


class HotInputs:
    """Counter of inputs by the level of their coldest lookup, block after block."""

    def __init__(self, num_cuts: int):
        self._num_cuts = num_cuts
        self.shares = ClusterShares(num_cuts)

    def add(self, coldest: Array) -> None:
        """A block of inputs: for each, the least level of its lookups."""
        self.shares.add(_hot_at(np.bincount(coldest, minlength=self._num_cuts + 1)), len(coldest))


def coldest_level(num_rows: int, lookups: Iterable[tuple[Array, Array | None]], highest: int) -> npt.NDArray[np.uint8]:
    """[R] least level over all lookups of each row.

    `lookups` holds for each feature the levels of its lookups, and for bags the offsets [R + 1] of each row's.
    """
    coldest = np.full(num_rows, highest, dtype=np.uint8)
    for levels, offsets in lookups:
        if offsets is None:
            np.minimum(coldest, levels, out=coldest)
            continue
        offsets = offsets - offsets[0]
        filled = np.flatnonzero(offsets[1:] > offsets[:-1])
        if len(filled):  # lists without values have no start of their own, so they are left out
            least = np.minimum.reduceat(levels, offsets[filled])
            coldest[filled] = np.minimum(coldest[filled], least)
    return coldest


def hot_bytes(rows: Mapping[str, Array], row_bytes: int) -> npt.NDArray[np.int64]:
    """Bytes of all hot rows at each threshold."""
    return np.sum([np.asarray(table, dtype=np.int64) for table in rows.values()], axis=0) * row_bytes


def _hot_at(histogram: Array) -> npt.NDArray[np.int64]:
    """Number that are hot at each of n falling cuts, from the number of each level: cut j takes level n - j or more."""
    return np.cumsum(histogram[::-1])[:-1]
