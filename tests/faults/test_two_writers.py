"""Two commands that write to one folder at the same time: one goes on, the other ends and changes nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from holdall.common.folder_lock import locked
from holdall.training.tracking import read_metrics
from tests.faults.launch import SMALL, launch, start

pytestmark = pytest.mark.slow


def test_of_runs_started_at_once_one_goes_on(
    data: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All would train for hours, so those that end were refused."""
    run = tmp_path / "run"
    words = ["train", str(data), "--out", str(run), "--epochs", "1000000", *SMALL]
    said = tmp_path_factory.mktemp("said")
    flags: list[list[str]] = [[], ["--resume"], ["--overwrite"]]
    started = [(start([*words, *flag], said / str(number)), said / str(number)) for number, flag in enumerate(flags)]
    while sum(process.is_alive() for process, _ in started) > 1:
        time.sleep(0.05)
    *refused, (winner, errors) = sorted(started, key=lambda one: one[0].is_alive())
    for process, file in refused:
        told = file.read_text(encoding="utf-8")
        assert (process.exitcode, winner.exitcode) == (2, None), told
        assert f"process {winner.pid} on" in told
        assert told.splitlines()[-1].startswith("holdall: ")
        assert "Traceback" not in told
    while not (run / "metrics.jsonl").exists() or not read_metrics(run):
        assert winner.is_alive()
        time.sleep(0.05)
    assert winner.pid is not None
    os.kill(winner.pid, signal.SIGINT)
    winner.join(120)
    assert winner.exitcode == 130, errors.read_text(encoding="utf-8")
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
