"""Command of docs/processes.md under torchrun: one rank is killed from outside. (Stopped ones: `test_stopped.py`.)"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdall import checkpoint
from tests.distributed.harness import free_port
from tests.faults.launch import SMALL, Launched, left_over

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "processes.md"
WORDS = ["--steps", "90", "--save-every", "40", "--evaluate-every", "1000"]
LIMIT = 120.0


def command(words: list[str]) -> list[str]:
    """Command of the page as it is run here: this interpreter, a port that is free, a small model."""
    assert words[0] == "torchrun"
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--master-port",
        str(free_port()),
        "--monitor-interval",
        "0.1",
    ]
    return [*agent, *words[1:], "--deterministic", "--timeout", "5", *SMALL, *WORDS]


def test_the_command_of_the_page(clicks: Path, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## When a process dies") :]
    (block,) = re.findall(r"^```bash\n(.*?)^```", section[: section.index("\n## ")], flags=re.DOTALL | re.MULTILINE)
    words = shlex.split(block)
    assert {"--max-restarts", "--resume", "--save-every"} <= set(words)
    del words[words.index("--save-every") : words.index("--save-every") + 2]  # saved more often here
    (tmp_path / "data").symlink_to(clicks)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "said").open("w", encoding="utf-8") as said:
        launched = subprocess.Popen(command(words), cwd=tmp_path, stdout=said, stderr=said, env=environment)
        try:
            run = tmp_path / "run"
            disturb(run, 1, 50, signal.SIGKILL)
            assert launched.wait(LIMIT) == 0, (tmp_path / "said").read_text(encoding="utf-8")
        finally:
            launched.terminate()
            launched.wait(LIMIT)
    assert left_over(run) == []
    found = Launched(run, tmp_path, succeeded=True)
    assert len(found.resumed()) == 1
    assert re.search(r"ProcessError: rank 0, step \d+: [^:]+ lost another process", log(run, 0))
    alone = [*words[words.index("holdall") :], "--deterministic", *SMALL, *WORDS]
    compare_with_an_undisturbed_run(found, alone, tmp_path)


def compare_with_an_undisturbed_run(found: Launched, words: list[str], folder: Path) -> None:
    from tests.distributed.harness import run

    words[words.index("--out") + 1] = "calm"
    for _, err, code in run("tests.distributed.process_workers:command", 2, str(folder), words[1:]):
        assert code == 0, err
    calm = Launched(folder / "calm", folder, succeeded=True)
    assert found.rows() == calm.rows()
    tensors, others = found.tensors(), calm.tensors()
    assert all(torch.equal(tensors[name], others[name]) for name in others)
    assert checkpoint.latest(found.run / "checkpoints") == found.run / "checkpoints" / "step-00000090"


def disturb(run: Path, rank: int, step: int, number: int) -> None:
    """Send a signal to the process of a rank, by the id in its log, once it has reached a step."""
    until(lambda: last_step(log(run, rank)) >= step, f"rank {rank} comes to step {step}")
    process = int(re.findall(r"process (\d+)", log(run, rank))[-1])
    os.kill(process, number)


def log(run: Path, rank: int) -> str:
    file = run / f"rank-{rank}.log"
    return file.read_text(encoding="utf-8") if file.exists() else ""


def last_step(notes: str) -> int:
    """Step of the current attempt."""
    return max(
        (int(step) for step in re.findall(r" step (\d+): train", notes.rpartition("start at step")[2])), default=-1
    )


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)
