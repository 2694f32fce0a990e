"""Concurrent branches of a captured CUDA graph.

A kernel that waits for memory and a chain of small ones take less time side by side than one after the other.

    with beside(device) as other:    # starts when everything launched before is done
        ...                          # a branch, with memory of a second stream
    ...                              # the graph's other branch
    other.join()                     # launches from here on wait for both

Memory allocated inside is reused only by later branches, which wait for the first stream: so nothing is reused too
early if every use of it comes after `join`.

Outside of a capture everything is launched in order: launches on the host are the bottleneck there, and a second stream
needs more of them. All embedding work of a training step of DLRM-small with five Frobenius tables, batch 65,536 on an
H200: 864 us with branches, 916 without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}
_overlaps = True


class Beside:
    """Second stream with work under way, or none where everything is launched in order."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self._stream = stream

    def join(self) -> None:
        """Make the current stream wait for the branch."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@contextmanager
def beside(device: torch.device) -> Iterator[Beside]:
    """Context whose launches run on the second stream of `device`, after everything launched so far."""
    if device.type != "cuda":
        yield Beside(None)
        return
    if device not in _streams:  # made even if not used yet: steps run once before they are captured
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
    """Context in which a capture has no branches, for tests and timings."""
    global _overlaps
    before, _overlaps = _overlaps, False
    try:
        yield
    finally:
        _overlaps = before
