"""Groups of rows with equal counts: the same sums as over single rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import DataError
from holdall.planning.lookup_counts import LookupCounts, table_lookups
from tests.planning.made_up_hardware import schema_of, zipf_counts

COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=40).map(lambda counts: sorted(counts, reverse=True))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(COUNTS, st.integers(1, 50), st.data())
def test_sums_over_groups_are_sums_over_rows(counts: list[int], batch: int, data: st.DataObject) -> None:
    known = LookupCounts.from_counts(np.array(counts), num_samples=100)
    start = data.draw(st.integers(0, len(counts)))
    total = sum(counts)
    touched = [1 - (1 - count / total) ** (batch * total / 100) if total else 0.0 for count in counts]
    assert known.num_rows == len(counts)
    assert known.distinct(batch, start) == pytest.approx(sum(touched[start:]))
    assert known.variance(batch, start) == pytest.approx(sum(t * (1 - t) for t in touched[start:]))
    if total:
        assert known.share(start) == pytest.approx(sum(counts[:start]) / total)
    if start < len(counts):
        assert known.touched(batch, start) == pytest.approx(touched[start])


def test_distinct_rows_of_a_batch_as_drawn() -> None:
    counts = zipf_counts(500, 20_000)
    known = LookupCounts.from_counts(counts, 20_000)
    generator = np.random.default_rng(0)
    draws = [len(np.unique(generator.choice(500, 64, p=counts / counts.sum()))) for _ in range(2000)]
    assert known.distinct(64) == pytest.approx(np.mean(draws), rel=0.01)
    assert np.var(draws) <= known.variance(64)


def test_blocks_of_rows() -> None:
    flat = LookupCounts(np.array([1.0]), np.array([1000]), num_samples=1000)
    expected = 100 * (1 - (1 - 0.01) ** 50)
    assert flat.distinct_blocks(50, 10) == pytest.approx(expected)
    assert flat.distinct_blocks(50, 1) == pytest.approx(flat.distinct(50))


def test_a_tail_in_another_order() -> None:
    """As `holdall order` leaves it: sums are those of the ids in their order."""
    counts = np.array([50, 20, 3, 1, 9, 2, 8])
    known = LookupCounts.from_counts(counts, 93)
    assert known.total == 93
    assert known.num_rows == 7
    assert known.share(1) == pytest.approx(50 / 93)
    assert known.share(5) == pytest.approx(83 / 93)


def test_a_long_tail_in_another_order() -> None:
    generator = np.random.default_rng(0)
    counts = np.concatenate([[500, 400], generator.integers(0, 9, 10_000)])
    known = LookupCounts.from_counts(counts, 1000)
    assert known.total == counts.sum()
    assert known.share(6000) == pytest.approx(counts[:6000].sum() / counts.sum(), rel=0.01)


def test_counts_that_are_not_those_of_the_data_set() -> None:
    schema = schema_of({"a": 5})
    with pytest.raises(DataError, match="no counts for table 'a'"):
        table_lookups(schema, {}, 10)
    with pytest.raises(DataError, match="counts for 4 rows of table 'a', which has 5"):
        table_lookups(schema, {"a": np.ones(4)}, 10)
