"""Times of the stages of a step, for comparison with the times that a plan predicts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean, median
from typing import TypeVar

import torch

Item = TypeVar("Item")

EVERY = 16
"""Steps per measured step on a GPU: every measured stage synchronizes with the device."""

KEPT = 1024
"""Latest times of a stage that are kept."""


class StageTimes:
    """Seconds of every stage in the measured steps. Thread-safe."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._lock = threading.Lock()
        self.now: Callable[[], float] = time.perf_counter
        """The clock."""
        self.taken: dict[str, deque[float]] = {}
        """Seconds of each stage, in the order of measurement."""
        self._measures = not self._on_gpu

    def begin_step(self, step: int) -> None:
        """Decide whether the stages of this step are measured; the first steps are left out."""
        self._measures = step >= EVERY and (not self._on_gpu or step % EVERY == 0)

    def pause(self) -> None:
        """Measure nothing until the next `begin_step`: a captured step has no stages."""
        self._measures = False

    @contextmanager
    def stage(self, name: str, *, waits: bool = True) -> Iterator[None]:
        """Measure the block; with `waits`, including the device work that it launches."""
        if not self._measures:
            yield
            return
        waits = waits and self._on_gpu
        if waits:
            torch.cuda.synchronize(self._device)
        start = self.now()
        yield
        if waits:
            torch.cuda.synchronize(self._device)
        seconds = self.now() - start
        with self._lock:
            self.taken.setdefault(name, deque(maxlen=KEPT)).append(seconds)

    def drawn(self, items: Iterator[Item], name: str = "read") -> Iterator[Item]:
        """The items, each draw measured as a stage."""
        while True:
            with self.stage(name, waits=False):
                item = next(items, None)
            if item is None:
                return
            yield item

    def means(self) -> dict[str, float]:
        """Mean seconds of every stage that was measured."""
        with self._lock:
            return {name: fmean(taken) for name, taken in self.taken.items()}

    def medians(self) -> dict[str, float]:
        """Median seconds of every stage that was measured; outliers do not count."""
        with self._lock:
            return {name: median(taken) for name, taken in self.taken.items()}
