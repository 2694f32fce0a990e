"""Two commands that write to one folder at the same time: one goes on, the other ends and changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdall.common.folder_lock import locked
from holdall.training.tracking import read_metrics
from tests.faults.launch import SMALL, launch

pytestmark = pytest.mark.slow


def test_of_runs_started_at_once_one_goes_on(data: Path, tmp_path: Path) -> None:
    """All would train for hours, so those that end were refused."""
    run = tmp_path / "run"
    words = ["train", str(data), "--out", str(run), "--epochs", "1000000", *SMALL]
    command, environment = [sys.executable, "-m", "holdall", *words], {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*command, *flag], stderr=subprocess.PIPE, text=True, env=environment)
        for flag in ([], ["--resume"], ["--overwrite"])
    ]
    while sum(process.poll() is None for process in started) > 1:
        time.sleep(0.05)
    *refused, winner = sorted(started, key=lambda process: process.poll() is None)
    for process in refused:
        _, errors = process.communicate()
        assert (process.returncode, winner.poll()) == (2, None), errors
        assert f"process {winner.pid} on" in errors
        assert errors.splitlines()[-1].startswith("holdall: ")
        assert "Traceback" not in errors
    while not (run / "metrics.jsonl").exists() or not read_metrics(run):
        assert winner.poll() is None
        time.sleep(0.05)
    winner.send_signal(signal.SIGINT)
    _, errors = winner.communicate(timeout=120)
    assert winner.returncode == 130, errors
    steps = [row["step"] for row in read_metrics(run) if row["split"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_refused_rank_0_ends_all_ranks(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with locked(run):
        launched = launch(data, run, ["--steps", "3"], max_restarts=0)
        assert not launched.succeeded
        assert not run.exists()
    assert f"process {os.getpid()} on" in launched.said(0)[0]
    assert "Traceback" not in launched.said(0)[0] + launched.said(1)[0]
