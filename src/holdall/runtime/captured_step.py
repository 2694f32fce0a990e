"""A training step as one CUDA graph: the same kernels on the same memory, launched at once for every batch.

A graph holds addresses and shapes, so batches are copied into fixed buffers, only full ones with one id a feature fit,
and everything that changes from step to step is read from the device (`dense_optimizers.StepScalars`). Launching the
kernels of a DLRM step one by one takes the host longer than the GPU takes to run them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from holdall.data.batch import Batch
from holdall.optim.optimizers import Optimizers
from holdall.runtime.cuda_graph import captured, no_waiting, replay

WARM_UP = 3
"""Steps that run as usual before one is captured: kernels are compiled, and memory and caches settle."""


class CapturedStep:
    """Steps of one shape of batch, replayed from a graph once one has been captured.

    `backward` computes the loss of a batch, its gradients, and clips them; the result is the same, bit for bit, as
    without a graph. A step that would wait for the device cannot be captured: `why_not` says so then, and all steps
    run as usual.
    """

    def __init__(
        self,
        backward: Callable[[Batch], Tensor],
        optimizers: Optimizers,
        batch_size: int,
        addresses: Callable[[], Hashable] = tuple,
        settle: Callable[[], None] = lambda: None,
    ):
        self._backward, self._optimizers, self._batch_size = backward, optimizers, batch_size
        self._addresses = addresses
        """Where what the step works on lies: when that changes, a new graph is captured."""
        self._settle = settle
        """Makes other threads leave the device alone, while a step is tried or captured."""
        self._captured_at: Hashable = None
        self.why_not = optimizers.why_not_captured()
        self.replays = 0
        self._warmed_up = 0
        self._batch: Batch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None

    def takes(self, batch: Batch) -> bool:
        """Whether this batch, on the device, is one the graph is for."""
        if self.why_not is not None or len(batch) != self._batch_size:
            return False
        if batch.ids.offsets is not None or batch.ids.weights is not None:
            return False
        return self._batch is None or batch.ids.values.shape == self._batch.ids.values.shape

    def step(self, batch: Batch) -> Tensor:
        """Update with a batch, and return its loss."""
        self._fill(batch)
        if self._graph is None and self._warmed_up < WARM_UP:
            self._warmed_up += 1
            return self._as_usual(probe=self._warmed_up == WARM_UP)
        self._optimizers.prepare()
        if self._graph is None or self._captured_at != self._addresses():
            self._capture()
        assert self._graph is not None
        assert self._loss is not None
        replay(self._graph)
        self.replays += 1
        return self._loss.clone()

    def _fill(self, batch: Batch) -> None:
        """Copy a batch to where the graph reads it."""
        if self._batch is None:
            self._batch = batch.empty_like()
        self._batch.fill(batch)

    def _as_usual(self, *, probe: bool) -> Tensor:
        """A step without a graph; with `probe`, first find out whether one waits for the device."""
        assert self._batch is not None
        if probe:
            self._settle()
            try:
                with no_waiting():
                    self._backward(self._batch)
            except RuntimeError as error:
                if "synchronizing" not in str(error):
                    raise
                self.why_not = f"a step waits for the device ({str(error).splitlines()[0]})"
            self._optimizers.zero_grad()
        loss = self._backward(self._batch)
        self._optimizers.prepare()
        self._optimizers.apply()
        return loss

    def _capture(self) -> None:
        self._settle()
        self._graph = None  # its memory first
        self._captured_at = self._addresses()
        self._graph = captured(self._update)

    def _update(self) -> None:
        assert self._batch is not None
        self._loss = self._backward(self._batch)
        self._optimizers.apply()
