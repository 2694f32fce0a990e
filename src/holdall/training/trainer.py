"""The training loop: batches in, a run folder out, resumable at any checkpoint to the same loss curve."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.negatives import training_loader
from holdall.errors import CheckpointError, ConfigError, NonFiniteLossError
from holdall.files import refuse_existing
from holdall.training import checkpoint
from holdall.training.config import TrainConfig
from holdall.training.copy_ahead import copied_ahead
from holdall.training.evaluation import BEST, CHECKPOINTS, evaluate_model, pick_device
from holdall.training.interrupt import Interrupt, held_interrupts
from holdall.training.memory import keep_freed_memory
from holdall.training.optimizers import Optimizers
from holdall.training.tracking import BAD_BATCH_FILE, Progress, RunLog, read_run, save_batch

UNREAD_LOSSES = 64
"""Steps on a GPU whose losses may wait there, and whose batches are kept, until they are read."""


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
    the step, saves a checkpoint and raises KeyboardInterrupt.
    """
    config, out = config or TrainConfig(), Path(out)
    if not resume:
        refuse_existing(out, overwrite=overwrite, what="run folder")
    keep_freed_memory()
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        with held_interrupts() as interrupt:
            return Trainer(Path(data), out, config, resume=resume, quiet=quiet).run(interrupt)
    finally:
        if config.deterministic:
            torch.use_deterministic_algorithms(False)


def logloss(logits: Tensor, label: Tensor) -> Tensor:
    """Mean of -log p(label) over a batch, computed from logits in float32."""
    return F.binary_cross_entropy_with_logits(logits.float(), label)


