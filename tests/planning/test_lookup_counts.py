"""Groups of rows with equal counts: the same sums as over single rows, and the hot rows that save the most."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import DataError
from holdall.planning.lookup_counts import Lookups, choose_hot, table_lookups
from holdall.popularity.hot_rows import hot_rows
from tests.planning.made_up_hardware import schema_of, zipf_counts

COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=40).map(lambda counts: sorted(counts, reverse=True))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(COUNTS, st.integers(1, 50), st.data())
def test_sums_over_groups_are_sums_over_rows(counts: list[int], batch: int, data: st.DataObject) -> None:
    known = Lookups.from_counts(np.array(counts), num_samples=100)
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
    known = Lookups.from_counts(counts, 20_000)
    generator = np.random.default_rng(0)
    draws = [len(np.unique(generator.choice(500, 64, p=counts / counts.sum()))) for _ in range(2000)]
    assert known.distinct(64) == pytest.approx(np.mean(draws), rel=0.01)
    assert np.var(draws) <= known.variance(64)


def test_blocks_of_rows() -> None:
    flat = Lookups(np.array([1.0]), np.array([1000]), num_samples=1000)
    expected = 100 * (1 - (1 - 0.01) ** 50)
    assert flat.distinct_blocks(50, 10) == pytest.approx(expected)
    assert flat.distinct_blocks(50, 1) == pytest.approx(flat.distinct(50))


def test_a_tail_in_another_order() -> None:
    """As `holdall order` leaves it: sums are those of the ids as they lie, and only a prefix is hot."""
    counts = np.array([50, 20, 3, 1, 9, 2, 8])
    known = Lookups.from_counts(counts, 93)
    assert known.total == 93
    assert known.num_rows == 7
    assert known.share(1) == pytest.approx(50 / 93)
    assert known.share(5) == pytest.approx(83 / 93)
    other = Lookups.from_counts(np.array([40, 4, 2]), 93)
    chosen = choose_hot({"a": known, "b": other}, {"a": 1.0, "b": 1.0}, 8, 5 * 8, 4)
    assert chosen == {"a": 3, "b": 2}  # not the row of 9 lookups behind one of 1


def test_a_long_tail_in_another_order() -> None:
    generator = np.random.default_rng(0)
    counts = np.concatenate([[500, 400], generator.integers(0, 9, 10_000)])
    known = Lookups.from_counts(counts, 1000)
    assert known.total == counts.sum()
    assert known.share(6000) == pytest.approx(counts[:6000].sum() / counts.sum(), rel=0.01)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(COUNTS, min_size=1, max_size=5), st.integers(8, 900))
def test_hot_rows_are_those_most_looked_up(tables: list[list[int]], budget: int) -> None:
    """Where every fetched row costs the same, the choice is that of `hot_rows`, up to rows of equal counts."""
    counts = {f"t{i}": np.array(table) for i, table in enumerate(tables)}
    samples = 1000
    known = {}
    for name, table in counts.items():  # every table is looked up once a sample, as one feature's is
        table[0] += samples - table.sum()
        known[name] = Lookups.from_counts(table, samples)
    chosen = choose_hot(known, dict.fromkeys(known, 1.0), 8, budget, batch_size=32)
    expected = hot_rows(counts, 8, budget)
    assert sum(chosen.values()) == sum(expected.values())
    assert sum(chosen.values()) * 8 <= budget
    assert all(rows <= len(counts[name]) for name, rows in chosen.items())
    on_device = [sum(known[name].distinct(32, 0, rows) for name, rows in hot.items()) for hot in (chosen, expected)]
    assert on_device[0] == pytest.approx(on_device[1])


def test_rows_that_cost_more_come_first() -> None:
    known = {name: Lookups.from_counts(np.array([10, 10, 10]), 30) for name in ("host", "disk")}
    assert choose_hot(known, {"host": 1.0, "disk": 100.0}, 8, 4 * 8, 4) == {"host": 1, "disk": 3}
    assert choose_hot(known, {"host": 1.0, "disk": 0.0}, 8, 4 * 8, 4) == {"host": 3, "disk": 0}


def test_counts_that_are_not_those_of_the_data_set() -> None:
    schema = schema_of({"a": 5})
    with pytest.raises(DataError, match="no counts for table 'a'"):
        table_lookups(schema, {}, 10)
    with pytest.raises(DataError, match="counts for 4 rows of table 'a', which has 5"):
        table_lookups(schema, {"a": np.ones(4)}, 10)
