"""Batches on their way to a GPU: copied one ahead, on a stream of their own, while the step before is computed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import torch

from holdall.batch import Batch


def copied_ahead(
    batches: Iterator[Batch], device: torch.device, check: Callable[[Batch], None]
) -> Generator[tuple[Batch, Batch], None, None]:
    """`(batch, the same on the device)`; `check` sees every batch on the host, before it is copied.

    On a CPU both are one and nothing runs ahead.
    """
    if device.type != "cuda":
        for batch in batches:
            check(batch)
            yield batch, batch
        return
    stream = torch.cuda.Stream(device)
    waiting: tuple[Batch, Batch, torch.cuda.Event] | None = None
    for batch in batches:
        check(batch)
        with torch.cuda.stream(stream):
            moved = batch.pinned().to(device, non_blocking=True)
            arrived = stream.record_event()
        if waiting is not None:
            yield _take(waiting, device)
        waiting = (batch, moved, arrived)
    if waiting is not None:
        yield _take(waiting, device)


def _take(waiting: tuple[Batch, Batch, torch.cuda.Event], device: torch.device) -> tuple[Batch, Batch]:
    """Let the computing stream wait for the copy, and keep the memory until that stream is done with it."""
    batch, moved, arrived = waiting
    stream = torch.cuda.current_stream(device)
    stream.wait_event(arrived)
    for tensor in moved.tensors():
        tensor.record_stream(stream)
    return batch, moved
