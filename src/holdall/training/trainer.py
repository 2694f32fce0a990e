"""Training of a run: batches in, a run folder out. A run can be resumed at any checkpoint, to the same loss curve."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from holdall import checkpoint
from holdall.checkpoint.all_ranks import on_all_ranks
from holdall.common.device import pick_device
from holdall.common.errors import NonFiniteLossError
from holdall.common.progress import SampleProgress
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.schema import Schema
from holdall.distributed.processes import SINGLE_PROCESS, Processes, RankLog
from holdall.kernels.dispatch import takes_triton
from holdall.optim.optimizers import Optimizers
from holdall.optim.table_bytes import count_table_bytes
from holdall.planning.plan import Plan
from holdall.training.callbacks import Callbacks
from holdall.training.check_own_model import check_own_model
from holdall.training.config import TrainConfig
from holdall.training.data_check import DataCheck
from holdall.training.evaluate_run import BEST, CHECKPOINTS
from holdall.training.follow_plan import compare_with_plan, follow
from holdall.training.interrupt import Interrupt
from holdall.training.pretrained import load_pretrained, pretrained_json
from holdall.training.resume_check import refuse_other_settings, with_optimizer, with_sample_order
from holdall.training.run_checkpoints import RunCheckpoints
from holdall.training.run_folder import RunFolder
from holdall.training.run_rows import RunRows
from holdall.training.run_times import RunTimes
from holdall.training.same_data import (
    RUN,
    TABLE_SIZES,
    TABLES,
    refuse_other_data,
    refuse_other_parts,
    refuse_other_rows,
    run_fingerprint,
)
from holdall.training.start import agree_on_run, open_run_log, refuse_frozen_tables
from holdall.training.step import TrainStep
from holdall.training.strategies.base import Segment
from holdall.training.strategies.registry import find_strategy
from holdall.training.table_methods import Methods, choose_methods, describe_tables, methods_to_json, table_sizes
from holdall.training.tracking import BAD_BATCH_FILE, RUN_FILE, read_run, save_batch
from holdall.training.validation import Validation

SCRATCH = "tiers"
"""Folder in a run folder for the rows of tables on disk; deleted when the run ends."""


class Trainer:
    """One run: its model, optimizers, data and logs, and its position in the data."""

    def __init__(
        self,
        data: Path,
        out: Path,
        config: TrainConfig,
        *,
        resume: bool = False,
        quiet: bool = False,
        processes: Processes = SINGLE_PROCESS,
        rank_log: RankLog | None = None,
        callbacks: Callbacks | None = None,
    ):
        self.processes, self.rank_log = processes, rank_log
        self.callbacks = callbacks or Callbacks(())
        self.stopped_by: str | None = None
        """Reason of a callback to end the run; the same on all ranks."""
        self.device = pick_device(config.device.device) if processes.world_size == 1 else processes.device
        self.data = DataSet(data, "train", check=False)
        self.schema = self.data.schema
        self.plan: Plan | None = None
        config, methods = self._settle(config, out, resume)
        strategy = find_strategy(config, processes)
        self.out, self.config, self.quiet = out, config, quiet or processes.rank != 0
        keeps_best = config.evaluation.keep_best and not config.placement.kind.merges_tables
        in_batch = config.model.model_config().in_batch_negatives
        self.validation = Validation(
            data, self.schema, config.evaluation, keeps_best=keeps_best, has_probabilities=not in_batch
        )
        torch.manual_seed(config.seed)
        self.strategy = strategy(config, self.data, self.device, out / SCRATCH, self.plan, processes, methods)
        self.model, self.loader = self.strategy.model, self.strategy.loader
        self.num_steps = config.steps or config.epochs * self.loader.num_batches
        self.optimizers = Optimizers(self.model, config.optimizer_config())
        self.peak_bytes = count_table_bytes(self.model, self.optimizers.config.kind)
        self.table_sizes = table_sizes(self.model.bags, methods, processes)
        self.strategy.attach(self.optimizers)
        self._say(self.strategy.describe())
        self._say(describe_tables(methods, config.model.model_config().table_rows(self.schema)))
        self._say(str(self.peak_bytes))
        self.steps = TrainStep(config, self.strategy, self.optimizers, self._refuse_batch)
        self.checkpoints = RunCheckpoints(out, config.checkpoint, self.strategy, self.optimizers)
        self._interrupt = Interrupt()
        self.progress = SampleProgress(0, quiet=True)
        self.step = 0
        self.epoch = 0
        self.batch_in_epoch = 0
        self.samples = 0
        """Samples trained on, by all processes."""
        self.times = RunTimes()
        self.rows = RunRows(self.data_check, self.callbacks, rank_log)
        self.fingerprint: str | None = None
        """Fingerprint of the run, which its checkpoints have; None for a run of an earlier version."""
        self._open_log(data, methods, resumed=self._resume(data, resume))

    # --- the start ---------------------------------------------------------------------------------------------------

    def _settle(self, config: TrainConfig, out: Path, resume: bool) -> tuple[TrainConfig, Methods | None]:
        """Settings with everything chosen that was left open, and the method of each table.

        What can be refused is refused before any process waits for others, or writes to the run folder.
        """
        processes = self.processes
        if config.device.kernels == "triton":
            takes_triton("training", torch.empty(0, device=self.device), "triton")
        if config.placement.plan is None:
            find_strategy(config, processes)
        agree_on_run(config, self.schema, processes)
        check_own_model(config.model.model_config(), self.schema)
        self.data_check = DataCheck(self.data, processes)
        config = with_sample_order(config, self.data, out, self.device, resume=resume, processes=processes)
        config = with_optimizer(config, out, resume=resume, processes=processes)
        if config.placement.plan is not None:
            config, self.plan = follow(config, self.schema, out, resume=resume, processes=processes)
        methods = choose_methods(config, self.data, out, resume=resume, processes=processes)
        refuse_frozen_tables(methods)
        return config, methods

    def _open_log(self, data: Path, methods: Methods | None, *, resumed: bool) -> None:
        """Open the log of the run; a new one begins with what settings and data gave."""
        if self.rank_log is not None:
            size = self.processes.world_size
            self.rank_log.write(f"start at step {self.step} as rank {self.processes.rank} of {size}")
        found: dict[str, Any] = {"peak_bytes": self.peak_bytes.to_json(), TABLE_SIZES: self.table_sizes}
        if self.config.pretrained and self.checkpoints.full_step is None:
            found["pretrained"] = self._load_pretrained()
        if methods is not None and self.plan is None:
            found[TABLES] = methods_to_json(methods)
        resumed_at = self.step if resumed else None
        self.rows.log = open_run_log(self.out, data, self.schema, self.config, self.processes, found, resumed_at)
        if self.rows.log is not None:
            self.fingerprint = run_fingerprint(read_run(self.out))

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, interrupt: Interrupt | None = None) -> dict[str, Any]:
        """Train to the last step, or until early stopping; returns results and statistics of the run."""
        try:
            result = self._run(interrupt)
            self.callbacks.end(result)
            self.processes.on_rank_zero(self.callbacks.raise_failure)
        except BaseException as error:
            self.callbacks.fail(error)
            raise
        return result

    def _run(self, interrupt: Interrupt | None) -> dict[str, Any]:
        self._interrupt = self._interrupt if interrupt is None else interrupt
        self.times = RunTimes()
        self.rows.start(self.times, self.samples)
        first_step, first_sample = self.step, self.samples
        stopped_early = self.validation.should_stop  # a resumed run may have stopped before
        with (
            self.checkpoints.saver,
            self.rows.log or nullcontext(),
            closing(self.strategy),
            self.data_check.explained(),
            SampleProgress(self._expected_samples(), done=self.samples, quiet=self.quiet) as self.progress,
        ):
            self._keep_resumed_best()
            settings = {"data": str(self.data.folder), **self.config.to_json()}
            with self.times.apart("callbacks"):
                self.callbacks.call("on_start", self.out, settings, self.step, step=self.step)
            self._agree_on_stop()
            while self.step < self.num_steps and not stopped_early and self.stopped_by is None:
                for segment in self.strategy.segments(self.epoch, self.batch_in_epoch):
                    stopped_early = self._run_segment(segment)
                    if self.step >= self.num_steps or stopped_early or self.stopped_by is not None:
                        break
            if self.step > first_step or self.checkpoints.full_step != self.step:
                self.save()
            self.processes.on_rank_zero(self.callbacks.raise_failure)
        graph, seconds = self.steps.graph, max(self.times.training, 1e-9)
        return {
            "steps": self.step,
            "samples": self.samples,
            "trained_steps": self.step - first_step,
            "samples_per_second": (self.samples - first_sample) / seconds,
            **self.times.to_json(),
            "stopped_early": stopped_early,
            "stopped_by": self.stopped_by,
            **self.validation.summary(),
            "table_bytes": self.model.bags.num_bytes(),
            "tables": self.table_sizes,
            "peak_bytes": self.peak_bytes.to_json(),
            **self.strategy.measures(),
            **self._compare_with_plan(seconds / max(1, self.step - first_step)),
            **({} if graph is None else {"cuda_graph": graph.why_not or f"{graph.replays} steps"}),
        }

    def _expected_samples(self) -> int:
        """Samples of the whole run, over all processes."""
        epochs, rest = divmod(self.num_steps, self.loader.num_batches)
        num_samples = self.loader.num_samples
        return epochs * num_samples + min(rest * self.config.batch_size, num_samples)

    def _compare_with_plan(self, step_seconds: float) -> dict[str, Any]:
        """Predicted and measured seconds by stage, if the run followed a plan."""
        if self.plan is None:
            return {}
        folder = self.out if self.processes.rank == 0 else None
        measured = self.strategy.stages.means()
        return {"stages": compare_with_plan(self.plan, measured, self.rows.steady_seconds or step_seconds, folder)}

    def _run_segment(self, segment: Segment) -> bool:
        """Train on the batches of a segment; whether to stop early."""
        segment = replace(segment, batches=self.strategy.stages.drawn(segment.batches))
        with closing(self.strategy.on_device(segment, self.step)) as on_device:
            for number, (batch, moved) in enumerate(on_device, start=1):
                size = self._global_size(batch)
                loss = self.train_step(batch, moved)
                self.samples += size
                self.progress.update(size, loss)
                stopped_early = self._after_step(loss, segment.report_loss if number == segment.num_batches else None)
                if self.steps.stop_requested if self.processes.world_size > 1 else self._asks_to_stop():
                    self._agree_on_stop()
                    if self.stopped_by is not None:
                        return False
                    self.save()
                    cause = ", since torchrun has ended" if self._interrupt.lost_parent else ""
                    raise KeyboardInterrupt(f"stopped at step {self.step}{cause}; continue with --resume")
                if self.step >= self.num_steps or stopped_early:
                    return stopped_early
        return False

    def _asks_to_stop(self) -> bool:
        """Whether a signal or a callback of this rank asks the run to end."""
        return bool(self._interrupt) or self.callbacks.stop_reason is not None

    def _agree_on_stop(self) -> None:
        """Let all ranks know the reason of a callback to end the run, if there is one."""
        self.stopped_by = self.processes.on_rank_zero(lambda: self.callbacks.stop_reason)

    def train_step(self, batch: Batch, moved: Batch | None = None) -> float | None:
        """Update the model with a batch whose ids have been checked; `moved` is its copy on the device."""
        moved = batch.to(self.device, non_blocking=True) if moved is None else moved
        self.processes.position["step"] = self.step
        place = f"step {self.step} (epoch {self.epoch}, batch {self.batch_in_epoch})"
        return self.steps.run(self.step, place, batch, moved, self._global_size(batch), stop=self._asks_to_stop())

    def _global_size(self, batch: Batch) -> int:
        """Samples of the current batch, of all processes."""
        return len(batch) if self.processes.world_size == 1 else self.loader.global_size(self.batch_in_epoch)

    def _after_step(self, loss: float | None, report_loss: Callable[[float], None] | None = None) -> bool:
        """Count the step; log, evaluate and save if due. Whether to stop early.

        `report_loss` is called with the validation loss, which is measured for it.
        """
        self.step += 1
        self.batch_in_epoch += 1
        end_of_epoch = self.batch_in_epoch == self.loader.num_batches
        if end_of_epoch:
            self.epoch, self.batch_in_epoch = self.epoch + 1, 0
        self.rows.add_loss(loss or 0.0)
        last = self.step == self.num_steps
        logs = self.step % self.config.log_every == 0 or last
        if logs or self.steps.must_read:
            self._read_losses()
        if logs:
            self._log_training()
            self._tell_saved()
        stop = False
        if self.validation.split is not None:
            every = self.config.evaluation.evaluate_every
            due = end_of_epoch if every is None else self.step % every == 0
            if due or last or report_loss is not None:
                stop = self._evaluate(may_keep=due or last)
            if report_loss is not None:
                report_loss(self.validation.last["logloss"])
        if not last:
            self._save_if_due()
        return stop

    def _read_losses(self) -> None:
        self.rows.loss_sum += self.steps.read_losses()

    def _evaluate(self, *, may_keep: bool) -> bool:
        """Evaluate on the validation split; whether to stop early. `may_keep`: this may be the best model."""
        self._read_losses()
        with self.times.apart("evaluation"), self.progress.paused(), self.strategy.evaluation() as share:
            metrics = self.validation.measure(self.model, share)
        metrics = self.processes.on_rank_zero(lambda: metrics)  # all ranks decide by the same bits
        self.rows.write(self.step, "valid", epoch=self.epoch, **metrics)
        replaces_best = self.validation.has_best
        is_best = self.validation.record(metrics, self.step, may_keep=may_keep)
        self.progress.say(f"step {self.step:,}: {self.validation.describe_last()}")
        if is_best and (replaces_best or self.step < self.num_steps):  # else the last checkpoint is the best one, too
            self.save(BEST, keep=1, waits=False)
        return self.validation.should_stop

    def _keep_resumed_best(self) -> None:
        """Keep the model of a resumed run as the best, if it is, and goes on from there."""
        if self.step == self.validation.best_step and self.step < self.num_steps:
            kept = self.processes.on_rank_zero(lambda: checkpoint.newest(self.out / BEST) is not None)
            if not kept:
                self.save(BEST, keep=1)

    def _refuse_batch(self, batch: Batch, loss: float, place: str, done: str) -> None:
        """Save a batch whose loss is not finite, and raise."""
        path = self.out / BAD_BATCH_FILE
        if self.processes.world_size > 1:
            path = path.with_stem(f"{path.stem}-rank-{self.processes.rank}")
        save_batch(path, batch)
        raise NonFiniteLossError(
            f"the loss is {loss} at {place}: {done}, the batch is in {path}; lower --lr, set --clip-norm, or look for "
            f"extreme values in the batch"
        )

    # --- logs --------------------------------------------------------------------------------------------------------

    def _log_training(self) -> None:
        """Write a row for the steps since the last one."""
        lr = self.optimizers.config.lr * self.steps.schedule.factor(self.step - 1)
        measures = self.strategy.measures()
        self.rows.write_training(self.step, epoch=self.epoch, samples=self.samples, lr=lr, **measures)

    def _say(self, text: str | None) -> None:
        """Print a message once, and write it to the log of each rank."""
        if text is not None and not self.quiet:
            print(text, file=sys.stderr)
        if text is not None and self.rank_log is not None:
            self.rank_log.write(text)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        if _due(self.config.checkpoint.save_every, self.step):
            self.save(waits=False)
        elif _due(self.config.checkpoint.save_hot_every, self.step):
            self.save_hot()

    def save(self, folder: str = CHECKPOINTS, keep: int | None = None, *, waits: bool = True) -> Path:
        """Write a checkpoint of this step; without `waits`, it may be complete some steps later."""
        keep = keep or self.config.checkpoint.keep
        state = self._state()
        with self.times.apart("saving"), self.progress.paused():
            path = self.checkpoints.save(self.step, state, folder, keep, waits=waits)
        self.callbacks.saved(self.step, path)
        self._tell_saved()
        if self.processes.rank == 0:
            RunFolder(self.out).remove_replaced()
        return path

    def _tell_saved(self) -> None:
        with self.times.apart("callbacks"):
            self.callbacks.tell_saved()

    def save_hot(self) -> Path:
        """Write a checkpoint of hot rows and the dense part; a full one, if there is none to lay it over."""
        if self.checkpoints.full_step is None:
            return self.save(waits=False)
        state = self._state()
        with self.times.apart("saving"), self.progress.paused():
            return self.checkpoints.save_hot(self.step, state)

    def _state(self) -> dict[str, Any]:
        """State for a checkpoint besides its tensors, as JSON. Waits until the data files have been checked."""
        self._read_losses()
        self.data_check.passed(wait=True)
        self.rows.write_waiting()
        return {
            "step": self.step,
            "data": self.loader.state(self.epoch, self.batch_in_epoch),
            "loss": [self.rows.loss_sum, self.rows.loss_count],
            "samples": self.samples,
            **({} if self.fingerprint is None else {RUN: self.fingerprint}),
            **self.validation.state(),
        }

    def restore(self, path: Path) -> None:
        """Continue from a verified checkpoint of this run, and from newer hot rows if there are any."""
        state, hot = self.checkpoints.restore(path, self.fingerprint)
        if hot is not None:
            assert self.checkpoints.full_step is not None
            self._say(
                f"resuming from {hot.name}: rows that are not hot are those of {path.name}; what they learned in the "
                f"{state['step'] - self.checkpoints.full_step} steps between is lost"
            )
        position = self.loader.load_state(state["data"])
        self.step = self.optimizers.step_count = state["step"]
        self.epoch, self.batch_in_epoch = position.epoch, position.batch
        self.rows.loss_sum, self.rows.loss_count = state["loss"]
        self.samples = state.get("samples", position.epoch * self.loader.num_samples + position.sample)
        self.validation.load_state(state)

    def _load_pretrained(self) -> list[dict[str, object]]:
        """Start rows from the vectors of files; what was done, for `run.json`."""
        bags, tensors = self.model.bags, self.checkpoints.tensors()
        done = on_all_ranks(
            self.processes, lambda: load_pretrained(self.config.pretrained, self.data, bags, tensors, self.processes)
        )
        self.strategy.after_loading()
        for one in done:
            self._say(one.describe(self.schema.feature(one.feature).num_rows))
        return pretrained_json(done)

    def _resume(self, data: Path, resume: bool) -> bool:
        """Restore the newest complete checkpoint of the run folder, if there is one; whether a run is resumed at all.

        The `resume` of rank 0 decides.
        """
        resumes = self.processes.on_rank_zero(lambda: resume and (self.out / RUN_FILE).exists())
        path = checkpoint.latest_sound(self.out / CHECKPOINTS, self.processes) if resumes else None
        self.processes.agree({"the checkpoint to resume from": None if path is None else path.name})
        if resumes:
            refuse_other_settings(self.out, self.config)
            document, expected = read_run(self.out), Schema.load(self.out)
            refuse_other_parts(self.out, document, expected)
            refuse_other_data(self.schema, expected, data)
            refuse_other_rows(self.schema, expected, data, self.out)
            self.fingerprint = run_fingerprint(document)
            if path is not None:
                self.restore(path)
        return resumes


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
