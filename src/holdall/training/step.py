"""One training step: the loss of a batch, its gradients, and the update.

A step runs in one process, as a CUDA graph, or synchronously with other processes. A loss that is not finite stops the
run before anything is updated. On a GPU that check would wait for the device in every step, so losses are read there
in groups, some steps later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch
from holdall.distributed.processes import PeerError
from holdall.models.loss import squared_length
from holdall.optim.optimizers import Optimizers
from holdall.runtime.captured_step import CapturedStep
from holdall.training.config import TrainConfig
from holdall.training.interrupt import Interrupt
from holdall.training.strategies.base import Strategy
from holdall.training.strategies.gradient_exchange import GradientExchange

UNREAD_LOSSES = 64
"""Most steps on a GPU whose losses have not been read; their batches are kept until then."""


class TrainStep:
    """Training steps of a run, on batches whose ids have been checked.

    `refuse(batch, loss, place, done)` raises the error of a loss that is not finite, on the rank that had the batch.
    """

    def __init__(
        self,
        config: TrainConfig,
        strategy: Strategy,
        optimizers: Optimizers,
        refuse: Callable[[Batch, float, str, str], None],
    ):
        self.config, self.strategy, self.optimizers = config, strategy, optimizers
        self.processes, self.device = strategy.processes, strategy.device
        self.schedule = config.schedule.build()
        self.stop_requested = Interrupt()
        """Set on all ranks in the same step, after one of them got a signal to stop."""
        self._refuse = refuse
        outputs = strategy.model.training_outputs
        self._outputs = torch.compile(outputs) if config.device.compile else outputs
        self.graph = self._make_graph()
        self.reads_losses_later = self.device.type != "cpu"
        self._unread: list[tuple[str, Batch, Tensor]] = []
        """Place, batch and loss of the steps whose loss has not been read from the device."""

    # --- the step ----------------------------------------------------------------------------------------------------

    def run(self, step: int, place: str, batch: Batch, moved: Batch, num_samples: int, *, stop: bool) -> float | None:
        """Update the model with a batch; `moved` is its copy on the device, `num_samples` the size of the global batch.

        Returns the loss of the global batch; None where it is read later. `stop` requests the end of the run on all
        ranks. `place` names the step in errors.
        """
        if self.graph is not None and self.strategy.is_capturable and self._takes_graph(moved):
            self.strategy.stages.pause()
            self.optimizers.set_factor(self.schedule.factor(step))
            self._unread.append((place, batch, self.graph.step(moved)))
            self.strategy.after_step(step + 1)
            return None
        self.strategy.stages.begin_step(step)
        if self.strategy.exchange is None:
            value = self._backward(place, batch, moved)
        else:
            value = self._backward_and_exchange(self.strategy.exchange, step, place, batch, moved, num_samples, stop)
        self._update(step)
        return value

    def _backward(self, place: str, batch: Batch, moved: Batch) -> float | None:
        loss = self.loss(batch, moved)
        value = None
        if self.reads_losses_later:
            self._unread.append((place, batch, loss.detach()))
        else:
            value = float(loss.detach())
            if not math.isfinite(value):
                self._refuse(batch, value, place, "nothing was updated")
        with self.strategy.stages.stage("backward"):
            loss.backward()
        return value

    def _backward_and_exchange(
        self,
        exchange: GradientExchange,
        step: int,
        place: str,
        batch: Batch,
        moved: Batch,
        num_samples: int,
        stop: bool,
    ) -> float | None:
        """Leave the gradients of the global batch in place; returns its loss.

        A rank's share of that loss is the mean over its own samples, times their share of all samples.
        """
        share = len(batch) / num_samples
        loss = self.loss(batch, moved) * share if len(batch) else self._loss_of_no_samples(moved)
        exchange.begin(step, len(batch), loss.detach(), stop)
        with self.strategy.stages.stage("backward"):
            if loss.requires_grad:
                loss.backward()
        with self.strategy.stages.stage("exchange"):
            signals = exchange.finish()
        if not self.reads_losses_later:
            return self._read_signals(signals.tolist(), batch, place, "nothing was updated")
        self._unread.append((place, batch, signals))
        return None

    def _update(self, step: int) -> None:
        """Apply the gradients of the step."""
        with self.strategy.stages.stage("update"):
            clip_norm, exchange = self.config.optimizer.clip_norm, self.strategy.exchange
            if clip_norm is not None:
                self.optimizers.clip(clip_norm, None if exchange is None else exchange.squared_norm)
            self.optimizers.set_factor(self.schedule.factor(step))
            self.optimizers.step()
        self.strategy.after_step(step + 1)

    def loss(self, batch: Batch, moved: Batch) -> Tensor:
        """Mean loss of a batch, plus the penalty on the vectors it looks up; `moved` is on the device."""
        kind, bf16 = self.device.type, self.config.device.precision == "bf16"
        # On a GPU the lookup of dense tables writes bf16 vectors; the kernels of a CPU would make a second copy.
        with _bf16(kind, bf16 and kind == "cuda"), self.strategy.stages.stage("lookup"):
            looked_up = self.strategy.lookup(batch, moved)
        with _bf16(kind, bf16), self.strategy.stages.stage("dense"):
            outputs = self._outputs(moved.dense, looked_up)
        loss = self.strategy.model.training_loss(outputs, moved, self.strategy.gather)
        l2 = self.config.optimizer.l2
        return loss + l2 * squared_length(looked_up) / len(moved) if l2 else loss

    def _loss_of_no_samples(self, moved: Batch) -> Tensor:
        """0; with `gather`, a loss whose gradients take part in the collectives of the other ranks."""
        model, gather = self.strategy.model, self.strategy.gather
        if gather is None:
            return torch.zeros((), device=self.device)
        vectors = torch.zeros(0, model.bags.num_features, model.bags.dim, device=self.device)
        return model.training_loss(model.training_outputs(moved.dense, vectors), moved, gather)

    # --- losses that are read later ----------------------------------------------------------------------------------

    @property
    def must_read(self) -> bool:
        """Whether as many losses are unread as may be."""
        return len(self._unread) >= UNREAD_LOSSES

    def read_losses(self) -> float:
        """The sum of the losses that were still on the device; raises if one is not finite."""
        if not self._unread:
            return 0.0
        unread, self._unread = self._unread, []
        values = torch.stack([loss for _, _, loss in unread]).tolist()
        done = "the model was updated with it, its checkpoints were not"
        total = 0.0
        for (place, batch, _), value in zip(unread, values, strict=True):
            if self.processes.world_size > 1:
                value = self._read_signals(value, batch, place, done)
            elif not math.isfinite(value):
                self._refuse(batch, value, place, done)
            total += value
        return total

    def _read_signals(self, signals: list[list[float]], batch: Batch, place: str, done: str) -> float:
        """The loss of a global batch, from the signals of its ranks (`GradientExchange.finish`)."""
        losses, stops = signals
        for rank, loss in enumerate(losses):
            if not math.isfinite(loss):
                if rank == self.processes.rank:
                    self._refuse(batch, loss, place, done)
                if math.isfinite(losses[self.processes.rank]):
                    raise PeerError(f"the loss of rank {rank} is {loss} at {place}: {done}")
        if any(stops):
            self.stop_requested.signal = 1
        return sum(losses)

    # --- as a CUDA graph ---------------------------------------------------------------------------------------------

    def _make_graph(self) -> CapturedStep | None:
        """The capture of full steps, where it is not ruled out from the start."""
        if self.config.device.cuda_graph == "off":
            return None
        why_not = None
        if self.device.type != "cuda":
            why_not = f"the device is {self.device}"
        elif self.processes.world_size > 1:
            why_not = "processes exchange gradients in every step"
        elif self.strategy.kind.looks_up_on_host:
            why_not = f"--strategy {self.strategy.kind.name} looks tables up on the host"
        if why_not is None:
            return CapturedStep(
                self._backward_captured,
                self.optimizers,
                self.config.batch_size,
                self.strategy.addresses,
                self.strategy.wait_for_threads,
            )
        if self.config.device.cuda_graph == "on":
            raise ConfigError(f"--cuda-graph on cannot be had, {why_not}: use auto or off")
        return None

    def _backward_captured(self, batch: Batch) -> Tensor:
        """The loss of a batch on the device; its gradients, clipped, are left in place."""
        loss = self.loss(batch, batch)
        loss.backward()
        if self.config.optimizer.clip_norm is not None:
            self.optimizers.clip(self.config.optimizer.clip_norm)
        return loss.detach()

    def _takes_graph(self, moved: Batch) -> bool:
        """Whether the graph is for a batch; an error with `--cuda-graph on` if it is not for a full one."""
        assert self.graph is not None
        takes = self.graph.takes(moved)
        if not takes and self.config.device.cuda_graph == "on" and len(moved) == self.config.batch_size:
            why_not = self.graph.why_not or "features have several ids or weights"
            raise ConfigError(f"--cuda-graph on cannot be had, {why_not}: use auto or off")
        return takes


def _bf16(kind: str, on: bool) -> AbstractContextManager[Any]:
    return torch.autocast(kind, torch.bfloat16) if on else nullcontext()
