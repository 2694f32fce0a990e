"""The miss ratio of an LRU cache from reuse times, against the cache itself."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

import holdall
from holdall.popularity.reuse import ReuseTracker
from tests.popularity.planted_sets import in_popularity_order, write_set, zipf


def lru_misses(stream: np.ndarray, size: int) -> float:
    """Share of the lookups that miss in a cache of `size` rows."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for row in stream.tolist():
        if row in cache:
            cache.move_to_end(row)
            continue
        misses += 1
        cache[row] = None
        if len(cache) > size:
            cache.popitem(last=False)
    return misses / len(stream)


def streams() -> dict[str, np.ndarray]:
    """Streams of 40,000 lookups: independent, moving, looping, and in bursts."""
    rng = np.random.default_rng(0)
    size = 40_000
    moving = zipf(rng, 2000, size) + np.arange(size) // 20  # the hot set moves on by 2,000 ids over the log
    bursts = np.repeat(zipf(rng, 5000, size // 4), 4)
    return {
        "independent": zipf(rng, 5000, size),
        "moving": moving,
        "uniform": rng.integers(0, 3000, size),
        "bursts": bursts,
        "all different": np.arange(size),
        "one row": np.zeros(size, dtype=np.int64),
    }


@pytest.mark.parametrize("name", streams())
def test_against_the_cache_itself(name: str) -> None:
    stream = streams()[name]
    stream = in_popularity_order(stream, int(stream.max()) + 1)
    tracker = ReuseTracker(int(stream.max()) + 1)
    for start in range(0, len(stream), 5000):
        tracker.add(stream[start : start + 5000], measure=True)
    sizes = np.array([1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 50_000])
    found = tracker.times.miss_ratio(len(stream), len(np.unique(stream)), sizes)
    wanted = [lru_misses(stream, size) for size in sizes.tolist()]
    np.testing.assert_allclose(found, wanted, atol=0.02)
    assert np.all(np.diff(found) <= 1e-9)


def test_few_slots_stand_for_many_rows() -> None:
    """Every n-th row of the tail followed, and half of the blocks measured: still the curve of the cache."""
    rng = np.random.default_rng(3)
    stream = in_popularity_order(zipf(rng, 30_000, 200_000), 30_000)
    tracker = ReuseTracker(30_000, hot_slots=1000)
    for number, start in enumerate(range(0, len(stream), 10_000)):
        tracker.add(stream[start : start + 10_000], measure=number % 2 == 0)
    assert len(tracker._last) <= 2000
    sizes = np.array([10, 100, 1000, 10_000])
    found = tracker.times.miss_ratio(len(stream), len(np.unique(stream)), sizes)
    np.testing.assert_allclose(found, [lru_misses(stream, size) for size in sizes.tolist()], atol=0.02)


def test_in_a_profile(tmp_path: Path) -> None:
    stream = in_popularity_order(zipf(np.random.default_rng(5), 1000, 30_000), 1000)
    profile = holdall.profile(write_set(tmp_path / "data", stream[:, None], [1001]))
    for size in (1, 10, 128, 812):
        assert profile.miss_ratio("c0", size) == pytest.approx(lru_misses(stream, size), abs=0.02)
        assert profile.miss_ratio("c0", size) >= profile.miss_ratio("c0", size, policy="static") - 0.02
    assert profile.miss_ratio("c0", 0) == 1.0
