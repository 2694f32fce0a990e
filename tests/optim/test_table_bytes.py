"""Peak table and optimizer bytes: what the tensors take, shared ones once, the same wherever rows are stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from holdall.data.schema import Schema
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from holdall.optim.optimizers import Optimizers
from holdall.optim.table_bytes import TableBytes, count_table_bytes
from holdall.tables import Clustered, Dense, HotCold, Method, Quantized
from holdall.training.config import TrainConfig
from holdall.training.tracking import read_run
from holdall.training.train import train
from tests.tables.cases import CASES

SMALL = TrainConfig.of(dim=8, bottom=(8,), top=(16,), batch_size=256, steps=3)


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
@pytest.mark.parametrize("method", CASES.values(), ids=CASES)
def test_every_method_and_optimizer(method: Method, optimizer: str) -> None:
    """All tensors of the table, and all state that its optimizers have; an MLP beside it is not counted."""
    kind = OPTIMIZER_KINDS[optimizer]
    table = method.build(53, 12)
    found = count_table_bytes(nn.ModuleList([table, nn.Linear(12, 3)]), kind)
    assert found.tables == table.num_bytes() == method.num_bytes(53, 12)
    state = Optimizers(table, OptimizerConfig.of_record(optimizer)).tensors()
    assert found.optimizer == sum(tensor.nbytes for tensor in state.values())
    assert found.dense_tables == 4 * 53 * 12
    assert found.dense_optimizer == 53 * kind.row_state_bytes(12)
    assert (found.total, found.dense_total) == (
        found.tables + found.optimizer,
        found.dense_tables + found.dense_optimizer,
    )


def test_what_tables_share_counts_once() -> None:
    first, second = (Clustered(clusters=10).build(100, 4) for _ in range(2))
    second.centroids = first.centroids
    kind = OPTIMIZER_KINDS["rowwise_adagrad"]
    found = count_table_bytes(nn.ModuleList([first, second, first]), kind)
    assert found.tables == 10 * 4 * 4 + 2 * 100  # centroids, and a byte of assignment for each row
    assert found.optimizer == 10 * 4
    assert found.dense_tables == 2 * 100 * 4 * 4


def test_frozen_tables_have_no_state() -> None:
    kind = OPTIMIZER_KINDS["adam"]
    assert count_table_bytes(Dense().build(10, 4).requires_grad_(False), kind).optimizer == 0
    assert count_table_bytes(Quantized().build(10, 4), kind).optimizer == 0
    half = HotCold(hot_rows=4, cold=Quantized()).build(10, 4)
    assert count_table_bytes(half, kind).optimizer == 2 * 4 * 4 * 4


def test_no_state_is_allocated() -> None:
    """Ten billion rows on the meta device."""
    found = count_table_bytes(Dense().build(10**10, 16, device="meta"), OPTIMIZER_KINDS["rowwise_adagrad"])
    assert (found.tables, found.optimizer) == (64 * 10**10, 4 * 10**10)


def test_in_words() -> None:
    small = TableBytes(tables=2_000_000, optimizer=500_000, dense_tables=90_000_000, dense_optimizer=10_000_000)
    assert str(small) == (
        "peak table and optimizer bytes: 2.5 MB (2.0 MB of tables and 500.0 KB of optimizer state), 1/40 of dense"
    )
    dense = TableBytes(tables=90, optimizer=10, dense_tables=90, dense_optimizer=10)
    assert str(dense) == "peak table and optimizer bytes: 100 B (90 B of tables and 10 B of optimizer state)"


def test_runs_keep_them(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(data, tmp_path / "run", SMALL.replace(method="quantized", min_rows=0))
    num_rows = sum(Schema.load(tmp_path / "run").cardinalities.values())
    expected = TableBytes(
        tables=num_rows * (8 + 8), optimizer=num_rows * 4, dense_tables=num_rows * 32, dense_optimizer=num_rows * 4
    )
    assert result["peak_bytes"] == read_run(tmp_path / "run")["peak_bytes"] == expected.to_json()
    assert str(expected) in capsys.readouterr().err


@pytest.mark.parametrize(
    "placed", [{"strategy": "split", "hot_bytes": "2KB"}, {"strategy": "split", "hot_bytes": "2KB", "tail": "disk"}]
)
def test_rows_in_other_memories_count(data: Path, tmp_path: Path, placed: dict[str, str]) -> None:
    plain = train(data, tmp_path / "plain", SMALL, quiet=True)["peak_bytes"]
    assert train(data, tmp_path / "placed", SMALL.replace(**placed), quiet=True)["peak_bytes"] == plain
    assert plain["total"] == plain["dense_total"] > 0
