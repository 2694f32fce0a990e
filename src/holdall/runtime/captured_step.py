"""Training step captured as one CUDA graph: the same kernels on the same memory, launched at once for every batch.

A graph fixes addresses and shapes. So batches are copied into fixed buffers, only full batches with one id per feature
are replayed, and everything that changes from step to step is read from the device (`dense_optimizers.StepScalars`).
Launching the kernels of a DLRM step one by one takes the host longer than the GPU takes to run them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from holdall.data.batch import Batch
from holdall.optim.optimizers import Optimizers
from holdall.runtime.cuda_graph import capture, forbid_synchronization, replay

WARM_UP = 3
"""Uncaptured steps before the capture: they compile kernels and fill caches."""


class CapturedStep:
    """Training steps for batches of one shape, replayed from a CUDA graph after a warm-up.

    `backward` computes the loss of a batch and its gradients, and clips them. The result is the same, bit for bit, as
    without a graph. A step that synchronizes with the device cannot be captured: `why_not` then has the reason, and no
    step is captured.
    """

    def __init__(
        self,
        backward: Callable[[Batch], Tensor],
        optimizers: Optimizers,
        batch_size: int,
        addresses: Callable[[], Hashable] = tuple,
        synchronize: Callable[[], None] = lambda: None,
    ):
        self._backward, self._optimizers, self._batch_size = backward, optimizers, batch_size
        self._addresses = addresses
        """Addresses that the step reads and writes: when they change, a new graph is captured."""
        self._synchronize = synchronize
        """Waits until other threads have stopped using the device, before a step is probed or captured."""
        self._captured_at: Hashable = None
        self.why_not = optimizers.why_not_captured()
        self.replays = 0
        self._warmed_up = 0
        self._batch: Batch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None

    def takes(self, batch: Batch) -> bool:
        """Whether the graph can run this batch, which is on the device."""
        if self.why_not is not None or len(batch) != self._batch_size:
            return False
        if batch.ids.offsets is not None or batch.ids.weights is not None:
            return False
        if self._optimizers.has_frozen:  # a graph would go on updating what was frozen after its capture
            return False
        return self._batch is None or batch.ids.values.shape == self._batch.ids.values.shape

    def step(self, batch: Batch) -> Tensor:
        """Update with a batch, and return its loss."""
        self._fill(batch)
        if self._graph is None and self._warmed_up < WARM_UP:
            self._warmed_up += 1
            return self._uncaptured(probe=self._warmed_up == WARM_UP)
        self._optimizers.prepare()
        if self._graph is None or self._captured_at != self._addresses():
            self._capture()
        assert self._graph is not None
        assert self._loss is not None
        replay(self._graph)
        self.replays += 1
        return self._loss.clone()

    def _fill(self, batch: Batch) -> None:
        """Copy a batch into the fixed buffers that the graph reads."""
        if self._batch is None:
            self._batch = batch.empty_like()
        self._batch.fill(batch)

    def _uncaptured(self, *, probe: bool) -> Tensor:
        """A step without a graph; with `probe`, first find out whether it synchronizes with the device."""
        assert self._batch is not None
        if probe:
            self._synchronize()
            try:
                with forbid_synchronization():
                    self._backward(self._batch)
            except RuntimeError as error:
                if "synchronizing" not in str(error):
                    raise
                self.why_not = f"a step synchronizes with the device ({str(error).splitlines()[0]})"
            self._optimizers.zero_grad()
        loss = self._backward(self._batch)
        self._optimizers.prepare()
        self._optimizers.apply()
        return loss

    def _capture(self) -> None:
        self._synchronize()
        self._graph = None  # frees its memory first
        self._captured_at = self._addresses()
        self._graph = capture(self._update)

    def _update(self) -> None:
        assert self._batch is not None
        self._loss = self._backward(self._batch)
        self._optimizers.apply()
