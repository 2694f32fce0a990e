"""Rows of the log of a run: losses since the last row, and rows that wait until the data files have been checked."""

from __future__ import annotations

from typing import Any

from holdall.distributed.processes import RankLog
from holdall.training.callbacks import Callbacks
from holdall.training.data_check import DataCheck
from holdall.training.run_times import RunTimes
from holdall.training.tracking import RunLog


class RunRows:
    """Rows for `metrics.jsonl`, which rank 0 has, for callbacks, and for the log of each rank."""

    def __init__(self, data_check: DataCheck, callbacks: Callbacks, rank_log: RankLog | None):
        self.log: RunLog | None = None
        """Set by the run once it is open, on rank 0."""
        self.loss_sum, self.loss_count = 0.0, 0
        """Losses since the last row of training."""
        self.steady_seconds: float | None = None
        """Seconds a step between the last two rows of training: without start-up, evaluations and checkpoints."""
        self._data_check, self._callbacks, self._rank_log = data_check, callbacks, rank_log
        self._waiting: list[tuple[int, str, dict[str, Any]]] = []
        """Step, split and values of rows that wait for the check of the data files."""
        self.start(RunTimes(), 0)

    def start(self, times: RunTimes, samples: int) -> None:
        """Measure rates from now on by the clock of the run, which has trained on so many samples."""
        self._times, self._logged_at, self._logged_samples = times, times.training, samples

    def add_loss(self, loss: float) -> None:
        """Count the loss of a step."""
        self.loss_sum, self.loss_count = self.loss_sum + loss, self.loss_count + 1

    def write_training(self, step: int, *, epoch: int, samples: int, lr: float, **measures: Any) -> None:
        """Write a row for the steps since the last one."""
        seconds = max(self._times.training - self._logged_at, 1e-9)
        rate = (samples - self._logged_samples) / seconds
        loss = self.loss_sum / self.loss_count
        own = {"epoch": epoch, "samples": samples, "loss": loss, "lr": lr, "samples_per_second": rate}
        self.write(step, "train", **own, **measures)
        self.steady_seconds = seconds / self.loss_count
        self.loss_sum, self.loss_count = 0.0, 0
        self._logged_at, self._logged_samples = self._times.training, samples

    def write(self, step: int, split: str, **values: Any) -> None:
        """Write a row, or keep it until the data files have been checked."""
        self._waiting.append((step, split, values))
        if self._data_check.passed():
            self.write_waiting()

    def write_waiting(self) -> None:
        """Write the rows that were kept."""
        for step, split, values in self._waiting:
            if self.log is not None:
                self.log.write(step, split, **values)
            with self._times.apart("callbacks"):
                self._callbacks.call("on_log" if split == "train" else "on_evaluation", step, {**values}, step=step)
            if self._rank_log is not None:
                name = "loss" if split == "train" else "logloss"
                self._rank_log.write(f"step {step}: {split} {name} {values[name]:.6g}")
        self._waiting.clear()
