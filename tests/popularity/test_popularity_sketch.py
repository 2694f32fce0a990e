"""Bounded-memory counting: the bounds hold for every stream, and the sample of ids is fair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.data.columns import Ragged
from holdall.data.splits import hash_numbers
from holdall.popularity.sketch import DistinctSample, HeavyHitters
from holdall.popularity.stream_counts import FeatureStream, RowReservoir
from tests.popularity.planted_sets import zipf


def feed(table: HeavyHitters | DistinctSample, stream: np.ndarray, block: int) -> None:
    for start in range(0, len(stream), block):
        hashes, counts = np.unique(stream[start : start + block], return_counts=True)
        table.add(hashes, counts, np.zeros(len(hashes), dtype=np.int64))


def check_bounds(table: HeavyHitters, stream: np.ndarray) -> None:
    hashes, counts, missed = table.top()
    true = dict(zip(*(part.tolist() for part in np.unique(stream, return_counts=True)), strict=True))
    assert len(hashes) <= table.capacity
    assert table.lookups == len(stream)
    assert table.error <= len(stream) / (table.capacity + 1)
    for row, count, slack in zip(hashes.tolist(), counts.tolist(), missed.tolist(), strict=True):
        assert count <= true[row] <= count + slack
        assert slack <= table.error
    tracked = set(hashes.tolist())
    assert all(count <= table.error for row, count in true.items() if row not in tracked)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    ids=st.lists(st.integers(0, 60), min_size=1, max_size=400),
    capacity=st.integers(1, 40),
    block=st.integers(1, 90),
    order=st.sampled_from(["as drawn", "sorted", "reversed"]),
)
def test_bounds_hold_for_every_stream(ids: list[int], capacity: int, block: int, order: str) -> None:
    stream = np.array(ids if order == "as drawn" else sorted(ids, reverse=order == "reversed"), dtype=np.uint64)
    table = HeavyHitters(capacity)
    for start in range(0, len(stream), block):
        feed(table, stream[start : start + block], block)
        table.top()  # settles what is pending, so that many small merges happen
    check_bounds(table, stream)


@pytest.mark.parametrize("capacity", [50, 500, 5000])
def test_bounds_on_a_long_tail(capacity: int) -> None:
    stream = hash_numbers(zipf(np.random.default_rng(0), 50_000, 100_000), 0)
    table = HeavyHitters(capacity)
    feed(table, stream, 2000)
    check_bounds(table, stream)
    values, true = np.unique(stream, return_counts=True)
    top = values[np.argsort(-true)[:10]]
    np.testing.assert_array_equal(table.count_of(top), np.sort(true)[::-1][:10])  # popular from the start: exact
    assert table.count_of(np.array([12345], dtype=np.uint64)).tolist() == [0]


def test_ids_that_fit_are_exact() -> None:
    stream = hash_numbers(zipf(np.random.default_rng(0), 300, 5000), 0)
    table = HeavyHitters(300)
    feed(table, stream, 700)
    assert table.error == 0
    np.testing.assert_array_equal(table.top()[1], np.sort(np.unique(stream, return_counts=True)[1])[::-1])


def test_windows_count_what_came_since() -> None:
    table = HeavyHitters(8)
    feed(table, np.array([1, 1, 2], dtype=np.uint64), 3)
    assert [part.tolist() for part in table.since_window()] == [[1, 2], [2, 1]]
    feed(table, np.array([2, 2, 3], dtype=np.uint64), 3)
    assert [part.tolist() for part in table.since_window()] == [[1, 2, 3], [0, 2, 1]]


def test_distinct_ids_are_estimated_without_bias() -> None:
    """4,096 of 40,000 ids: the standard error is 1.6%, that of the mean of 20 runs 0.35%."""
    rng = np.random.default_rng(0)
    ids = zipf(rng, 40_000, 100_000)
    values, true = np.unique(ids, return_counts=True)
    found, once = [], []
    for seed in range(20):
        sample = DistinctSample(4096)
        feed(sample, hash_numbers(ids, seed), 10_000)
        assert len(sample.hashes) == 4096
        known = dict(zip(hash_numbers(values, seed).tolist(), true.tolist(), strict=True))
        assert all(known[h] == c for h, c in zip(sample.hashes.tolist(), sample.counts.tolist(), strict=True))
        found.append(sample.distinct / len(values))
        once.append((sample.counts == 1).sum() / sample.rate / (true == 1).sum())
    assert np.mean(found) == pytest.approx(1.0, abs=0.012)
    assert max(np.abs(np.array(found) - 1)) < 0.06
    assert np.mean(once) == pytest.approx(1.0, abs=0.02)


def test_the_whole_curve_from_bounded_memory() -> None:
    """500 counters for 20,000 ids: the curve is within its certain bounds, and near the truth where they are wide."""
    ids = zipf(np.random.default_rng(2), 20_000, 200_000, power=1.1)
    stream = FeatureStream(500, follow=True)
    for start in range(0, len(ids), 4000):
        stream.add(hash_numbers(ids[start : start + 4000], 0))
    counts, weights = stream.ids()
    curve = stream.coverage(counts, weights)
    true = np.cumsum(np.sort(np.bincount(ids))[::-1]) / len(ids)
    for k, share, low, high in zip(curve.k, curve.share, curve.low, curve.high, strict=True):
        exact = true[min(k, len(true)) - 1]
        assert low - 1e-6 <= exact <= high + 1e-6
        assert low <= share <= high
        assert share == pytest.approx(exact, abs=0.03)
    assert curve.share[9] == pytest.approx(true[9], abs=1e-3)
    assert weights.sum() == pytest.approx(len(np.unique(ids)), rel=0.15)


def test_the_reservoir_is_a_fair_sample_of_rows() -> None:
    kept = np.zeros(1000)
    for seed in range(200):
        reservoir = RowReservoir(1, 50, seed)
        for start in range(0, 1000, 90):
            rows = np.arange(start, min(start + 90, 1000))
            one_each = np.arange(len(rows) + 1)
            reservoir.add([Ragged(rows.astype(np.uint64), one_each)], rows)
        reservoir.shrink()
        assert len(reservoir) == 50
        np.testing.assert_array_equal(reservoir.features[0].flat, reservoir.groups)
        kept[reservoir.groups] += 1
    halves = kept.reshape(10, 100).sum(axis=1)  # each expects 1,000, with a spread of about 31
    assert np.abs(halves - 1000).max() < 130
