"""Runs of `holdall train` on several processes under torchrun's agent, with faults.

`torchrun` is a command line around `elastic_launch`, which starts the processes, watches them and starts all of them
again when one ends. Here it is given a function in the place of a command, and forks the processes from a server that
has imported torch already, so that a start costs a fraction of a second. `test_torchrun_restarts.py` has the command
line.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from holdall import checkpoint
from holdall.cli import main
from holdall.training.evaluate_run import CHECKPOINTS
from holdall.training.tracking import read_metrics, read_run
from tests.distributed import harness  # the server imports what it says
from tests.faults.inject import Fault, mark_of, work

for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
    logging.getLogger(name).setLevel(logging.CRITICAL)  # what happens here is no news

SMALL = ["--dim", "4", "--bottom", "8", "--top", "8", "--batch-size", "64", "--lr", "0.05", "--log-every", "1"]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that the agent sets handlers for."""
SECONDS = 100.0
"""Seconds after which a launch is ended."""


@dataclass(frozen=True)
class Launched:
    """Result of a launch."""

    run: Path
    scratch: Path
    succeeded: bool

    def rows(self) -> list[dict[str, object]]:
        """Loss curve and evaluations by step: rows of the log without times and bytes."""
        kept = ("step", "split", "epoch", "loss", "lr", "logloss", "auc")
        return [{name: row[name] for name in kept if name in row} for row in read_metrics(self.run)]

    def tensors(self) -> dict[str, torch.Tensor]:
        path = checkpoint.latest(self.run / CHECKPOINTS)
        assert path is not None
        return checkpoint.load(path)[0]

    def resumed(self) -> list[int]:
        """Steps at which the run resumed."""
        return [entry["step"] for entry in read_run(self.run)["resumed"]]

    def notes(self, rank: int) -> str:
        return (self.run / f"rank-{rank}.log").read_text(encoding="utf-8")

    def said(self, rank: int) -> list[str]:
        """Output of a rank to stderr, by attempt."""
        files = sorted(self.scratch.glob(f"*/attempt_*/{rank}/stderr.log"))
        return [file.read_text(encoding="utf-8") for file in files]


def launch(
    data: Path,
    run: Path,
    words: Sequence[str],
    faults: Sequence[Fault] = (),
    *,
    scratch: Path | None = None,
    max_restarts: int | None = None,
) -> Launched:
    """`torchrun --nproc-per-node 2 -m holdall train DATA --out RUN --resume --deterministic WORDS`.

    Each of the faults happens once; there are as many restarts as faults when `max_restarts` does not say. A process
    that was stopped is left alone until another has given it up (see `_end_stopped`). No process is left in the end.
    """
    scratch = run.with_name(run.name + "-launch") if scratch is None else scratch
    scratch.mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=run.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=len(faults) if max_restarts is None else max_restarts,
        monitor_interval=0.05,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch), redirects=Std.ALL),
    )
    given = ["train", str(data), "--out", str(run), "--resume", "--deterministic", *SMALL, *words]
    try:
        with ended_after(SECONDS), _end_stopped(run, scratch, faults):
            elastic_launch(config, work)(given, str(scratch), [asdict(fault) for fault in faults])
        succeeded = True
    except ChildFailedError:
        succeeded = False
    for number, fault in enumerate(faults):
        assert mark_of(scratch, number).exists(), f"{fault} never happened"
    assert left_over(run) == []
    return Launched(run, scratch, succeeded)


def start(words: Sequence[str], said: Path, before: Callable[[], None] | None = None) -> ForkServerProcess:
    """`holdall WORDS` in a forked process, alone, after a call of `before`; what it says on stderr goes to a file."""
    process = harness.CONTEXT.Process(target=_command, args=(list(words), said, before), daemon=True)
    process.start()
    return process


def _command(words: list[str], said: Path, before: Callable[[], None] | None) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    if before is not None:
        before()
    main(words)


def left_over(run: Path) -> list[int]:
    """Processes of a run, by their logs, that are still alive."""
    numbers = [int(n) for log in run.glob("rank-*.log") for n in re.findall(r"process (\d+)", log.read_text())]
    return [number for number in numbers if (Path("/proc") / str(number) / "exe").exists()]


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End the block, which waits for processes, by a signal when it takes too long; handlers are put back."""
    previous = {number: signal.getsignal(number) for number in SIGNALS}

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the launch did not end within {seconds:g} s")

    signal.signal(signal.SIGTERM, end)  # until the agent has set its own, which ends its processes too
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _end_stopped(run: Path, scratch: Path, faults: Sequence[Fault]) -> Iterator[None]:
    """When a process was stopped and another has timed out: continue the first such one, kill the others.

    torchrun tells it to end, which it does not hear, and kills it after 30 s: this saves the tests that time.
    """
    stops = [number for number, fault in enumerate(faults) if fault.does == "stop"]
    over = threading.Event()

    def watch() -> None:
        for place, number in enumerate(stops):
            while not (mark_of(scratch, number).exists() and _times_given_up(run) > place):
                if over.wait(0.05):
                    return
            process = int(mark_of(scratch, number).read_text(encoding="utf-8"))
            os.kill(process, signal.SIGCONT if place == 0 else signal.SIGKILL)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _times_given_up(run: Path) -> int:
    return sum(log.read_text(encoding="utf-8").count("s or more for the other") for log in run.glob("rank-*.log"))
