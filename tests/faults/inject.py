"""Faults in a process of a run, injected before functions of Holdall."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from holdall.checkpoint import saving
from holdall.cli import main
from holdall.common.errors import ProcessError
from holdall.training import start, trainer
from holdall.training.config import TrainConfig
from holdall.training.train import train
from holdall.training.trainer import Trainer

HANGS = 25.0
"""Seconds after which a process dumps its stack to stderr."""


@dataclass(frozen=True)
class Fault:
    """Fault that happens once in all attempts of a run."""

    at: str
    """Point of injection: a name of `PLACES`."""
    step: int
    """Current step, or step of the checkpoint that is written."""
    rank: int = 1
    does: str = "kill"
    """A name of `DEEDS`."""
    path: str = ""
    """File with which "fill" fills the disk; it is removed in the next attempt."""


def work(words: list[str], scratch: str, faults: Sequence[Mapping[str, Any]]) -> None:
    """Run `holdall WORDS` as a process of the run, with the faults of this rank that have not happened yet."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANGS)
    for number, fields in enumerate(faults):
        fault, mark = Fault(**fields), mark_of(scratch, number)
        if fault.rank != int(os.environ["RANK"]):
            continue
        if not mark.exists():
            PLACES[fault.at](fault.step, _once(mark, fault))
        elif fault.does == "fill":
            Path(fault.path).unlink(missing_ok=True)
    main(words)


def mark_of(scratch: str | Path, number: int) -> Path:
    """File that marks that a fault has happened, with the process id."""
    return Path(scratch) / f"fault-{number}"


def _once(mark: Path, fault: Fault) -> Callable[[], None]:
    def deed() -> None:
        if not mark.exists():
            mark.write_text(str(os.getpid()), encoding="utf-8")
            DEEDS[fault.does](fault)

    return deed


# --- what happens ----------------------------------------------------------------------------------------------------


def _kill(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _full(_: Fault) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fill(fault: Fault) -> None:
    with open(fault.path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017


DEEDS: dict[str, Callable[[Fault], None]] = {"kill": _kill, "stop": _stop, "full": _full, "fill": _fill}


# --- where -----------------------------------------------------------------------------------------------------------


def _before_step(step: int, deed: Callable[[], None]) -> None:
    original = Trainer.train_step

    def train_step(self: Trainer, *batches: Any) -> float | None:
        if self.step == step:
            deed()
        return original(self, *batches)

    Trainer.train_step = train_step  # type: ignore[method-assign]


def _in_exchange(step: int, deed: Callable[[], None]) -> None:
    """After the backward, while the gradients of the MLPs are sent."""
    original = Trainer.train_step

    def train_step(self: Trainer, *batches: Any) -> float | None:
        if self.step == step:
            exchange = self.strategy.exchange
            assert exchange is not None
            finish = exchange.finish

            def dying() -> torch.Tensor:
                deed()
                return finish()

            exchange.finish = dying  # type: ignore[method-assign]
        return original(self, *batches)

    Trainer.train_step = train_step  # type: ignore[method-assign]


def _in_evaluation(step: int, deed: Callable[[], None]) -> None:
    original = Trainer._evaluate

    def evaluate(self: Trainer, **options: Any) -> bool:
        if self.step == step:
            deed()
        return original(self, **options)

    Trainer._evaluate = evaluate  # type: ignore[method-assign]


def _in_restore(step: int, deed: Callable[[], None]) -> None:
    """When a checkpoint is about to be loaded: that of `step`, or a later one."""
    original = trainer.checkpoint.load_into

    def load_into(path: Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        if int(path.name.removeprefix("step-")) >= step:
            deed()
        return original(path, *arguments, **options)

    trainer.checkpoint.load_into = load_into


def _in_shard(step: int, deed: Callable[[], None]) -> None:
    """When half of a shard has been written."""
    original = saving.save_file

    def save_file(tensors: dict[str, torch.Tensor], file: Path) -> None:
        original(tensors, file)
        if file.parent.name == f"step-{step:08d}.partial":
            os.truncate(file, file.stat().st_size // 2)
            try:
                deed()
            except OSError as error:
                raise SafetensorError(f"Error while serializing: I/O error: {error.strerror} (os error 28)") from error
            original(tensors, file)

    saving.save_file = save_file


def _after_shards(step: int, deed: Callable[[], None]) -> None:
    """When this process has written its shards."""
    original = saving._write_part

    def write_part(planned: saving.SavePlan, processes: Any) -> dict[str, Any]:
        written = original(planned, processes)
        if planned.step == step:
            deed()
        return written

    saving._write_part = write_part


def _before_manifest(step: int, deed: Callable[[], None]) -> None:
    """On rank 0, when all processes have written their shards."""
    original = saving._manifest

    def manifest(planned: saving.SavePlan, written: Any) -> dict[str, Any]:
        if planned.step == step:
            deed()
        return original(planned, written)

    saving._manifest = manifest


def _before_prune(step: int, deed: Callable[[], None]) -> None:
    """On rank 0, when the checkpoint is complete and the other ranks do not know yet."""
    original = saving.prune

    def prune(folder: Path, newest: Path, number: int, keep: int) -> None:
        if number == step:
            deed()
        original(folder, newest, number, keep)

    saving.prune = prune


PLACES: dict[str, Callable[[int, Callable[[], None]], None]] = {
    "step": _before_step,
    "exchange": _in_exchange,
    "evaluation": _in_evaluation,
    "restore": _in_restore,
    "shard": _in_shard,
    "shards": _after_shards,
    "manifest": _before_manifest,
    "prune": _before_prune,
}


def train_with_another_version(data: str, out: str, settings: dict[str, Any], package: str) -> str:
    """Error of a run in which rank 1 has another version of a package."""
    if os.environ["RANK"] == "1":
        found = start.versions
        start.versions = lambda: {**found(), package: "0.0.1"}
    try:
        train(Path(data), Path(out), TrainConfig.of(**settings), quiet=True)
    except ProcessError as error:
        return str(error)
    return "trained"
