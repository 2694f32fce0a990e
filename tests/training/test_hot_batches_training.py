"""Hot batches through the trainer: rows are prefetched across phases, and runs can stop within one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from holdall import checkpoint
from holdall.common.errors import TierError
from holdall.optim.optimizer_kinds import NAMES
from holdall.tiers.copy_mover import CopyMover
from holdall.tiers.tiered_pack import TieredPack
from holdall.tiers.working_set import CopySet, WorkingSet
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import CHECKPOINTS
from holdall.training.train import train
from holdall.training.trainer import Trainer

CONFIG = TrainConfig.of(
    dim=4,
    bottom=(8,),
    top=(16,),
    batch_size=64,
    lr=0.05,
    log_every=5,
    deterministic=True,
    epochs=2,
    strategy="hot-batches",
    hot_bytes="2KB",
)


def tensors(run: Path) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(run / CHECKPOINTS)
    assert path is not None
    return checkpoint.load(path)[0]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", NAMES)
def test_rows_fetched_across_hot_batches_are_the_same(data: Path, tmp_path: Path, optimizer: str) -> None:
    """Rows are fetched while hot batches are computed, and across evaluations and saves."""
    config = CONFIG.replace(optimizer=optimizer, save_every=31, evaluate_every=17)  # type: ignore[arg-type]
    train(data, tmp_path / "0", config, quiet=True)
    for prefetch in (1, 4) if optimizer == NAMES[0] else (4,):
        train(data, tmp_path / str(prefetch), config.replace(prefetch=prefetch), quiet=True)
        assert same(tensors(tmp_path / "0"), tensors(tmp_path / str(prefetch)))


def test_rows_of_later_phases_are_fetched_ahead(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is cut short has found the rows of two more cold batches than it computed, though a phase has one."""
    found, computed = [], []
    find, write_back = TieredPack.find, CopyMover.write_back

    def noting_find(self: TieredPack, *where: Any, again: bool = False, **options: Any) -> WorkingSet:
        if not again:
            found.append(where)
        return find(self, *where, again=again, **options)

    def noting_write_back(self: CopyMover, working: CopySet) -> None:
        computed.append(working)
        write_back(self, working)

    monkeypatch.setattr(TieredPack, "find", noting_find)
    monkeypatch.setattr(CopyMover, "write_back", noting_write_back)
    train(data, tmp_path / "run", CONFIG.replace(prefetch=2, steps=20), quiet=True)
    assert 5 < len(computed) < 15
    assert len(found) == len(computed) + 2


def test_a_failure_while_hot_batches_run_is_raised_and_nothing_hangs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, calls = CopyMover.fetch, []

    def failing(self: CopyMover, working: CopySet, *, counted: bool = True) -> None:
        calls.append(counted)  # else for an evaluation
        if calls[-1] and sum(calls) == 20:  # by then its rows fit their staging buffer
            raise OSError("the host is out of order")
        fetch(self, working, counted=counted)

    monkeypatch.setattr(CopyMover, "fetch", failing)
    others = set(threading.enumerate())  # of loaders that other tests left
    with pytest.raises(TierError, match=r"fetching the rows of step .* failed: the host is out of order"):
        train(data, tmp_path / "run", CONFIG.replace(prefetch=3), quiet=True)
    left = set(threading.enumerate()) - others
    assert not [thread for thread in left if thread.name == "holdall-loader"]


def test_less_than_a_batch_of_hot_inputs(data: Path, tmp_path: Path) -> None:
    result = train(data, tmp_path / "run", CONFIG.replace(batch_size=3000), quiet=True)
    assert 0 < result["hot_share_of_inputs"] < 3000 / 3200
    assert result["steps"] == 2 * 2  # a short batch of either kind, in each of two epochs


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Tensors of a run that was not stopped, which are the same however many batches are fetched ahead."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(data, out, CONFIG, quiet=True)
    return tensors(out)


@pytest.mark.parametrize("stop", [1, 23, 50, 77])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_stopped_anywhere_and_resumed(
    data: Path, tmp_path: Path, whole: dict[str, torch.Tensor], stop: int, prefetch: int
) -> None:
    config = CONFIG.replace(prefetch=prefetch)
    train(data, tmp_path / "run", config.replace(steps=stop), quiet=True)
    train(data, tmp_path / "run", config, resume=True, quiet=True)
    assert same(tensors(tmp_path / "run"), whole)


@pytest.mark.parametrize("strategy", ["split", "hot-batches"])
def test_rows_that_were_never_written_are_not_fetched(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """The device computes their initial values: it gets a byte a row that marks them, and the other rows."""
    row_bytes = 4 * 4 + 4
    written: set[int] = set()
    expected = written_back = 0
    write_back = CopyMover.write_back

    def noting(self: CopyMover, working: CopySet) -> None:
        nonlocal expected, written_back
        rows = set(working.rows.tolist())
        expected += len(rows & written) * row_bytes + (0 if rows <= written else len(rows))
        written_back += len(rows) * row_bytes
        written.update(rows)
        write_back(self, working)

    monkeypatch.setattr(CopyMover, "write_back", noting)
    config = CONFIG.replace(strategy=strategy, keep_best=False)  # type: ignore[arg-type]
    trainer = Trainer(data, tmp_path / "run", config, quiet=True)
    trainer.run()
    traffic = trainer.strategy.tiers.traffic  # type: ignore[attr-defined]
    assert (traffic.fetched, traffic.written_back) == (expected, written_back)
    assert 0 < traffic.fetched < traffic.written_back
    hot_rows = sum(trainer.strategy.hot_rows.values())  # type: ignore[attr-defined]
    assert traffic.flushed == hot_rows * row_bytes  # home for the checkpoint at the end; none came, to begin with
