"""A process of `benchmarks.recovery`: `holdall train`, with a clock, and killed where the benchmark says.

python -m benchmarks.recovery_worker NOTES KILLS ALTERNATE train DATA --out RUN ...

NOTES/rank-N.jsonl gets a line for everything that happens: what, when, in which attempt. KILLS is a JSON list of
[step, rank]; ALTERNATE is 1 when every other save shall be waited for.
"""

from __future__ import annotations

import time

BEGUN = time.time()

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from holdall.cli import main  # noqa: E402
from holdall.training.trainer import Trainer  # noqa: E402


class Clock:
    """Notes what happens to this process."""

    def __init__(self, folder: Path):
        self.rank, self.attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._file = (folder / f"rank-{self.rank}.jsonl").open("a", encoding="utf-8", buffering=1)

    def note(self, what: str, **more: Any) -> None:
        row = {"what": what, "time": time.time(), "attempt": self.attempt, **more}
        self._file.write(json.dumps(row) + "\n")


def install(clock: Clock, kills: list[list[int]], folder: Path, alternate: bool) -> None:
    """Put the clock around what a trainer does."""
    _around(Trainer, "_resume", clock, "load")
    _around(Trainer, "run", clock, "run")
    original_step, original_save = Trainer.train_step, Trainer.save
    saves = 0

    def train_step(self: Trainer, *batches: Any) -> float | None:
        for step, rank in kills:
            mark = folder / f"killed-{step}"
            if (step, rank) == (self.step, clock.rank) and not mark.exists():
                mark.touch()
                clock.note("kill", step=step)
                os.kill(os.getpid(), signal.SIGKILL)
        busy, begun = self.checkpoints.saver.is_busy, time.time()
        loss = original_step(self, *batches)
        clock.note("step", step=self.step, begun=begun, beside=busy and self.checkpoints.saver.is_busy, alone=not busy)
        return loss

    def save(self: Trainer, *arguments: Any, waits: bool = True, **options: Any) -> Path:
        nonlocal saves
        side = "foreground" if alternate and saves % 2 else "background"
        saves += 1
        self.checkpoints.saver.wait()  # as if the last one were long complete
        begun = time.time()
        path = original_save(self, *arguments, waits=waits or side == "foreground", **options)
        if not waits:
            clock.note("save", step=self.step, begun=begun, side=side)
            _note_when_done(self, clock, begun)
        return path

    Trainer.train_step, Trainer.save = train_step, save  # type: ignore[method-assign]


def _note_when_done(trainer: Trainer, clock: Clock, begun: float) -> None:
    """Note when a save in the background is complete."""
    save = trainer.checkpoints.saver._last
    if save is not None:
        save.add_done_callback(lambda _: clock.note("complete", begun=begun))


def _around(kind: Any, name: str, clock: Clock, what: str) -> None:
    original: Callable[..., Any] = getattr(kind, name)

    def timed(*arguments: Any, **options: Any) -> Any:
        clock.note(f"{what} begins")
        try:
            result = original(*arguments, **options)
        except BaseException:
            clock.note(f"{what} fails")
            raise
        clock.note(f"{what} ends")
        return result

    setattr(kind, name, timed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    notes = Path(sys.argv[1])
    this_clock = Clock(notes)
    this_clock.note("begin", begun=BEGUN)
    install(this_clock, json.loads(sys.argv[2]), notes, sys.argv[3] == "1")
    main(sys.argv[4:])
