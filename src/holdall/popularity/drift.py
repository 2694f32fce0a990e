"""Drift of popularity: the hot set of each window of the log compared with that of the window before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.popularity.curves import log_grid

Array = npt.NDArray[Any]

LARGEST_SET = 1 << 14
HOT_SHARE = 0.9
ENOUGH = 16
"""Lookups of an id in a window below which its rank there is mostly chance."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Drift between windows; one number for every window but the first: window t against window t - 1."""

    k: int
    """Ids in a hot set: those that take 90% of the lookups, or fewer, so that each has 16 in an average window."""
    kept: tuple[float, ...]
    """Share of the ids of window t's hot set that were in window t - 1's."""
    hits: tuple[float, ...]
    """Share of window t's lookups that go to window t - 1's hot set."""
    best: tuple[float, ...]
    """Share of window t's lookups that go to its own hot set."""

    @property
    def lost(self) -> float:
        """Mean share of the hot lookups that the hot set of the window before misses: 0 without drift."""
        pairs = [(hits, best) for hits, best in zip(self.hits, self.best, strict=True) if best > 0]
        return float(np.mean([1 - hits / best for hits, best in pairs])) if pairs else 0.0


class DriftTracker:
    """Tracker of the most frequent ids, window after window; it keeps at most 2^14 ids of each of two windows."""

    def __init__(self) -> None:
        self._grid = log_grid(LARGEST_SET)
        self._before: Array | None = None
        self._pairs: list[tuple[Array, Array, Array]] = []

    def end_window(self, ids: Array, counts: Array, lookups: int, counts_of: Callable[[Array], Array]) -> None:
        """End a window, given its ids and counts, its lookups, and a function for the counts of other ids."""
        top = _top(ids, counts, LARGEST_SET)
        ids, counts = ids[top], counts[top]
        if self._before is not None and lookups:
            hits = np.cumsum(counts_of(self._before)) if len(self._before) else np.zeros(1)
            best = np.cumsum(counts) if len(counts) else np.zeros(1)
            self._pairs.append((self._kept(ids), self._at(hits) / lookups, self._at(best) / lookups))
        self._before = ids

    def _kept(self, ids: Array) -> Array:
        """At every k, the share of the first k of `ids` that are among the first k of the window before."""
        assert self._before is not None
        _, now, then = np.intersect1d(ids, self._before, assume_unique=True, return_indices=True)
        needed = np.sort(np.maximum(now, then)) + 1  # the smallest k at which the id is in both
        common = np.searchsorted(needed, self._grid, side="right")
        return common / np.minimum(self._grid, max(len(ids), 1))

    def _at(self, running: Array) -> Array:
        return running[np.minimum(self._grid, len(running)) - 1]

    def finish(self, counts: Array, lookups: int, windows: int) -> Drift | None:
        """`counts` of the ids over all windows, most frequent first. None when there was one window alone."""
        if not self._pairs:
            return None
        running = np.cumsum(counts[:LARGEST_SET])
        share = int(np.searchsorted(running, HOT_SHARE * lookups)) + 1
        enough = int(np.searchsorted(-counts[:LARGEST_SET], -ENOUGH * windows, side="right"))
        wanted = max(1, min(share, enough, LARGEST_SET))
        place = int(np.searchsorted(self._grid, wanted, side="right")) - 1
        columns = [tuple(round(float(pair[part][place]), 6) for pair in self._pairs) for part in range(3)]
        return Drift(k=int(self._grid[place]), kept=columns[0], hits=columns[1], best=columns[2])


def _top(ids: Array, counts: Array, most: int) -> Array:
    """Positions of the largest counts that are not 0, in falling order; among equals, smaller ids first."""
    positions = np.flatnonzero(counts)
    if len(positions) > most:
        positions = positions[np.argpartition(-counts[positions], most - 1)[:most]]
    return positions[np.lexsort((ids[positions], -counts[positions]))]
