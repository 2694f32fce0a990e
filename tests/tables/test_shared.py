"""Shared tables: ranges of the popularity order with one row each, and fits by weighted means."""

from __future__ import annotations

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.tables import Shared
from holdall.tables.shared import SharedTable


@pytest.mark.parametrize(("rows", "num_rows"), [(1, 5), (3, 7), (4, 8), (9, 5)])
def test_neighbours_share_a_row(rows: int, num_rows: int) -> None:
    table = Shared(rows).build(num_rows, 3)
    assert isinstance(table, SharedTable)
    kept = min(rows, num_rows)
    expected = [i * kept // num_rows for i in range(num_rows)]
    assert expected[0] == 0
    assert expected[-1] == kept - 1
    assert torch.equal(table.materialize(), table.stored[expected])
    assert table.num_bytes() == 4 * 3 * kept


@pytest.mark.parametrize("num_rows", [2**31 + 5, 10**10])
def test_ids_of_huge_tables(num_rows: int) -> None:
    table = Shared(1000).build(num_rows, 2)
    ids = [0, num_rows // 1000, 2**31 + 1, num_rows - 1]
    assert torch.equal(table.rows(torch.tensor(ids)), table.stored[[i * 1000 // num_rows for i in ids]])


def test_a_fit_takes_means() -> None:
    weight = torch.tensor([[0.0], [4.0], [10.0], [20.0]])
    assert Shared(2).fit(weight).materialize().flatten().tolist() == [2, 2, 15, 15]
    counted = Shared(2).fit(weight, counts=torch.tensor([3, 1, 0, 0]))
    assert counted.materialize().flatten().tolist() == [1, 1, 15, 15]  # rows that nobody looks up count alike
    assert counted.fit_error == pytest.approx(((1 + 9 + 25 + 25) / (16 + 100 + 400)) ** 0.5)


def test_bad_settings_counts_and_rows() -> None:
    for rows in (0, 1.5, True):
        with pytest.raises(ConfigError, match="rows must be at least 1"):
            Shared(rows)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="counts must be 3 numbers"):
        Shared().fit(torch.zeros(3, 2), counts=torch.ones(2))
    weight = torch.zeros(5, 2)
    weight[3, 1] = torch.nan
    with pytest.raises(ConfigError, match="row 3 of the weight to fit has a NaN"):
        Shared().fit(weight)


def test_for_bytes_uses_the_budget() -> None:
    assert Shared.for_bytes(1000, 16, 200) == Shared(3)
    assert Shared.for_bytes(2, 16, 10_000) == Shared(2)
    with pytest.raises(ConfigError, match="at least 64 bytes"):
        Shared.for_bytes(1000, 16, 63)
