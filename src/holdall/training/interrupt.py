"""Ctrl-C, held back until a step is complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether someone asked the run to stop, by SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def held_interrupts() -> Iterator[Interrupt]:
    """While the block runs, the first SIGINT or SIGTERM only sets a flag; a second one acts at once.

    Outside the main thread, where Python cannot set handlers, signals act as usual.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def remember(number: int, frame: FrameType | None) -> None:
        interrupt.signal = number
        for known, handler in previous.items():
            signal.signal(known, handler)

    for number in previous:
        signal.signal(number, remember)
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
