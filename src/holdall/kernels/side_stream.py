"""Work beside work: branches of a captured CUDA graph that run at the same time.

A kernel that waits for memory and a chain of small ones take less time side by side than one after the other.

    with beside(device) as other:    # begins when all that was launched before is done
        ...                          # a branch, its memory taken from a second stream's
    ...                              # the graph's other branch
    other.join()                     # what is launched from here on waits for both

What is allocated inside is given out again only to later branches, which wait for the first stream: so nothing is
reused too early as long as every use of it comes after `join`.

Outside of a capture everything is launched in order: there the host is what is waited for, and a second stream costs it
more launches. All embedding work of a training step of DLRM-small with five Frobenius tables, batch 65,536 on an H200:
864 us with branches, 916 without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}
_overlaps = True


class Beside:
    """A second stream while it is at work, or nothing where things are launched in order."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self._stream = stream

    def join(self) -> None:
        """Make the current stream wait for what was launched beside it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@contextmanager
def beside(device: torch.device) -> Iterator[Beside]:
    """Launch what is inside on the second stream of `device`, behind everything launched so far."""
    if device.type != "cuda":
        yield Beside(None)
        return
    if device not in _streams:  # also when it is not used yet: steps run before they are captured
        _streams[device] = torch.cuda.Stream(device, priority=-1)
    if not _overlaps or not torch.cuda.is_current_stream_capturing():
        yield Beside(None)
        return
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield Beside(stream)


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Inside, a capture has no branches: the plain order, for tests and timings."""
    global _overlaps
    before, _overlaps = _overlaps, False
    try:
        yield
    finally:
        _overlaps = before
