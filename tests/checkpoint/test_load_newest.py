"""Newest checkpoint, loaded while a run saves and prunes: a whole one, whatever happens between two reads."""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdall import checkpoint
from holdall.checkpoint import folder, loading, read_lock
from holdall.common.errors import CheckpointError
from tests.checkpoint.test_recovery import DAMAGE, model, save, zeros

STAGES = ["_identity", "load_into", "read", "verify_shards", "copy_shards"]
"""Functions before whose first call the run saves: from the moment the newest checkpoint was found to the last read."""


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, function: str, deed: Callable[[], object], *, before_call: int = 1
) -> None:
    """Do something before a call of a function of `loading`, by default the first."""
    original, calls = getattr(loading, function), itertools.count(1)

    def disturbed(*arguments: Any, **options: Any) -> Any:
        if next(calls) == before_call:
            deed()
        return original(*arguments, **options)

    monkeypatch.setattr(loading, function, disturbed)


def is_step(tensors: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(tensor, model(step)[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_the_checkpoint_is_pruned_while_it_is_read(
    stage: str, locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locks:
        monkeypatch.setattr(read_lock, "fcntl", None)
    save(tmp_path, 1, keep=1)
    meanwhile(monkeypatch, stage, lambda: save(tmp_path, 2, keep=1))
    tensors = zeros()
    found = checkpoint.load_newest([tmp_path / "best", tmp_path], tensors)
    step = 1 if locks and stage != "_identity" else 2  # the one that was locked, or the one that took its place
    assert found == (tmp_path / f"step-{step:08d}", {"step": step})
    assert is_step(tensors, step)
    save(tmp_path, 3, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize(("stage", "call"), [*((stage, 1) for stage in STAGES), ("_opened", 2)])
def test_the_checkpoint_is_replaced_by_one_of_its_step(
    stage: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of both are never mixed, though both are sound."""
    save(tmp_path, 1)

    def replace() -> None:
        checkpoint.save(tmp_path, 1, model(7), {"step": 1}, shard_bytes=200)

    meanwhile(monkeypatch, stage, replace, before_call=call)
    tensors = zeros()
    assert checkpoint.load_newest([tmp_path], tensors) == (tmp_path / "step-00000001", {"step": 1})
    assert is_step(tensors, 7)


def test_the_last_checkpoint_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)
    meanwhile(monkeypatch, "read", lambda: shutil.rmtree(path))
    assert checkpoint.load_newest([tmp_path], zeros()) is None


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused(kind: str, tmp_path: Path) -> None:
    damage, words = DAMAGE[kind]
    damage(save(tmp_path, 1))
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load_newest([tmp_path], zeros())


def test_an_older_one_does_not_stand_in_for_one_without_manifest(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").unlink()
    for find in (checkpoint.newest, lambda path: checkpoint.load_newest([path], zeros())):
        with pytest.raises(CheckpointError, match=r"step-00000002 has no manifest\.json.*restore it.*, or delete"):
            find(tmp_path)
    shutil.rmtree(tmp_path / "step-00000002")
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000001"


def test_a_checkpoint_that_is_gone_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder was listed before another process removed a checkpoint of it."""
    save(tmp_path, 2)
    listed = [tmp_path / "step-00000001", tmp_path / "step-00000002"]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(listed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder.latest(tmp_path) == listed[1]
