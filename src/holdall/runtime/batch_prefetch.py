"""Batch prefetching to a GPU: a thread reads, checks and pins batches, and a stream copies them one ahead."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing

import torch

from holdall.common.worker_thread import MAX_INTRAOP_THREADS, WorkerThread, prefetch_map
from holdall.data.batch import Batch
from holdall.runtime.packed_batch import PackedBatch, checked_and_pinned


def prefetch_to_device(
    batches: Iterator[Batch], device: torch.device, check: Callable[[Batch], None]
) -> Generator[tuple[Batch, Batch], None, None]:
    """`(batch, the same on the device)`; `check` is called with every batch on the host, before it is copied.

    An error of `check` is raised after the batches before it were yielded. On a CPU nothing runs ahead.
    """
    if device.type != "cuda":
        for batch in batches:
            check(batch)
            yield batch, batch
        return
    stream = torch.cuda.Stream(device)
    waiting: tuple[Batch, PackedBatch, torch.cuda.Event] | None = None
    with (
        WorkerThread("read", MAX_INTRAOP_THREADS) as thread,
        closing(prefetch_map(batches, checked_and_pinned(check), thread)) as ready,
    ):
        for batch, made in ready:
            if made.exception() is not None and waiting is not None:
                yield _take(waiting, device)
            with torch.cuda.stream(stream):
                moved = made.result().to(device, non_blocking=True)
                arrived = stream.record_event()
            if waiting is not None:
                yield _take(waiting, device)
            waiting = (batch, moved, arrived)
    if waiting is not None:
        yield _take(waiting, device)


def _take(waiting: tuple[Batch, PackedBatch, torch.cuda.Event], device: torch.device) -> tuple[Batch, Batch]:
    """Make the current stream wait for the copy, and keep the memory until that stream has used it."""
    batch, moved, arrived = waiting
    stream = torch.cuda.current_stream(device)
    stream.wait_event(arrived)
    moved.memory.record_stream(stream)
    return batch, moved
