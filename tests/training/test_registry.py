"""Every registered strategy: it has a class, trains, and has the capabilities of its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdall import checkpoint
from holdall.distributed.processes import process_group
from holdall.distributed.table_wise import TableWiseBags
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import CHECKPOINTS
from holdall.training.strategies.hot_batch_loader import HotBatchLoader
from holdall.training.strategies.plain import PlainStrategy
from holdall.training.strategies.registry import ONE_PROCESS, SEVERAL_PROCESSES
from holdall.training.train import train
from holdall.training.trainer import Trainer
from tests.distributed.harness import run

SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128, steps=6, lr=0.05, deterministic=True, timeout=20)


def config_of(name: str) -> TrainConfig:
    hot_bytes = "4KB" if STRATEGY_KINDS[name].has_hot_rows else None
    return SMALL.replace(strategy=name, hot_bytes=hot_bytes)


def test_every_kind_has_a_class() -> None:
    assert set(ONE_PROCESS) == set(STRATEGY_KINDS)
    assert set(SEVERAL_PROCESSES) == {name for name, kind in STRATEGY_KINDS.items() if kind.runs_on_processes}
    for name, strategy in ONE_PROCESS.items():
        assert strategy.kind.name == name or strategy is PlainStrategy
    for name, strategy in SEVERAL_PROCESSES.items():
        assert strategy.kind.name == name


@pytest.mark.parametrize("name", STRATEGY_KINDS)
def test_one_process_behaves_as_the_capabilities_say(data: Path, tmp_path: Path, name: str) -> None:
    trainer = Trainer(data, tmp_path / "run", config_of(name), quiet=True)
    trainer.run()
    strategy, kind = trainer.strategy, trainer.strategy.kind
    assert strategy.exchange is None
    assert bool(strategy.hot_row_ids()) == kind.has_hot_rows
    assert hasattr(strategy, "pipeline") == kind.keeps_tail
    assert isinstance(strategy.loader, HotBatchLoader) == kind.packs_hot_batches
    assert (trainer.model.bags.output_device is not None) == kind.looks_up_on_host


def test_the_same_order_of_samples_gives_the_same_model(data: Path, tmp_path: Path) -> None:
    """A run can be resumed under another strategy; batches packed by their hot rows are another order."""
    tensors = {}
    for name in STRATEGY_KINDS:
        train(data, tmp_path / name, config_of(name), quiet=True)
        path = checkpoint.latest(tmp_path / name / CHECKPOINTS)
        assert path is not None
        tensors[name] = checkpoint.load(path, prefix="model.")[0]
    for name, kind in STRATEGY_KINDS.items():
        same = all(torch.equal(tensor, tensors["plain"][parameter]) for parameter, tensor in tensors[name].items())
        assert same == (not kind.packs_hot_batches), name


def capabilities(data: str, out: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Observed capabilities of a strategy of several processes, after some steps."""
    with process_group(torch.device("cpu"), timeout=20) as processes:
        config = TrainConfig.of(**settings)
        trainer = Trainer(Path(data), Path(out), config, quiet=True, processes=processes)
        trainer.run()
        strategy = trainer.strategy
        assert strategy.exchange is not None
        return {
            "has_hot_rows": bool(strategy.hot_row_ids()),
            "packs_hot_batches": isinstance(strategy.loader, HotBatchLoader),
            "shards_rows": hasattr(strategy, "shared"),
            "shards_tables": isinstance(trainer.model.bags, TableWiseBags),
            "merges_tables": "merges" in strategy.measures(),
            "knows all gradients": strategy.exchange.squared_norm is None,
        }


@pytest.mark.parametrize("name", SEVERAL_PROCESSES)
def test_several_processes_behave_as_the_capabilities_say(data: Path, tmp_path: Path, name: str) -> None:
    kind = SEVERAL_PROCESSES[name].kind
    for found in run(f"{__name__}:capabilities", 2, str(data), str(tmp_path / "run"), config_of(name).to_json()):
        assert found.pop("knows all gradients") == (not (kind.shards_rows or kind.shards_tables))
        assert found == {capability: getattr(kind, capability) for capability in found}
