"""How long the stages of a step take, beside what a plan predicted of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")

EVERY = 16
"""On a GPU, one step in so many is measured: each stage waits for the device then."""


class StageTimes:
    """Mean seconds of every stage over the steps that were measured; safe to use from several threads."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._times: dict[str, int] = {}
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
        start = time.perf_counter()
        yield
        if waits:
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - start
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._times[name] = self._times.get(name, 0) + 1

    def drawn(self, items: Iterator[Item], name: str = "read") -> Iterator[Item]:
        """The items, each draw measured as a stage."""
        while True:
            with self.stage(name, waits=False):
                item = next(items, None)
            if item is None:
                return
            yield item

    def means(self) -> dict[str, float]:
        """Seconds a step of every stage that was measured."""
        with self._lock:
            return {name: seconds / self._times[name] for name, seconds in self._seconds.items()}
