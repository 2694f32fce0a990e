"""Ctrl-C and SIGTERM, deferred until a step is complete."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether the run was asked to stop, by SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.time = 0.0
        """Time of the signal, on the monotonic clock."""

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def deferred_interrupts(echo_seconds: float = 0.0) -> Iterator[Interrupt]:
    """While the block runs, the first SIGINT or SIGTERM only sets a flag; a second one acts at once.

    Signals within `echo_seconds` of the first are echoes of it: a terminal sends Ctrl-C to torchrun and to its
    processes, and torchrun passes it on to them.
    Outside the main thread, where Python cannot set handlers, signals act as usual.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def remember(number: int, frame: FrameType | None) -> None:
        if interrupt.signal is None:
            interrupt.signal, interrupt.time = number, time.monotonic()
        elif time.monotonic() - interrupt.time >= echo_seconds:
            for known, handler in previous.items():
                signal.signal(known, handler)
            signal.raise_signal(number)

    for number in previous:
        signal.signal(number, remember)
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
