"""Hot rows under a byte budget, and the inputs that need no others."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import ConfigError
from holdall.data.dataset import DataSet
from holdall.popularity.choose_hot_rows import count_lookups, hot_inputs, hot_rows, smallest_useful_budget

tables = st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1)


@given(tables, st.integers(8, 90), st.fixed_dictionaries({name: st.sampled_from([2, 4, 8]) for name in "abc"}))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_no_choice_of_prefixes_that_fits_catches_much_more(
    counts: dict[str, list[int]], budget: int, sizes: dict[str, int]
) -> None:
    falling = {name: np.array(sorted(lookups, reverse=True)) for name, lookups in counts.items()}
    chosen = hot_rows(falling, sizes, budget)
    assert sum(rows * sizes[name] for name, rows in chosen.items()) <= budget

    def caught(rows: dict[str, int]) -> int:
        return sum(int(falling[name][: rows[name]].sum()) for name in falling)

    choices = [dict(zip(falling, sizes_of, strict=True)) for sizes_of in product(range(6), repeat=len(falling))]
    best = max(caught(c) for c in choices if sum(c[name] * sizes[name] for name in falling) <= budget)
    # Taking rows by worth is optimal but for the last row that no longer fits, as for any knapsack filled greedily.
    assert caught(chosen) >= best - max(int(lookups.max(initial=0)) for lookups in falling.values())


def test_rows_are_taken_by_their_worth_over_all_tables() -> None:
    counts = {"big": np.array([100, 90, 5, 4]), "small": np.array([95, 6, 1])}
    assert hot_rows(counts, 10, 30) == {"big": 2, "small": 1}
    assert hot_rows(counts, 10, 40) == {"big": 2, "small": 2}
    assert hot_rows(counts, {"big": 40, "small": 10}, 60) == {"big": 1, "small": 2}
    assert hot_rows(counts, 10, 40, at_most={"big": 1}) == {"big": 1, "small": 3}


def test_equal_rows_fill_the_budget() -> None:
    assert hot_rows({"a": np.ones(5), "b": np.ones(5)}, 1, 7) == {"a": 5, "b": 2}


def test_rows_nobody_looked_up_are_not_hot() -> None:
    assert hot_rows({"a": np.array([3, 0, 0]), "b": np.zeros(4)}, 4, 1000) == {"a": 1, "b": 0}


def test_only_a_prefix_can_be_hot() -> None:
    """A row behind a cold one does not make the cold one hot."""
    assert hot_rows({"a": np.array([9, 1, 8]), "b": np.array([5])}, 1, 2) == {"a": 1, "b": 1}


def test_a_budget_below_one_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="64 B of a single row"):
        hot_rows({"a": np.array([9, 1])}, 64, 63)


def by_hand(data: DataSet, rows: dict[str, int]) -> list[bool]:
    batch = data.slice(0, len(data))
    found = [True] * len(data)
    for position, feature in enumerate(data.schema.features):
        values, offsets, _ = batch.ids.bag(position)
        for sample in range(len(data)):
            bag = values[sample : sample + 1] if offsets is None else values[offsets[sample] : offsets[sample + 1]]
            found[sample] &= all(int(value) < rows[feature.table or feature.name] for value in bag)
    return found


def test_inputs_of_one_hot_features(data: Path) -> None:
    split = DataSet(data, "test")
    rows = {feature.name: max(1, feature.num_rows // 3) for feature in split.schema.features}
    found = hot_inputs(split, rows)
    assert found.tolist() == by_hand(split, rows)
    assert 0 < found.mean() < 1


def test_inputs_with_bags(bag_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdall.popularity.choose_hot_rows.BLOCK_ROWS", 7)
    split = DataSet(bag_data, "train")
    rows = {feature.table or feature.name: max(1, feature.num_rows // 2) for feature in split.schema.features}
    found = hot_inputs(split, rows)
    assert found.tolist() == by_hand(split, rows)
    assert 0 < found.mean() < 1


def test_lookups_are_counted_by_table(bag_data: Path) -> None:
    split = DataSet(bag_data, "train")
    counts = count_lookups(split)
    batch = split.slice(0, len(split))
    for position, feature in enumerate(split.schema.features):
        expected = np.bincount(batch.ids.bag(position)[0].numpy(), minlength=feature.num_rows)
        assert (counts[feature.table or feature.name] == expected).all()


def test_the_budget_that_would_do(data: Path) -> None:
    split = DataSet(data, "train")
    counts = count_lookups(split)
    budget = smallest_useful_budget(split, counts, 16, share=0.2)
    assert hot_inputs(split, hot_rows(counts, 16, budget)).mean() >= 0.2
    assert hot_inputs(split, hot_rows(counts, 16, budget // 2)).mean() < 0.2
