"""Chunks in random order: every row once, mixed batches, and a planted log that is sorted by its label."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdall.data import chunk_order, dataset
from holdall.data.chunk_order import ChunkOrder, Runs
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.data.synthetic import SyntheticConfig, write_prepared


def rows_of(order: ChunkOrder) -> list[int]:
    return order.runs(0, order.num_rows).rows().tolist()


@pytest.mark.parametrize("num_rows", [1, 7, 8, 1000, 1024, 4096, 4103, 10_000])
@pytest.mark.parametrize("batch_size", [1, 500, 2048, 70_000])
def test_every_row_once(num_rows: int, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_order, "WINDOW_ROWS", 4096)
    order = ChunkOrder(num_rows, batch_size, (3, 1))
    assert sorted(rows_of(order)) == list(range(num_rows))


def test_any_part_of_the_order_is_that_part_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_order, "WINDOW_ROWS", 4096)
    whole = rows_of(ChunkOrder(10_001, 2048, (0, 0)))
    for start, stop in [(0, 5), (5, 5), (3, 3000), (4090, 4100), (9000, 10_001), (100, 300)]:
        assert ChunkOrder(10_001, 2048, (0, 0)).runs(start, stop).rows().tolist() == whole[start:stop]


def test_seeds_of_epochs_and_windows_give_orders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_order, "WINDOW_ROWS", 4096)
    assert len({str(rows_of(ChunkOrder(5000, 2048, seed))) for seed in [(0, 0), (0, 1), (1, 0), (0, 0, 1)]}) == 4
    order = ChunkOrder(8192, 2048, (0, 0))
    first, second = order._mixed(0) % 128, order._mixed(1) % 128
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize(("batch_size", "chunk_rows"), [(1, 1), (1023, 1), (2048, 4), (3000, 4), (65_536, 128)])
def test_a_batch_has_at_least_512_chunks(batch_size: int, chunk_rows: int) -> None:
    assert ChunkOrder(1 << 20, batch_size, (0, 0)).chunk_rows == chunk_rows


def test_batches_of_rows_sorted_by_label_have_its_rate() -> None:
    """A quarter of the rows is positive, and these come first: batches differ from 1/4 by what 512 draws give."""
    order = ChunkOrder(1 << 19, 2048, (0, 0))
    rates = [(order.runs(start, start + 2048).rows() < 1 << 17).mean() for start in range(0, 1 << 19, 2048)]
    assert abs(np.mean(rates) - 0.25) < 1e-9
    assert np.std(rates) < 1.3 * np.sqrt(0.25 * 0.75 / 512)


def test_rows_of_a_split_larger_than_a_window_come_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_order, "WINDOW_ROWS", 1 << 14)
    order = ChunkOrder(1 << 19, 2048, (0, 0))
    blocks = [np.unique(order.runs(start, start + 2048).rows() >> 16) for start in range(0, 1 << 19, 2048)]
    assert np.mean([len(found) for found in blocks]) > 6  # of 8 parts, from 16 blocks of 1,024 rows a window


@pytest.mark.parametrize("rows_per_file", [5000, 300])
@pytest.mark.parametrize("bag_length", [1, 3])
@pytest.mark.parametrize("long_run", [1, 10**9])
def test_runs_are_the_rows_one_by_one(
    rows_per_file: int, bag_length: int, long_run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file or many, one id or a bag, run by run or by an index: the same batches."""
    monkeypatch.setattr("holdall.data.synthetic.ROWS_PER_FILE", rows_per_file)
    monkeypatch.setattr(dataset, "LONG_RUN", long_run)
    config = SyntheticConfig(rows=1000, cardinalities=(30, 9), num_dense=2, bag_lengths=(1, bag_length))
    write_prepared(config, tmp_path / "data", valid=0.0, test=0.0)
    data = DataSet(tmp_path / "data")
    runs = Runs(np.array([290, 900, 0, 598]), np.array([20, 100, 7, 5]))
    for batch, rows in zip(data.take_runs(runs, [60, 72]), np.split(runs.rows(), [60]), strict=True):
        expected = data.take(rows)
        for found, tensor in zip(batch.tensors(), expected.tensors(), strict=True):
            assert found.equal(tensor)


def test_batches_are_the_same_however_many_are_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_prepared(SyntheticConfig(rows=900, cardinalities=(30,), num_dense=1), tmp_path / "data", valid=0.0, test=0.0)
    data = DataSet(tmp_path / "data")
    together = [batch.dense for batch in Loader(data, 100).epoch(0)]
    monkeypatch.setattr("holdall.data.loader.COPIED_ROWS", 1)
    apart = [batch.dense for batch in Loader(data, 100).epoch(0)]
    assert len(together) == 9
    assert all(one.equal(other) for one, other in zip(together, apart, strict=True))
