"""The training loop: batches in, a run folder out, resumable at any checkpoint to the same loss curve."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdall import checkpoint
from holdall.checkpoint import HotPart
from holdall.checkpoint.protocols import TensorByRows
from holdall.common.device import pick_device
from holdall.common.errors import ConfigError, NonFiniteLossError
from holdall.common.files import write_json
from holdall.common.folder_lock import locked
from holdall.common.progress import SampleProgress
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.ranking_cases import ranking_path
from holdall.data.schema import Schema
from holdall.distributed.processes import SINGLE_PROCESS, Processes, RankLog, process_group
from holdall.evaluation.evaluate_model import evaluate_model, rank_model
from holdall.kernels.dispatch import kernel_path, takes_triton
from holdall.optim.optimizers import Optimizers
from holdall.planning.plan import Plan
from holdall.runtime.allocator import keep_freed_memory
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import BEST, CHECKPOINTS, refuse_other_data
from holdall.training.follow_plan import compared, follow
from holdall.training.interrupt import Interrupt, deferred_interrupts
from holdall.training.resume import refuse_other_settings
from holdall.training.start import agree_on_run, make_run_folder
from holdall.training.step import TrainStep
from holdall.training.strategies.base import Segment
from holdall.training.strategies.registry import find_strategy
from holdall.training.tracking import BAD_BATCH_FILE, RunLog, save_batch

STAGES_FILE = "stages.json"
"""What a plan predicted of a step and what was measured, in the run folder."""
SCRATCH = "tiers"
"""Folder of a run that holds the rows of tables on disk, until the run ends."""
ECHO_SECONDS = 5.0
"""Of several processes: signals so soon after the first are that one, passed on by torchrun."""


def train(
    data: str | Path,
    out: str | Path,
    config: TrainConfig | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train a model on a prepared data set and leave a run folder at `out`; returns what the run came to.

    With `resume`, go on from the newest complete checkpoint of `out` (or start, when there is none). Ctrl-C finishes
    the step, saves a checkpoint and raises KeyboardInterrupt. Under torchrun every process calls this, and all return
    the same.
    """
    config, out = config or TrainConfig(), Path(out)
    keep_freed_memory()
    if config.device.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses matrix products on a GPU
        torch.use_deterministic_algorithms(True)
    try:
        # Signals are held for longer than processes are joined: when this one has let go of the others, they end, and
        # torchrun would end this one before it has said why.
        with (
            ExitStack() as signals,
            process_group(pick_device(config.device.device), config.processes.timeout) as processes,
        ):
            several = processes.world_size > 1
            interrupt = signals.enter_context(deferred_interrupts(ECHO_SECONDS if several else 0.0))
            with (
                make_run_folder(out, processes, resume=resume, overwrite=overwrite) as notes,
                kernel_path(config.device.kernels),
            ):
                trainer = Trainer(Path(data), out, config, resume=resume, quiet=quiet, processes=processes, notes=notes)
                with locked(out) if processes.rank == 0 else nullcontext():
                    return trainer.run(interrupt)
    finally:
        if config.device.deterministic:
            torch.use_deterministic_algorithms(False)


