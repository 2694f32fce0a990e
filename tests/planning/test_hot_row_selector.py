"""Choice of hot rows by the seconds that they save."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.planning.hot_row_selector import choose_hot
from holdall.planning.lookup_counts import LookupCounts
from holdall.popularity.choose_hot_rows import hot_rows

COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=40).map(lambda counts: sorted(counts, reverse=True))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(COUNTS, min_size=1, max_size=5), st.integers(8, 900))
def test_hot_rows_are_those_most_looked_up(tables: list[list[int]], budget: int) -> None:
    """Where every fetched row costs the same, the choice is that of `hot_rows`, up to rows of equal counts."""
    counts = {f"t{i}": np.array(table) for i, table in enumerate(tables)}
    samples = 1000
    known = {}
    for name, table in counts.items():  # every table is looked up once a sample, as one feature's is
        table[0] += samples - table.sum()
        known[name] = LookupCounts.from_counts(table, samples)
    chosen = choose_hot(known, dict.fromkeys(known, 1.0), 8, budget, batch_size=32)
    expected = hot_rows(counts, 8, budget)
    assert sum(chosen.values()) == sum(expected.values())
    assert sum(chosen.values()) * 8 <= budget
    assert all(rows <= len(counts[name]) for name, rows in chosen.items())
    on_device = [sum(known[name].distinct(32, 0, rows) for name, rows in hot.items()) for hot in (chosen, expected)]
    assert on_device[0] == pytest.approx(on_device[1])


def test_rows_that_cost_more_come_first() -> None:
    known = {name: LookupCounts.from_counts(np.array([10, 10, 10]), 30) for name in ("host", "disk")}
    assert choose_hot(known, {"host": 1.0, "disk": 100.0}, 8, 4 * 8, 4) == {"host": 1, "disk": 3}
    assert choose_hot(known, {"host": 1.0, "disk": 0.0}, 8, 4 * 8, 4) == {"host": 3, "disk": 0}


def test_only_a_prefix_is_hot() -> None:
    """In a tail that `holdall order` put into another order too."""
    known = LookupCounts.from_counts(np.array([50, 20, 3, 1, 9, 2, 8]), 93)
    other = LookupCounts.from_counts(np.array([40, 4, 2]), 93)
    chosen = choose_hot({"a": known, "b": other}, {"a": 1.0, "b": 1.0}, 8, 5 * 8, 4)
    assert chosen == {"a": 3, "b": 2}  # not the row of 9 lookups behind one of 1
