"""Batches of a pipeline: drawn, checked and pinned ahead of use, then copied to fixed addresses of the device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future

import torch
from torch import Tensor

from holdall.common.worker_thread import MAX_INTRAOP_THREADS, PREFETCH_BATCHES, WorkerThread, prefetch_map
from holdall.data.batch import Batch
from holdall.runtime.packed_batch import PackedBatch, checked_and_pinned


class DeviceBatches:
    """Reader of batches for a device: a thread on a GPU; on a CPU, batches are used as they are."""

    def __init__(self, device: torch.device, *, ahead: bool):
        self.device = device
        self._num_ahead = PREFETCH_BATCHES if ahead else 0
        self._thread = WorkerThread("read", MAX_INTRAOP_THREADS) if device.type == "cuda" else None
        self._memory: dict[int, Tensor] = {}
        """Device memory of the batch in each staging buffer."""

    def read(
        self, batches: Iterator[Batch], check: Callable[[Batch], None]
    ) -> Generator[tuple[Batch, Future[PackedBatch] | None], None, None]:
        """Batches, and on a GPU the same checked and pinned."""
        if self._thread is None:
            yield from ((batch, None) for batch in batches)
        else:
            yield from prefetch_map(batches, checked_and_pinned(check), self._thread, self._num_ahead)

    def copy(self, batch: PackedBatch, buffer: int) -> PackedBatch:
        """A batch on the device, where the previous one of its staging buffer was; that must be done."""
        size = batch.memory.numel()
        if buffer not in self._memory or self._memory[buffer].numel() < size:
            self._memory[buffer] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return batch.to_memory(self._memory[buffer], non_blocking=True)

    def synchronize(self) -> None:
        """Wait until no batch is being read."""
        if self._thread is not None:
            self._thread.drain()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
