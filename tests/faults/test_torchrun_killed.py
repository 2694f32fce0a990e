"""kill -9 to torchrun itself: its processes notice, save a checkpoint and end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from holdall import checkpoint
from tests.distributed.harness import free_port
from tests.faults.launch import SMALL, left_over
from tests.faults.test_torchrun_restarts import LIMIT, last_step, log, until

pytestmark = pytest.mark.slow

ENDLESS = ["--steps", "1000000", "--evaluate-every", "1000000"]


def test_the_processes_save_and_end(clicks: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    words = ["train", str(clicks), "--out", str(run), "--strategy", "data-parallel", *SMALL, *ENDLESS]
    with (tmp_path / "said").open("w", encoding="utf-8") as said:
        launched = subprocess.Popen(
            [*agent, "-m", "holdall", *words], stdout=said, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            until(lambda: min(last_step(log(run, rank)) for rank in (0, 1)) >= 5, "both ranks train")
            launched.kill()
            launched.wait(LIMIT)
            until(lambda: left_over(run) == [], "both ranks end")
        finally:
            launched.kill()
            for process in left_over(run):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    stops = [re.findall(r"stopped at step (\d+), since torchrun has ended", log(run, rank)) for rank in (0, 1)]
    assert stops[0] == stops[1] != [], log(run, 0)
    path = checkpoint.latest(run / "checkpoints")
    assert path is not None
    assert checkpoint.load(path)[1]["step"] == int(stops[0][0])
