"""Host rows in memory and in files: exact and lazy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdall.tables.initial_rows import fill_with_initial_rows, initial_rows
from holdall.tiers.host_rows import DiskRows, HostRows, InitialValues, LazyRows, unreserved

SIZES, SEEDS, STDS = (30, 5, 200), (11, 12, 2**61), (0.5, 0.1, 2.0)


def initial_values() -> InitialValues:
    starts = torch.tensor([0, 30, 35])
    return InitialValues(starts, torch.tensor(SEEDS), torch.tensor(STDS))


def whole(dim: int, dtype: torch.dtype) -> Tensor:
    """All rows of the tables, concatenated, as dense tables have them."""
    tables = []
    for size, seed, std in zip(SIZES, SEEDS, STDS, strict=True):
        table = torch.empty(size, dim, dtype=dtype)
        fill_with_initial_rows(table, seed, torch.tensor(std).item())
        tables.append(table)
    return torch.cat(tables)


def store(kind: str, tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype) -> HostRows:
    return HostRows(torch.zeros(shape, dtype=dtype)) if kind == "memory" else DiskRows(tmp_path, shape, dtype)


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_rows_are_a_dense_table(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    rows = LazyRows(store(kind, tmp_path, (235, 7), dtype), initial_values())
    expected = whole(7, dtype)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        chosen = torch.randperm(235, generator=generator)[:40]
        assert torch.equal(rows.read(chosen), expected[chosen])
        values = torch.randn(40, 7, generator=generator).to(dtype)
        rows.write(chosen, values)
        expected[chosen] = values
    assert torch.equal(rows.read_slice(10, 60), expected[10:60])
    rows.write_slice(20, torch.ones(30, 7, dtype=dtype))
    assert torch.equal(rows.read_slice(0, 235)[20:50], torch.ones(30, 7, dtype=dtype))


def test_reading_stores_nothing(tmp_path: Path) -> None:
    rows = LazyRows(DiskRows(tmp_path, (10_000, 64), torch.float32), InitialValues(*_one_table(64)))
    rows.read(torch.arange(0, 10_000, 10))
    rows.write(torch.tensor([9999]), torch.ones(1, 64))
    assert not rows.tensor[:9999].any()
    assert rows.tensor[9999].any()


def _one_table(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(1, dtype=torch.int64), torch.tensor([seed]), torch.ones(1)


def test_memory_is_allocated_on_first_write() -> None:
    """17 GB of rows, of which one page is written."""
    rows = LazyRows(HostRows(unreserved((1 << 26, 64), torch.float32)), InitialValues(*_one_table(3)))
    last = torch.tensor([(1 << 26) - 1])
    before = rows.read(last)
    rows.write(last, before + 1)
    assert torch.equal(rows.read(last), before + 1)
    assert torch.equal(rows.read(last - 1), initial_rows(last - 1, 64, 3, 1.0))


def test_released_pages_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdall.tiers.mapped_file.RESIDENT_BYTES", 1)
    rows = DiskRows(tmp_path, (5000, 16), torch.float32)
    values = torch.randn(5000, 16)
    for start in range(0, 5000, 500):
        rows.write(torch.arange(start, start + 500), values[start : start + 500])
    assert torch.equal(rows.read(torch.arange(5000)), values)


def test_initial_rows_are_gaussian_and_independent() -> None:
    table = torch.empty(40_000, 13)
    fill_with_initial_rows(table, 5, 0.25)
    scaled = (table / 0.25).double()
    assert abs(scaled.mean()) < 0.01
    assert abs(scaled.std() - 1) < 0.01
    assert abs((scaled**4).mean() - 3) < 0.1  # the kurtosis of a Gaussian
    inside = (scaled.abs() < 1).double().mean()
    assert abs(inside - 0.6827) < 0.005
    correlations = torch.corrcoef(scaled.T) - torch.eye(13)
    assert correlations.abs().max() < 0.03
    neighbours = torch.corrcoef(torch.stack([scaled[:-1].flatten(), scaled[1:].flatten()]))[0, 1]
    assert abs(neighbours) < 0.01


def test_initial_rows_depend_on_seed_and_row_alone() -> None:
    table = torch.empty(1000, 6)
    fill_with_initial_rows(table, 5, 1.0)
    some = torch.tensor([999, 0, 500, 500])
    assert torch.equal(initial_rows(some, 6, 5, 1.0), table[some])
    assert torch.equal(initial_rows(torch.tensor([10**12]), 6, 5, 1.0), initial_rows(torch.tensor([10**12]), 6, 5, 1.0))
    other = torch.empty(1000, 6)
    fill_with_initial_rows(other, 6, 1.0)
    assert (other[:-1] == table[1:]).double().mean() < 0.01  # no shifted copy for the next seed
    assert (other == table).double().mean() < 0.01
