"""Requests to stop, deferred until a step is complete: Ctrl-C, SIGTERM, and the end of torchrun."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether the run was asked to stop: by SIGINT or SIGTERM, or since process `parent` no longer is its parent."""

    def __init__(self, parent: int | None = None) -> None:
        self.signal: int | None = None
        self.time = 0.0
        """Time of the signal, on the monotonic clock."""
        self.parent = parent

    @property
    def lost_parent(self) -> bool:
        return self.parent is not None and os.getppid() != self.parent

    def __bool__(self) -> bool:
        return self.signal is not None or self.lost_parent


def torchrun_process() -> int | None:
    """The torchrun that started this process; None without one.

    When it is killed (SIGKILL), nobody ends its processes, and a restart would meet them in the run folder. Other
    parents may end before a run does, as the shell of `nohup` does.
    """
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


@contextmanager
def deferred_interrupts(echo_seconds: float = 0.0, parent: int | None = None) -> Iterator[Interrupt]:
    """While the block runs, the first SIGINT or SIGTERM only sets a flag; a second one acts at once.

    The end of process `parent`, if given, is a request to stop too.

    Signals within `echo_seconds` of the first are echoes of it: a terminal sends Ctrl-C to torchrun and to its
    processes, and torchrun passes it on to them.
    Outside the main thread, where Python cannot set handlers, signals act as usual.
    """
    interrupt = Interrupt(parent)
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
