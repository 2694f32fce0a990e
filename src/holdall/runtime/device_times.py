"""Times of the stages of steps on a GPU, by events on their streams: measuring does not synchronize."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class DeviceTimes:
    """Recorder of events around stages; `medians` reads them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: dict[tuple[str, int], Any] = {}
        self._events: dict[str, list[tuple[Any, Any]]] = {}
        self._host: dict[str, list[float]] = {}

    @contextmanager
    def stage(self, name: str, stream: Any) -> Iterator[None]:
        """Run the block on `stream`, and time its kernels and the host."""
        with torch.cuda.stream(stream):
            begin, started = _event(stream), time.perf_counter()
            yield
            self._record(name, begin, _event(stream))
            with self._lock:
                self._host.setdefault(name, []).append(time.perf_counter() - started)

    def begin(self, name: str, step: int) -> None:
        """Start a stage of the current stream that `end` ends elsewhere."""
        self._started[name, step] = _event(torch.cuda.current_stream())

    def end(self, name: str, step: int) -> None:
        self._record(name, self._started.pop((name, step)), _event(torch.cuda.current_stream()))

    def _record(self, name: str, begin: Any, end: Any) -> None:
        with self._lock:
            self._events.setdefault(name, []).append((begin, end))

    def medians(self, skip: int = 0) -> dict[str, float]:
        """Median seconds of every stage, without its first `skip` times; synchronizes with the device."""
        torch.cuda.synchronize()
        return {
            name: float(np.median([begin.elapsed_time(end) for begin, end in pairs[skip:]])) / 1e3
            for name, pairs in self._events.items()
            if len(pairs) > skip
        }

    def host_medians(self, skip: int = 0) -> dict[str, float]:
        """Median seconds that the host took for every stage."""
        return {name: float(np.median(taken[skip:])) for name, taken in self._host.items() if len(taken) > skip}


def _event(stream: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
