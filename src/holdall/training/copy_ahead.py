"""Batches on their way to a GPU: checked and pinned by a thread, copied one ahead on a stream of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import torch

from holdall.batch import Batch

READY = 2
"""Batches that are checked and pinned before they are copied."""
THREADS = 4
"""Threads of an operation of the thread that does it: more would be in the way of the others."""

Item = TypeVar("Item")
Made = TypeVar("Made")


def copied_ahead(
    batches: Iterator[Batch], device: torch.device, check: Callable[[Batch], None]
) -> Generator[tuple[Batch, Batch], None, None]:
    """`(batch, the same on the device)`; `check` sees every batch on the host, before it is copied.

    What it raises comes after the batches before have been handed out. On a CPU nothing runs ahead.
    """
    if device.type != "cuda":
        for batch in batches:
            check(batch)
            yield batch, batch
        return

    def pinned(batch: Batch) -> Batch:
        check(batch)
        return batch.pinned()

    stream = torch.cuda.Stream(device)
    waiting: tuple[Batch, Batch, torch.cuda.Event] | None = None
    with closing(made_ahead(batches, pinned)) as ready:
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


def made_ahead(
    items: Iterator[Item], make: Callable[[Item], Made], count: int = READY
) -> Generator[tuple[Item, Future[Made]], None, None]:
    """The items, each with what a thread makes of it, which has begun with so many after it."""
    ahead: deque[tuple[Item, Future[Made]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="holdall-read") as thread:
        before = torch.get_num_threads()
        thread.submit(torch.set_num_threads, min(before, THREADS)).result()
        torch.set_num_threads(before)  # of this thread
        for item in items:
            ahead.append((item, thread.submit(make, item)))
            if len(ahead) > count:
                yield ahead.popleft()
        yield from ahead


def _take(waiting: tuple[Batch, Batch, torch.cuda.Event], device: torch.device) -> tuple[Batch, Batch]:
    """Let the computing stream wait for the copy, and keep the memory until that stream is done with it."""
    batch, moved, arrived = waiting
    stream = torch.cuda.current_stream(device)
    stream.wait_event(arrived)
    for tensor in moved.tensors():
        tensor.record_stream(stream)
    return batch, moved
