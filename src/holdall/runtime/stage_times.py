"""How long the stages of a step take, to be compared with what a plan predicted of them."""

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
"""On a GPU, one step in so many is measured: each stage waits for the device then."""


KEPT = 1024
"""Times of a stage that are kept, the latest."""


class StageTimes:
    """Seconds of every stage in the steps that were measured; safe to use from several threads."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._lock = threading.Lock()
        self.now: Callable[[], float] = time.perf_counter
        """The clock."""
        self.taken: dict[str, deque[float]] = {}
        """Seconds by stage, in the order in which they were measured."""
        self._measures = not self._on_gpu

    def begin_step(self, step: int) -> None:
        """Decide whether the stages of this step are measured; the first steps are left out."""
        self._measures = step >= EVERY and (not self._on_gpu or step % EVERY == 0)

    def pause(self) -> None:
        """Measure nothing until the next `begin_step`: a captured step has no stages."""
        self._measures = False

    @contextmanager
    def stage(self, name: str, *, waits: bool = True) -> Iterator[None]:
        """Measure what is inside, with what it leaves to the device if it `waits` for it."""
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
        """Median seconds of every stage that was measured: what a step takes when nothing disturbs it."""
        with self._lock:
            return {name: median(taken) for name, taken in self.taken.items()}