class Trainer:
    """One run: its model, optimizers, data and log, and where it stands."""

    def __init__(self, data: Path, out: Path, config: TrainConfig, *, resume: bool = False, quiet: bool = False):
        self.out, self.config, self.quiet = out, config, quiet
        self.device = pick_device(config.device)
        self.data = DataSet(data, "train")
        self.schema = self.data.schema
        self.valid = DataSet(data, "valid") if _has_rows(self.schema, "valid") else None
        if config.early_stopping is not None and self.valid is None:
            raise ConfigError(f"--early-stopping needs a validation split, {data} has none: prepare with --valid 0.1")
        self.loader = training_loader(
            self.data,
            config.batch_size,
            num_negatives=config.negatives,
            shuffle=config.shuffle,
            seed=config.seed,
        )
        self.num_steps = config.steps or config.epochs * self.loader.num_batches
        torch.manual_seed(config.seed)
        self.model = config.build_model(self.schema, device=self.device)
        self.optimizers = Optimizers(self.model, config.optimizer_config())
        self.schedule = config.schedule()
        self._score = torch.compile(self.model.score) if config.compile else self.model.score
        self.step = 0
        self.epoch = 0
        self.batch_in_epoch = 0
        self.loss_sum, self.loss_count = 0.0, 0
        self.reads_losses_later = self.device.type != "cpu"
        self._unread: list[tuple[str, Batch, Tensor]] = []
        """Place, batch and loss of steps whose loss has not been read back from the device."""
        self.best_logloss, self.evaluations_without_gain = math.inf, 0
        self.last_evaluation: dict[str, float] = {}
        self.log = self._open_log(data, resume)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, interrupt: Interrupt | None = None) -> dict[str, Any]:
        interrupt = Interrupt() if interrupt is None else interrupt
        self._logged_at = started = time.perf_counter()
        first_step = self.step
        total = self.num_steps * self.config.batch_size
        done = self.step * self.config.batch_size
        stopped_early = False
        with self.log, Progress(total, done=done, quiet=self.quiet) as progress:
            while self.step < self.num_steps and not stopped_early:
                batches = self.loader.epoch(self.epoch, self.batch_in_epoch)
                for batch, moved in copied_ahead(batches, self.device, lambda batch: self.model.check(batch.ids)):
                    loss = self.train_step(batch, moved)
                    progress.update(len(batch), loss)
                    stopped_early = self._after_step(loss)
                    if interrupt:
                        self.save()
                        raise KeyboardInterrupt(f"stopped at step {self.step}; go on with --resume")
                    if self.step >= self.num_steps or stopped_early:
                        break
            self.save()
        seconds = time.perf_counter() - started
        return {
            "steps": self.step,
            "samples_per_second": (self.step - first_step) * self.config.batch_size / max(seconds, 1e-9),
            "seconds": seconds,
            "stopped_early": stopped_early,
            "valid": self.last_evaluation or None,
            "table_bytes": self.model.bags.num_bytes(),
        }

    def train_step(self, batch: Batch, moved: Batch | None = None) -> float | None:
        """One update with a batch whose ids have been checked; `moved` is its copy on the device.

        Returns the batch's loss; one that is not finite stops the run before anything is updated. On a GPU that would
        wait for the device in every step: there the loss is read some steps later (see `_read_losses`), None for now.
        """
        moved = batch.to(self.device, non_blocking=True) if moved is None else moved
        loss = self.loss(moved)
        place = f"step {self.step} (epoch {self.epoch}, batch {self.batch_in_epoch})"
        value = None
        if self.reads_losses_later:
            self._unread.append((place, batch, loss.detach()))
        else:
            value = float(loss.detach())
            if not math.isfinite(value):
                self._refuse_batch(batch, value, place, "nothing was updated")
        loss.backward()
        if self.config.clip_norm is not None:
            self.optimizers.clip(self.config.clip_norm)
        self.optimizers.set_factor(self.schedule.factor(self.step))
        self.optimizers.step()
        return value

    def loss(self, batch: Batch) -> Tensor:
        """Mean logloss of a batch."""
        kind, bf16 = self.device.type, self.config.precision == "bf16"
        # On a GPU dense tables hand their float32 rows over in bf16; a CPU's kernels would make a second copy of them.
        with torch.autocast(kind, torch.bfloat16) if bf16 and kind == "cuda" else nullcontext():
            looked_up = self.model.lookup(batch)
        with torch.autocast(kind, torch.bfloat16) if bf16 else nullcontext():
            logits = self._score(batch.dense, looked_up)
        return logloss(logits, batch.label)

    def _read_losses(self) -> None:
        """Read the losses that are still on the device; one that is not finite stops the run."""
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        values = torch.stack([loss for _, _, loss in unread]).tolist()
        for (place, batch, _), value in zip(unread, values, strict=True):
            if not math.isfinite(value):
                self._refuse_batch(batch, value, place, "the model was updated with it, its checkpoints were not")
            self.loss_sum += value

    def _after_step(self, loss: float | None) -> bool:
        """Count the step; log, evaluate and save where they are due. Whether to stop early."""
        self.step += 1
        self.batch_in_epoch += 1
        end_of_epoch = self.batch_in_epoch == self.loader.num_batches
        if end_of_epoch:
            self.epoch, self.batch_in_epoch = self.epoch + 1, 0
        self.loss_sum, self.loss_count = self.loss_sum + (loss or 0.0), self.loss_count + 1
        last = self.step == self.num_steps
        logs = self.step % self.config.log_every == 0 or last
        if logs or len(self._unread) >= UNREAD_LOSSES:
            self._read_losses()
        if logs:
            self.log.write(
                self.step,
                epoch=self.epoch,
                samples=self.step * self.config.batch_size,
                loss=self.loss_sum / self.loss_count,
                lr=self.config.lr * self.schedule.factor(self.step - 1),
                samples_per_second=self.loss_count * self.config.batch_size / (time.perf_counter() - self._logged_at),
            )
            self.loss_sum, self.loss_count, self._logged_at = 0.0, 0, time.perf_counter()
        every = self.config.evaluate_every
        due = end_of_epoch if every is None else self.step % every == 0
        stop = self._evaluate() if self.valid is not None and (due or last) else False
        if self.config.save_every is not None and self.step % self.config.save_every == 0 and not last:
            self.save()
        return stop

    def _evaluate(self) -> bool:
        """Evaluate on the validation split; whether to stop early."""
        assert self.valid is not None
        self._read_losses()
        metrics = evaluate_model(self.model, self.valid, allow_one_class=True)
        self.last_evaluation = metrics
        self.log.write(self.step, split="valid", epoch=self.epoch, **metrics)
        if self.config.early_stopping is None:
            return False
        if metrics["logloss"] < self.best_logloss:
            self.best_logloss, self.evaluations_without_gain = metrics["logloss"], 0
            self.save(BEST, keep=1)
            return False
        self.evaluations_without_gain += 1
        return self.evaluations_without_gain >= self.config.early_stopping

    def _refuse_batch(self, batch: Batch, loss: float, place: str, done: str) -> None:
        path = self.out / BAD_BATCH_FILE
        save_batch(path, batch)
        raise NonFiniteLossError(
            f"the loss is {loss} at {place}: {done}, the batch is in {path}; lower --lr, set --clip-norm, or look for "
            f"extreme values in the batch"
        )

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """All that changes in training, by name: what a checkpoint holds."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        found.update({f"optimizer.{name}": tensor for name, tensor in self.optimizers.tensors().items()})
        return found

    def save(self, folder: str = CHECKPOINTS, keep: int | None = None) -> Path:
        """Write a checkpoint of this step."""
        self._read_losses()
        state = {
            "step": self.step,
            "data": self.loader.state(self.epoch, self.batch_in_epoch),
            "loss": [self.loss_sum, self.loss_count],
            "best_logloss": None if math.isinf(self.best_logloss) else self.best_logloss,
            "evaluations_without_gain": self.evaluations_without_gain,
            "last_evaluation": {k: None if math.isnan(v) else v for k, v in self.last_evaluation.items()},
        }
        tensors = {**self.tensors(), "rng": torch.get_rng_state()}
        return checkpoint.save(self.out / folder, self.step, tensors, state, keep=keep or self.config.keep)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint of this run."""
        rng = torch.get_rng_state()
        state = checkpoint.load_into(path, {**self.tensors(), "rng": rng})
        torch.set_rng_state(rng)
        position = self.loader.load_state(state["data"])
        self.step = self.optimizers.step_count = state["step"]
        self.epoch, self.batch_in_epoch = position.epoch, position.batch
        self.loss_sum, self.loss_count = state["loss"]
        self.best_logloss = math.inf if state["best_logloss"] is None else state["best_logloss"]
        self.evaluations_without_gain = state["evaluations_without_gain"]
        self.last_evaluation = {k: math.nan if v is None else v for k, v in state["last_evaluation"].items()}

    def _open_log(self, data: Path, resume: bool) -> RunLog:
        """Start the run folder, or go on with the one that is there."""
        if resume and (self.out / "run.json").exists():
            self._refuse_other_settings()
            path = checkpoint.latest(self.out / CHECKPOINTS)
            if path is not None:
                self.restore(path)
            return RunLog.resume(self.out, self.step)
        self.out.mkdir(parents=True, exist_ok=True)
        self.schema.save(self.out)
        return RunLog.create(self.out, {"data": str(data.resolve()), "train": self.config.to_json()})

    def _refuse_other_settings(self) -> None:
        """A resumed run must be told what it was told before, but for how long to go on and what to write."""
        before = TrainConfig.from_json(read_run(self.out)["config"]["train"]).to_json()
        free = {"epochs", "steps", "save_every", "keep", "log_every", "device"}
        for name, value in self.config.to_json().items():
            old = before[name]
            if name not in free and old != value:
                raise CheckpointError(
                    f"{self.out} was trained with {name}={old!r} and is asked to resume with {name}={value!r}: "
                    f"pass the same settings, or start a new run"
                )


def _has_rows(schema: Any, split: str) -> bool:
    return split in schema.splits and schema.splits[split].rows > 0
