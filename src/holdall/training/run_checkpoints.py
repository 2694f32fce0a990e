"""Checkpoints of a run: their tensors, full ones, and those of hot rows between them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from holdall import checkpoint
from holdall.checkpoint import HotPart
from holdall.checkpoint.manifest import restore_advice
from holdall.checkpoint.protocols import TensorByRows
from holdall.common.decode import AnyFloat, Count, decode
from holdall.common.errors import CheckpointError
from holdall.optim.optimizers import Optimizers
from holdall.training.evaluate_run import CHECKPOINTS, model_tensors
from holdall.training.same_data import refuse_other_run
from holdall.training.setting_groups import CheckpointSettings
from holdall.training.strategies.base import Strategy


class RunState(TypedDict):
    """State of a run in a checkpoint, besides its tensors."""

    step: Count
    data: dict[str, Any]
    """Position of the loader."""
    loss: tuple[AnyFloat, Count]
    """Sum and number of the losses since the last row of metrics."""
    samples: NotRequired[Count]
    best: AnyFloat | None
    evaluations_without_gain: Count
    last_evaluation: dict[str, AnyFloat | None]
    last_step: NotRequired[Count | None]
    best_step: NotRequired[Count | None]
    best_evaluation: NotRequired[dict[str, AnyFloat | None]]
    run: NotRequired[str | None]
    """Fingerprint of the run."""


class RunCheckpoints:
    """Writes and restores the checkpoints in the folder `out` of a run, each with a `state` in JSON.

    `saver` writes them, in the background if it may: enter it as a context manager around the run.
    """

    def __init__(self, out: Path, settings: CheckpointSettings, strategy: Strategy, optimizers: Optimizers):
        self.out, self.settings, self.strategy, self.optimizers = out, settings, strategy, optimizers
        self.processes = strategy.processes
        self.saver = checkpoint.BackgroundSaver(self.processes)
        self.full_step: int | None = None
        """Step of the newest full checkpoint, which hot rows are laid over."""

    def tensors(self) -> dict[str, Tensor | TensorByRows]:
        """Everything that changes in training, by name."""
        found: dict[str, Tensor | TensorByRows] = model_tensors(self.strategy.model)
        found.update({f"optimizer.{name}": tensor for name, tensor in self.optimizers.tensors().items()})
        found.update(self.strategy.checkpoint_tensors())
        return found

    def save(self, step: int, state: dict[str, Any], folder: str, keep: int, *, waits: bool) -> Path:
        """Write a checkpoint; without `waits`, it may be complete some steps later."""
        with self.strategy.ready_to_save():
            path = self.saver.save(self.out / folder, step, self._saved(), state, keep=keep)
        if folder == CHECKPOINTS:
            self.full_step = step
        if waits or not self.settings.save_in_background:
            self.saver.wait()
        return path

    def save_hot(self, step: int, state: dict[str, Any]) -> Path:
        """Write hot rows and the dense part, to be laid over the last full checkpoint."""
        assert self.full_step is not None
        with self.strategy.ready_to_save():
            tensors = cut_to_hot_rows(self._saved(), self.strategy.hot_row_ids())
            return self.saver.save_hot(self.out / CHECKPOINTS, step, tensors, state, base=self.full_step)

    def _saved(self) -> dict[str, Tensor | TensorByRows]:
        """`tensors`, and the random state of rank 0."""
        return {**self.tensors(), **({"rng": torch.get_rng_state()} if self.processes.rank == 0 else {})}

    def restore(self, path: Path, run: str | None = None) -> tuple[RunState, Path | None]:
        """Load a verified checkpoint of this run, and newer hot rows if any; returns the state and their path.

        `run` is the fingerprint of this run, which both must have.
        """
        rng = torch.get_rng_state()
        tensors = {**self.tensors(), "rng": rng}
        state = self._state(path, run, checkpoint.load_into(path, tensors, verify=False, processes=self.processes))
        self.full_step = state["step"]
        hot = checkpoint.latest_hot(path.parent, state["step"], self.processes)
        if hot is not None:
            given = checkpoint.load_hot_into(hot, tensors, verify=False, processes=self.processes)
            state = self._state(hot, run, given)
        self.strategy.after_loading()
        torch.set_rng_state(rng)
        return state, hot

    @staticmethod
    def _state(path: Path, run: str | None, given: dict[str, Any]) -> RunState:
        where, cure = str(path / checkpoint.MANIFEST), restore_advice(path)
        state = decode(given, RunState, where, inside="state", error=CheckpointError, cure=cure)
        refuse_other_run(state, run, path)
        return state


def cut_to_hot_rows(
    tensors: Mapping[str, Tensor | TensorByRows], hot_row_ids: Mapping[str, Tensor]
) -> dict[str, Tensor | TensorByRows | HotPart]:
    """The tensors of a checkpoint of hot rows: tables that have some, and their optimizer state, are cut to them."""
    chosen: dict[str, Tensor | TensorByRows | HotPart] = {}
    for name, tensor in tensors.items():
        tables = [t for t in hot_row_ids if name == f"model.bags.{t}" or name.startswith(f"optimizer.rows.bags.{t}.")]
        chosen[name] = HotPart(tensor, hot_row_ids[tables[0]]) if tables else tensor
    return chosen
