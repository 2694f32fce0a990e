"""`suggest`: tables of any widths and types keep a budget together, or the error has the smallest that works."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import ConfigError
from holdall.tables import METHODS, Dense, Hashed, Method, Robe, TensorTrain
from holdall.tables.budget import divide_budget, suggest
from holdall.tables.table_size import TableSize

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = st.builds(
    TableSize,
    num_rows=st.one_of(st.integers(1, 40), st.integers(1, 3_000_000)),
    dim=st.integers(1, 128),
    dtype=st.sampled_from(DTYPES),
    extra_bytes=st.sampled_from((0, 0, 64)),
)


def bytes_of(sizes: dict[str, TableSize], methods: dict[str, Method]) -> int:
    assert set(methods) == set(sizes)
    return sum(size.bytes_by(methods[name]) for name, size in sizes.items())


def smallest_budget(error: ConfigError) -> int:
    found = re.search(r"can keep is ([0-9]+)B", str(error))
    assert found, str(error)
    return int(found[1])


@given(
    sizes=st.dictionaries(st.sampled_from("abcdefgh"), SIZES, min_size=1),
    share=st.floats(1e-6, 1.0),
    method=st.sampled_from(("auto", *METHODS)),
    min_rows=st.sampled_from((0, 0, 100, 5000)),
)
@settings(deadline=None, max_examples=200)
def test_any_mix_keeps_its_budget_or_names_the_smallest(
    sizes: dict[str, TableSize], share: float, method: str, min_rows: int
) -> None:
    dense = sum(size.dense_bytes for size in sizes.values())
    budget = max(1, int(share * dense))
    try:
        methods = divide_budget(sizes, budget, method, min_rows=min_rows)
    except ConfigError as error:
        smallest = smallest_budget(error)
        assert budget < smallest <= dense
        methods = divide_budget(sizes, f"{smallest}B", method, min_rows=min_rows)
        assert bytes_of(sizes, methods) == smallest
        if smallest > 1:
            with pytest.raises(ConfigError, match=f"can keep is {smallest}B"):
                divide_budget(sizes, smallest - 1, method, min_rows=min_rows)
    else:
        assert bytes_of(sizes, methods) <= budget
    for name, size in sizes.items():
        if size.num_rows < min_rows:
            assert methods[name] == Dense()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_budget_is_used_in_every_type(dtype: torch.dtype) -> None:
    rows, dims = {"users": 100_000, "links": 100_000, "goods": 3_000_000}, {"users": 64, "links": 1, "goods": 16}
    dense = sum(rows[name] * dims[name] for name in rows) * dtype.itemsize
    methods = suggest(rows, dims, 0.05, dtype=dtype)
    taken = sum(methods[name].num_bytes(rows[name], dims[name], dtype) for name in rows)
    assert 0.045 * dense < taken <= 0.05 * dense


def test_twice_the_bytes_a_number_give_the_same_settings_for_twice_the_budget() -> None:
    rows = {"a": 5_000, "b": 70_000}
    for method in ("auto", "tensor_train", "hashed", "frobenius", "robe"):
        assert suggest(rows, 16, 400_000, method) == suggest(rows, 16, 800_000, method, dtype=torch.float64)


def test_linear_tables_beside_wide_ones() -> None:
    """DeepFM and Wide & Deep: every feature has a table of dim 1 beside its wide one."""
    rows = {"wide": 50_000, "wide.small": 10, "linear": 50_000, "linear.small": 10}
    dims = {"wide": 16, "wide.small": 16, "linear": 1, "linear.small": 1}
    for share in (0.2, 0.1, 0.05):
        methods = suggest(rows, dims, share)
        taken = sum(methods[name].num_bytes(rows[name], dims[name]) for name in rows)
        assert taken <= share * 4 * sum(rows[name] * dims[name] for name in rows)
        assert methods["wide.small"] == methods["linear.small"] == Dense()


def test_settings_of_plain_tables_are_those_of_0_1() -> None:
    """Runs of `holdall train --budget` must find the tables of their checkpoints."""
    rows = {"C1": 20, "C2": 5_000, "C3": 250_000}
    assert suggest(rows, 16, 0.1) == {
        "C1": Dense(),
        "C2": Robe(size=50_512, block=4),
        "C3": Robe(size=357_196, block=4),
    }
    assert suggest(rows, 16, 0.001, "tensor_train") == {
        "C1": TensorTrain(rank=1),
        "C2": TensorTrain(rank=2),
        "C3": TensorTrain(rank=4),
    }
    assert suggest(rows, 16, "20KB", "hashed", min_rows=100) == {
        "C1": Dense(),
        "C2": Hashed(buckets=36),
        "C3": Hashed(buckets=256),
    }


def test_the_error_names_the_tables_that_need_the_bytes() -> None:
    rows = {f"t{i}": 10 * 2**i for i in range(6)}
    with pytest.raises(ConfigError) as raised:
        suggest(rows, 4, "100B", "hashed", min_rows=300)
    assert str(raised.value) == (
        "a budget of 100 B is too small for these 6 tables: the smallest that method hashed can keep is 4976B, with "
        "tables of fewer than 300 rows kept dense (t4 2.6 KB (dense), t3 1.3 KB (dense), t2 640 B (dense), "
        "t1 320 B (dense), 2 more 176 B)"
    )


def test_the_error_of_one_table_says_no_more_than_it_must() -> None:
    with pytest.raises(ConfigError) as raised:
        suggest({"users": 5000}, 4, "10B", "hashed", min_rows=300)
    assert str(raised.value) == (
        "a budget of 10 B is too small for this table: the smallest that method hashed can keep is 16B (users 16 B)"
    )


def test_a_table_without_a_dim_or_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="'b' has no dim"):
        suggest({"a": 5, "b": 5}, {"a": 4}, 0.5)
    with pytest.raises(ConfigError, match="'b' has no dtype"):
        suggest({"a": 5, "b": 5}, 4, 0.5, dtype={"a": torch.float16})
