"""Worker functions of the tests of processes, collectives and the trainer."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdall.common.errors import HoldallError, NonFiniteLossError, ProcessError
from holdall.distributed.collectives import Collectives
from holdall.distributed.processes import PeerError, process_group
from holdall.training.callbacks import Callback, StopTraining
from holdall.training.config import TrainConfig
from holdall.training.step import TrainStep
from holdall.training.strategies.two_fold import TwoFoldStrategy
from holdall.training.train import train
from holdall.training.trainer import Trainer

CPU = torch.device("cpu")


def rank() -> int:
    return int(os.environ["RANK"])


def every_collective() -> dict[str, Any]:
    """Each of them with sizes that depend on the rank; results and the bytes counted."""
    with process_group(CPU, timeout=20) as processes:
        c = Collectives(processes)
        me, num = processes.rank, processes.world_size
        rows = torch.full((me * 2, 3), float(me))
        gathered = c.all_gather(rows)
        send = [me + other for other in range(num)]  # rank r sends r + s rows to rank s
        sent = torch.cat([torch.full((n, 2), 10 * me + other) for other, n in enumerate(send)])
        received = c.all_to_all(sent, send)
        reduced = c.all_reduce(torch.tensor([1.0, me]))
        told = c.broadcast(torch.tensor([me, 7]))
        return {
            "gathered": torch.cat(gathered),
            "received": received,
            "reduced": reduced,
            "told": told,
            "bytes": c.bytes_by_kind(),
            "calls": {kind: traffic.calls for kind, traffic in c.traffic.items()},
            "json": processes.gather({"rank": me, "nan": [0.1, None]}),
            "first": processes.on_rank_zero(lambda: {"by": me}),
        }


def rank_zero_fails() -> str:
    def fail() -> None:
        raise HoldallError("no room")

    with process_group(CPU, timeout=20) as processes, pytest.raises(HoldallError) as caught:
        processes.on_rank_zero(fail)
    return f"{type(caught.value).__name__}: {caught.value}"


def disagree() -> str:
    with process_group(CPU, timeout=20) as processes, pytest.raises(ProcessError) as caught:
        processes.agree({"the seed": 5, "--lr": 0.1 if processes.rank < 2 else 0.2})
    return f"{type(caught.value).__name__}: {caught.value}"


def one_hangs() -> str:
    """Rank 1 sleeps for longer than the timeout of the others."""
    with process_group(CPU, timeout=1.0) as processes:
        c = Collectives(processes)
        c.step = 12
        c.all_reduce(torch.ones(2))
        if processes.rank == 1:
            time.sleep(3)
            return "slept"
        with pytest.raises(ProcessError) as caught:
            c.all_reduce(torch.ones(2))
        return str(caught.value)


def one_dies() -> str:
    with process_group(CPU, timeout=20) as processes:
        c = Collectives(processes)
        c.step = 3
        c.all_reduce(torch.ones(2))
        if processes.rank == 1:
            torch.distributed.destroy_process_group()  # closes its connections, as the end of the process does
            time.sleep(2)
            return "gone"
        with pytest.raises(ProcessError) as caught:
            c.all_reduce(torch.ones(2))
        os.environ["DONE"] = "1"
        return str(caught.value)


def train_run(data: str, out: str, settings: dict[str, Any], resume: bool = False) -> dict[str, Any]:
    return train(Path(data), Path(out), TrainConfig.of(**settings), quiet=True, resume=resume)


def train_with_callback(data: str, out: str, settings: dict[str, Any], fails: bool) -> tuple[Any, list[int]]:
    """Every rank has a callback that ends the run at its second row, or fails; the outcome, and the steps it saw."""
    seen: list[int] = []

    class Stops(Callback):
        def on_log(self, step: int, values: dict[str, Any]) -> None:
            seen.append(step)
            if len(seen) == 2:
                raise ValueError("no chart") if fails else StopTraining("enough")

    try:
        result = train(Path(data), Path(out), TrainConfig.of(**settings), quiet=True, callbacks=[Stops()])
    except HoldallError as error:
        return [type(error).__name__, str(error)], seen
    return [result["steps"], result["stopped_by"]], seen


def start_and_stop(data: str, out: str, settings: dict[str, Any]) -> int:
    """A run that ends before its first step."""

    class Stops(Callback):
        def on_start(self, run: Path, settings: dict[str, Any], step: int) -> None:
            raise StopTraining

    result = train(Path(data), Path(out), TrainConfig.of(**settings), quiet=True, callbacks=[Stops()])
    return int(result["steps"])


def command(folder: str, words: list[str]) -> tuple[str, str, int]:
    """Output of `holdall WORDS` in a folder, on stdout and stderr, and its exit code."""
    from holdall.cli import main

    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return out.getvalue(), err.getvalue(), code


def train_with_other_settings(data: str, out: str, settings: dict[str, Any]) -> str:
    config = TrainConfig.of(**settings)
    if rank() == 1:
        config = config.replace(lr=0.5)
    with pytest.raises(ProcessError) as caught:
        train(Path(data), Path(out), config, quiet=True)
    return str(caught.value)


def train_on(folders: list[str], out: str, settings: dict[str, Any]) -> str:
    with pytest.raises(ProcessError) as caught:
        train_run(folders[rank()], out, settings)
    return str(caught.value)


def stopped_by_a_signal(data: str, out: str, settings: dict[str, Any]) -> str:
    """Only rank 1 gets a signal to stop, in its fourth step."""
    loss, step = TrainStep.loss, iter(range(1000))

    def signalled(self: TrainStep, batch: Any, moved: Any) -> Tensor:
        if next(step) == 3 and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(self, batch, moved)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "loss", signalled)
        with pytest.raises(KeyboardInterrupt) as caught:
            train_run(data, out, settings)
    return str(caught.value)


def one_bad_loss(data: str, out: str, settings: dict[str, Any]) -> tuple[str, bool]:
    """The loss of rank 1 is not a number in step 3; whether its table is as it was before the step."""
    kept: dict[str, Tensor] = {}
    loss, step, models = TrainStep.loss, iter(range(1000)), []

    def bad(self: TrainStep, batch: Any, moved: Any) -> Tensor:
        now = next(step)
        if now == 3:
            kept.update({name: tensor.clone() for name, tensor in self.strategy.model.state_dict().items()})
            models.append(self.strategy.model)
        value = loss(self, batch, moved)
        return value * float("nan") if now == 3 and rank() == 1 else value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "loss", bad)
        with pytest.raises(HoldallError) as caught:
            train_run(data, out, settings)
    expected = NonFiniteLossError if rank() == 1 else PeerError
    assert isinstance(caught.value, expected), caught.value
    state = models[0].state_dict()
    return str(caught.value), all(torch.equal(state[name], tensor) for name, tensor in kept.items())


def train_until(data: str, out: str, settings: dict[str, Any], step: int) -> str:
    """Every rank ends, as if killed, when it reaches a step."""
    original = Trainer.train_step

    class Killed(BaseException):
        pass

    def dying(self: Trainer, *batches: Any) -> float | None:
        if self.step == step:
            raise Killed
        return original(self, *batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", dying)
        with pytest.raises(Killed):
            train_run(data, out, settings)
    return "killed"


def restored(data: str, out: str, settings: dict[str, Any]) -> tuple[int, dict[str, Tensor], dict[str, int]]:
    """Step at which a two-fold run resumes, its rows, and the hot rows of each table."""
    with process_group(CPU, timeout=20) as processes:
        trainer = Trainer(
            Path(data), Path(out), TrainConfig.of(**settings), resume=True, quiet=True, processes=processes
        )
        assert isinstance(trainer.strategy, TwoFoldStrategy)
        whole = trainer.strategy.shared.full_state()
        return (
            trainer.step,
            {name: state["weight"] for name, state in whole.items() if state},
            trainer.strategy.hot_rows,
        )
