"""Lock of a folder for one writing process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdall.common.errors import HoldallError
from holdall.common.folder_lock import locked, refuse_locked
from holdall.training.config import TrainConfig
from holdall.training.trainer import train

SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(8,), batch_size=256, steps=2)
HOLDER = """
import sys, time
from pathlib import Path
from holdall.common.folder_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(HoldallError, match="another process is training in"), locked(tmp_path):
            pass
        with pytest.raises(HoldallError, match="wait for it or end it"):
            refuse_locked(tmp_path, timeout=0.2)
    refuse_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []
    refuse_locked(tmp_path / "not there")


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(HoldallError):
        refuse_locked(tmp_path, timeout=0.0)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    refuse_locked(tmp_path)


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}, {}], ids=["resume", "overwrite", "new"])
def test_nobody_else_trains_in_the_folder_of_a_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    monkeypatch.setattr("holdall.training.start.refuse_locked", lambda folder: refuse_locked(folder, timeout=0.0))
    train(data, tmp_path / "run", SMALL, quiet=True)
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with locked(tmp_path / "run"), pytest.raises(HoldallError, match="another process is training in"):
        train(data, tmp_path / "run", SMALL, quiet=True, **options)
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
    train(data, tmp_path / "run", SMALL, quiet=True, resume=True)


def test_a_run_locks_its_folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(*_: object, **__: object) -> Path:
        with pytest.raises(HoldallError):
            refuse_locked(tmp_path / "run", timeout=0.0)
        seen.append(True)
        return tmp_path

    monkeypatch.setattr("holdall.training.trainer.Trainer.save", look)
    train(data, tmp_path / "run", SMALL, quiet=True)
    assert seen
    refuse_locked(tmp_path / "run")
