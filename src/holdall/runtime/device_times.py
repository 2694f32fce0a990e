"""How long the stages of steps take on a GPU, by events on their streams: nothing waits while they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class DeviceTimes:
    """Events around stages; `medians` reads them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[tuple[str, int], Any] = {}
        self._done: dict[str, list[tuple[Any, Any]]] = {}
        self._host: dict[str, list[float]] = {}

    @contextmanager
    def stage(self, name: str, stream: Any) -> Iterator[None]:
        """On a stream, from what it reaches first inside to the last."""
        with torch.cuda.stream(stream):
            begin, started = _event(stream), time.perf_counter()
            yield
            self._keep(name, begin, _event(stream))
            with self._lock:
                self._host.setdefault(name, []).append(time.perf_counter() - started)

    def begin(self, name: str, step: int) -> None:
        """A stage of the current stream that begins and ends in different places."""
        self._begun[name, step] = _event(torch.cuda.current_stream())

    def end(self, name: str, step: int) -> None:
        self._keep(name, self._begun.pop((name, step)), _event(torch.cuda.current_stream()))

    def _keep(self, name: str, begin: Any, end: Any) -> None:
        with self._lock:
            self._done.setdefault(name, []).append((begin, end))

    def medians(self, skip: int = 0) -> dict[str, float]:
        """Seconds of every stage, without its first `skip` times; waits for the device."""
        torch.cuda.synchronize()
        return {
            name: float(np.median([begin.elapsed_time(end) for begin, end in pairs[skip:]])) / 1e3
            for name, pairs in self._done.items()
            if len(pairs) > skip
        }

    def host_medians(self, skip: int = 0) -> dict[str, float]:
        """Seconds that the host was busy with every stage."""
        return {name: float(np.median(taken[skip:])) for name, taken in self._host.items() if len(taken) > skip}


def _event(stream: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