class Trainer:
    """One run: its model, optimizers, data and log, and where it stands."""

    def __init__(
        self,
        data: Path,
        out: Path,
        config: TrainConfig,
        *,
        resume: bool = False,
        quiet: bool = False,
        processes: Processes = SINGLE_PROCESS,
        notes: RankLog | None = None,
    ):
        self.processes, self.notes = processes, notes
        self.device = pick_device(config.device.device) if processes.world_size == 1 else processes.device
        self.data = DataSet(data, "train")
        self.schema = self.data.schema
        if config.device.kernels == "triton":  # before there is anything in the run folder
            takes_triton("training", torch.empty(0, device=self.device), "triton")
        if config.placement.plan is None:
            find_strategy(config, processes)  # before anyone waits for others
        agree_on_run(config, self.schema, processes)
        self.plan: Plan | None = None
        if config.placement.plan is not None:
            config, self.plan = follow(config, self.schema, out, resume=resume, processes=processes)
        strategy = find_strategy(config, processes)
        self.out, self.config, self.quiet = out, config, quiet or processes.rank != 0
        self.valid = DataSet(data, "valid") if _has_rows(self.schema, "valid") else None
        if config.evaluation.early_stopping is not None and self.valid is None:
            raise ConfigError(f"--early-stopping needs a validation split, {data} has none: prepare with --valid 0.1")
        self.ranks = self.valid is not None and config.evaluation.rank_at > 0 and ranking_path(data, "valid").exists()
        self.best_by = self._metric_of_the_best(data)
        torch.manual_seed(config.seed)
        self.strategy = strategy(config, self.data, self.device, out / SCRATCH, self.plan, processes)
        self.model, self.loader = self.strategy.model, self.strategy.loader
        self.num_steps = config.steps or config.epochs * self.loader.num_batches
        self.optimizers = Optimizers(self.model, config.optimizer_config())
        self.strategy.attach(self.optimizers)
        self._say(self.strategy.describe())
        self.steps = TrainStep(config, self.strategy, self.optimizers, self._refuse_batch)
        self._interrupt = Interrupt()
        self.step = 0
        self.epoch = 0
        self.batch_in_epoch = 0
        self.loss_sum, self.loss_count = 0.0, 0
        self.best, self.evaluations_without_gain = -math.inf, 0
        """What `best_by` was at its best, its sign turned for logloss so that more is better."""
        self.last_evaluation: dict[str, float] = {}
        self._steady_seconds: float | None = None
        """Seconds a step between the last two lines of the log: without the start, evaluations and checkpoints."""
        self._saver = checkpoint.BackgroundSaver(processes)
        self._full_step: int | None = None
        """Of the newest full checkpoint, which hot rows are laid over."""
        self.log = self._open_log(data, resume)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, interrupt: Interrupt | None = None) -> dict[str, Any]:
        self._interrupt = self._interrupt if interrupt is None else interrupt
        self._logged_at = started = time.perf_counter()
        first_step = self.step
        total = self.num_steps * self.config.batch_size
        done = self.step * self.config.batch_size
        stopped_early = False
        with (
            self._saver,
            self.log or nullcontext(),
            closing(self.strategy),
            SampleProgress(total, done=done, quiet=self.quiet) as progress,
        ):
            while self.step < self.num_steps and not stopped_early:
                for segment in self.strategy.segments(self.epoch, self.batch_in_epoch):
                    stopped_early = self._run_segment(segment, progress)
                    if self.step >= self.num_steps or stopped_early:
                        break
            self.save()
        seconds, graph = time.perf_counter() - started, self.steps.graph
        return {
            "steps": self.step,
            "samples_per_second": (self.step - first_step) * self.config.batch_size / max(seconds, 1e-9),
            "seconds": seconds,
            "stopped_early": stopped_early,
            "valid": self.last_evaluation or None,
            "table_bytes": self.model.bags.num_bytes(),
            **self.strategy.measures(),
            **self._compared_with_plan(seconds / max(1, self.step - first_step)),
            **({} if graph is None else {"cuda_graph": graph.why_not or f"{graph.replays} steps"}),
        }

    def _compared_with_plan(self, step_seconds: float) -> dict[str, Any]:
        """Predicted and measured seconds by stage, where the run followed a plan; the run folder keeps them."""
        if self.plan is None:
            return {}
        measured = self.strategy.stages.means()
        measured["dense"] = measured.get("dense", 0.0) + measured.pop("backward", 0.0)  # one stage of a plan
        found = {"stages": compared(self.plan, measured, self._steady_seconds or step_seconds)}
        if self.processes.rank == 0:
            write_json(self.out / STAGES_FILE, {"format": "holdall-stages", "version": 1, **found})
        return found

    def _run_segment(self, segment: Segment, progress: SampleProgress) -> bool:
        """Train on the batches of a segment; whether to stop early."""
        segment = replace(segment, batches=self.strategy.stages.drawn(segment.batches))
        with closing(self.strategy.on_device(segment, self.step)) as on_device:
            for number, (batch, moved) in enumerate(on_device, start=1):
                size = self._global_size(batch)
                loss = self.train_step(batch, moved)
                progress.update(size, loss)
                stopped_early = self._after_step(loss, segment.report_loss if number == segment.num_batches else None)
                if self.steps.stop_asked if self.processes.world_size > 1 else self._interrupt:
                    self.save()
                    raise KeyboardInterrupt(f"stopped at step {self.step}; go on with --resume")
                if self.step >= self.num_steps or stopped_early:
                    return stopped_early
        return False

    def train_step(self, batch: Batch, moved: Batch | None = None) -> float | None:
        """One update with a batch whose ids have been checked; `moved` is its copy on the device (see `Step.run`)."""
        moved = batch.to(self.device, non_blocking=True) if moved is None else moved
        self.processes.position["step"] = self.step
        place = f"step {self.step} (epoch {self.epoch}, batch {self.batch_in_epoch})"
        return self.steps.run(self.step, place, batch, moved, self._global_size(batch), stop=bool(self._interrupt))

    def _global_size(self, batch: Batch) -> int:
        """Samples of the batch under way, of all processes."""
        return len(batch) if self.processes.world_size == 1 else self.loader.global_size(self.batch_in_epoch)

    def _after_step(self, loss: float | None, report_loss: Callable[[float], None] | None = None) -> bool:
        """Count the step; log, evaluate and save where they are due. Whether to stop early.

        `report_loss` is called with the validation loss, which is measured for it.
        """
        self.step += 1
        self.batch_in_epoch += 1
        end_of_epoch = self.batch_in_epoch == self.loader.num_batches
        if end_of_epoch:
            self.epoch, self.batch_in_epoch = self.epoch + 1, 0
        self.loss_sum, self.loss_count = self.loss_sum + (loss or 0.0), self.loss_count + 1
        last = self.step == self.num_steps
        logs = self.step % self.config.log_every == 0 or last
        if logs or self.steps.must_read:
            self._read_losses()
        if logs:
            measures: dict[str, Any] = {**self.strategy.measures()}
            self._write(
                epoch=self.epoch,
                samples=self.step * self.config.batch_size,
                loss=self.loss_sum / self.loss_count,
                lr=self.config.optimizer.lr * self.steps.schedule.factor(self.step - 1),
                samples_per_second=self.loss_count * self.config.batch_size / (time.perf_counter() - self._logged_at),
                **measures,
            )
            self._steady_seconds = (time.perf_counter() - self._logged_at) / self.loss_count
            self.loss_sum, self.loss_count, self._logged_at = 0.0, 0, time.perf_counter()
        every = self.config.evaluation.evaluate_every
        due = end_of_epoch if every is None else self.step % every == 0
        stop = self._evaluate() if self.valid is not None and (due or last or report_loss) else False
        if self.valid is not None and report_loss is not None:
            report_loss(self.last_evaluation["logloss"])
        if not last and _due(self.config.checkpoint.save_every, self.step):
            self.save(waits=False)
        elif not last and _due(self.config.checkpoint.save_hot_every, self.step):
            self.save_hot()
        return stop

    def _read_losses(self) -> None:
        self.loss_sum += self.steps.read_losses()

    def _evaluate(self) -> bool:
        """Evaluate on the validation split; whether to stop early."""
        assert self.valid is not None
        self._read_losses()
        with self.strategy.evaluation() as share:
            metrics = evaluate_model(self.model, self.valid, allow_one_class=True, part=share)
            if self.ranks:
                metrics.update(rank_model(self.model, self.valid, self.config.evaluation.rank_at, share))
        metrics = self.processes.first(lambda: metrics)  # so that all decide by the same bits
        self.last_evaluation = metrics
        self._write(split="valid", epoch=self.epoch, **metrics)
        if self.config.evaluation.early_stopping is None:
            return False
        found = -metrics[self.best_by] if self.best_by == "logloss" else metrics[self.best_by]
        if found > self.best:
            self.best, self.evaluations_without_gain = found, 0
            self.save(BEST, keep=1, waits=False)
            return False
        self.evaluations_without_gain += 1
        return self.evaluations_without_gain >= self.config.evaluation.early_stopping

    def _metric_of_the_best(self, data: Path) -> str:
        """The name, among those of an evaluation, of what makes a model the best."""
        k, chosen = self.config.evaluation.rank_at, self.config.evaluation.best_by
        if chosen == "auto":
            chosen = "ndcg" if self.ranks else "logloss"
        if chosen in ("ndcg", "hr") and not self.ranks:
            raise ConfigError(
                f"--best-by {chosen} needs ranking cases for the validation split, and {data} has none: they are "
                f"written for implicit data sets prepared with --valid"
            )
        if chosen == "auc" and self.valid is not None:
            positives, rows = self.schema.splits["valid"].positives, len(self.valid)
            if positives in (0, rows):
                raise ConfigError(f"--best-by auc needs both labels in the validation split, {data} has one there")
        return f"{chosen}@{k}" if chosen in ("ndcg", "hr") else chosen

    def _refuse_batch(self, batch: Batch, loss: float, place: str, done: str) -> None:
        path = self.out / BAD_BATCH_FILE
        if self.processes.world_size > 1:
            path = path.with_stem(f"{path.stem}-rank-{self.processes.rank}")
        save_batch(path, batch)
        raise NonFiniteLossError(
            f"the loss is {loss} at {place}: {done}, the batch is in {path}; lower --lr, set --clip-norm, or look for "
            f"extreme values in the batch"
        )

    def _write(self, split: str = "train", **values: Any) -> None:
        """A row of the log of the run, which rank 0 keeps, and of each rank's own."""
        if self.log is not None:
            self.log.write(self.step, split, **values)
        if self.notes is not None:
            told = "loss" if split == "train" else "logloss"
            self.notes.write(f"step {self.step}: {split} {told} {values[told]:.6g}")

    def _say(self, text: str | None) -> None:
        """To people, once, and to each rank's log."""
        if text is not None and not self.quiet:
            print(text, file=sys.stderr)
        if text is not None and self.notes is not None:
            self.notes.write(text)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor | TensorByRows]:
        """All that changes in training, by name: what a checkpoint holds."""
        found: dict[str, Tensor | TensorByRows] = {
            f"model.{name}": tensor for name, tensor in self.model.state_dict().items()
        }
        found.update({f"optimizer.{name}": tensor for name, tensor in self.optimizers.tensors().items()})
        found.update(self.strategy.checkpoint_tensors())
        return found

    def save(self, folder: str = CHECKPOINTS, keep: int | None = None, *, waits: bool = True) -> Path:
        """Write a checkpoint of this step; without `waits`, it may be complete some steps later."""
        state, where, keep = self._state(), self.out / folder, keep or self.config.checkpoint.keep
        with self.strategy.ready_to_save():
            path = self._saver.save(where, self.step, self._saved(), state, keep=keep)
        if folder == CHECKPOINTS:
            self._full_step = self.step
        if waits or not self.config.checkpoint.save_in_background:
            self._saver.wait()
        return path

    def save_hot(self) -> Path:
        """Write hot rows and the dense part as they are now, to be laid over the last full checkpoint."""
        if self._full_step is None:
            return self.save(waits=False)
        state, where = self._state(), self.out / CHECKPOINTS
        with self.strategy.ready_to_save():
            tensors = hot_parts(self._saved(), self.strategy.hot_row_ids())
            return self._saver.save_hot(where, self.step, tensors, state, base=self._full_step)

    def _saved(self) -> dict[str, Tensor | TensorByRows]:
        """`tensors`, and rank 0's random state."""
        return {**self.tensors(), **({"rng": torch.get_rng_state()} if self.processes.rank == 0 else {})}

    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides tensors."""
        self._read_losses()
        return {
            "step": self.step,
            "data": self.loader.state(self.epoch, self.batch_in_epoch),
            "loss": [self.loss_sum, self.loss_count],
            "best": None if math.isinf(self.best) else self.best,
            "evaluations_without_gain": self.evaluations_without_gain,
            "last_evaluation": {k: None if math.isnan(v) else v for k, v in self.last_evaluation.items()},
        }

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint of this run, whose shards have been verified, and from newer hot rows if any."""
        rng = torch.get_rng_state()
        tensors = {**self.tensors(), "rng": rng}
        state = checkpoint.load_into(path, tensors, verify=False, processes=self.processes)
        self._full_step = state["step"]
        hot = checkpoint.latest_hot(path.parent, self._full_step, self.processes)
        if hot is not None:
            state = checkpoint.load_hot_into(hot, tensors, verify=False, processes=self.processes)
            self._say(
                f"going on from {hot.name}: rows that are not hot are those of {path.name}, what they learned in the "
                f"{state['step'] - self._full_step} steps between is lost"
            )
        self.strategy.after_loading()
        torch.set_rng_state(rng)
        position = self.loader.load_state(state["data"])
        self.step = self.optimizers.step_count = state["step"]
        self.epoch, self.batch_in_epoch = position.epoch, position.batch
        self.loss_sum, self.loss_count = state["loss"]
        self.best = -math.inf if state["best"] is None else state["best"]
        self.evaluations_without_gain = state["evaluations_without_gain"]
        self.last_evaluation = {k: math.nan if v is None else v for k, v in state["last_evaluation"].items()}

    def _open_log(self, data: Path, resume: bool) -> RunLog | None:
        """Start the run folder, or go on with the one that is there; the log is rank 0's alone."""
        going_on = self.processes.first(lambda: resume and (self.out / "run.json").exists())
        path = checkpoint.latest_sound(self.out / CHECKPOINTS, self.processes) if going_on else None
        self.processes.agree({"the checkpoint to go on from": None if path is None else path.name})
        if going_on:
            refuse_other_settings(self.out, self.config)
            refuse_other_data(self.schema, Schema.load(self.out), data)
            if path is not None:
                self.restore(path)
        if self.notes is not None:
            self.notes.write(f"start at step {self.step} as rank {self.processes.rank} of {self.processes.world_size}")
        opened: list[RunLog] = []

        def open_log() -> None:
            if going_on:
                opened.append(RunLog.resume(self.out, self.step))
                return
            self.out.mkdir(parents=True, exist_ok=True)
            self.schema.save(self.out)
            opened.append(RunLog.create(self.out, {"data": str(data.resolve()), "train": self.config.to_json()}))

        self.processes.first(open_log)  # the others wait: their first step would not wait as long
        return opened[0] if opened else None


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def hot_parts(
    tensors: Mapping[str, Tensor | TensorByRows], hot_ids: Mapping[str, Tensor]
) -> dict[str, Tensor | TensorByRows | HotPart]:
    """Of the tensors of a checkpoint, what is saved more often: of tables that have hot rows those, and their state."""
    chosen: dict[str, Tensor | TensorByRows | HotPart] = {}
    for name, tensor in tensors.items():
        tables = [t for t in hot_ids if name == f"model.bags.{t}" or name.startswith(f"optimizer.rows.bags.{t}.")]
        chosen[name] = HotPart(tensor, hot_ids[tables[0]]) if tables else tensor
    return chosen


def _has_rows(schema: Any, split: str) -> bool:
    return split in schema.splits and schema.splits[split].rows > 0
