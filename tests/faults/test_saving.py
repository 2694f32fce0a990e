"""Faults while a checkpoint is written: a killed rank, a full disk. The run resumes from the checkpoint before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.inject import Fault
from tests.faults.launch import launch

pytestmark = pytest.mark.slow

TWO_FOLD = ["--save-every", "4", "--steps", "20", "--strategy", "two-fold", "--hot-bytes", "2KB"]
TABLE_WISE = ["--save-every", "4", "--steps", "20", "--strategy", "table-wise", "--no-keep-best"]
FULL = "the disk is full while writing {}/run/checkpoints/step-{:08d}: free some space"


def test_killed_while_saving(clicks: Path, tmp_path: Path, same_as_undisturbed: Callable[..., None]) -> None:
    """Both ranks, in the middle of a shard; then each at a later point."""
    faults = [
        Fault("shard", 4, rank=0),
        Fault("shard", 8, rank=1),
        Fault("shards", 12, rank=1),
        Fault("manifest", 16, rank=0),
        Fault("prune", 16, rank=0),
    ]
    found = launch(clicks, tmp_path / "run", TWO_FOLD, faults)
    same_as_undisturbed(found, TWO_FOLD)
    assert found.resumed() == [0, 4, 8, 12, 16]  # the last died when its checkpoint was complete


def test_no_room_while_saving(clicks: Path, tmp_path: Path, same_as_undisturbed: Callable[..., None]) -> None:
    faults = [
        Fault("shard", 8, rank=1, does="full"),
        Fault("manifest", 8, rank=0, does="full"),
        Fault("shard", 20, rank=0, does="full"),
    ]
    found = launch(clicks, tmp_path / "run", TABLE_WISE, faults)
    same_as_undisturbed(found, TABLE_WISE)
    assert found.resumed() == [4, 4, 16]
    for fault, attempt in zip(faults, range(3), strict=True):
        assert FULL.format(tmp_path, fault.step) in found.said(fault.rank)[attempt]
        assert f"rank {fault.rank}: the disk is full" in found.notes(1 - fault.rank)


def test_a_disk_that_really_is_full(
    clicks: Path, tmp_path: Path, small_disk: Path, same_as_undisturbed: Callable[..., None]
) -> None:
    """The disk fills up in step 9, on rank 1, and has space again after the restart."""
    faults = [Fault("step", 9, rank=1, does="fill", path=str(small_disk / "filler"))]
    found = launch(clicks, small_disk / "run", TABLE_WISE, faults, scratch=tmp_path / "launch")
    same_as_undisturbed(found, TABLE_WISE)
    assert found.resumed() in ([4], [8])  # the save of step 8 may or may not have been complete
    told = found.said(0)[0] + found.said(1)[0]
    in_log = f"the log of the run in {small_disk / 'run'} cannot be written at step"
    in_save = f"the disk is full while writing {small_disk / 'run' / 'checkpoints' / 'step-'}"
    assert in_log in told or in_save in told, told
