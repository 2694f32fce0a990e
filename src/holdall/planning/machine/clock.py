"""Clock for operations on a device, and least-squares fits of cost formulas to the times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from holdall.planning.machine.hardware import Cost, Line
from holdall.runtime.cuda_graph import capture, forbid_synchronization

EVICTION_BYTES = 1 << 25
"""Bytes written between two runs to evict the caches: the size of a large last-level cache."""
SLEEP_CYCLES = 1 << 18
"""Cycles that a GPU sleeps while the host enqueues the work to time, so that no launch is waited for."""


@cache
def _eviction_buffer() -> torch.Tensor:
    return torch.zeros(EVICTION_BYTES // 4)


@dataclass(frozen=True)
class Clock:
    """Timer of operations on a device."""

    device: torch.device
    repeats: int = 5
    budget: float = 0.2
    """Seconds after which no further repeat is started."""
    now: Callable[[], float] = time.perf_counter
    cold: bool = False
    """Whether a CPU's caches are evicted before each run, as the rest of a training step does."""

    def __call__(self, run: Callable[..., Any], prepare: Callable[[], Any] | None = None) -> float:
        """Median seconds of `run`, which is called with the result of `prepare`; `prepare` is not timed."""
        taken: list[float] = []
        while self.wants_repeat(taken):
            given = () if prepare is None else (prepare(),)
            self.evict_caches()
            self.synchronize()
            start = self.now()
            run(*given)
            self.synchronize()
            taken.append(self.now() - start)
        return float(np.median(taken[1:]))

    def replayed(self, run: Callable[[], Any], change: Callable[[], Any] = lambda: None, times: int = 1) -> float:
        """Median seconds of `run` inside a training step; `change` updates its inputs in place before each run.

        On a GPU a training step is one CUDA graph. So a graph of `run`, repeated `times` times, is replayed and timed
        by events of the device, without the time of launches. An operation that synchronizes cannot be captured, and is
        timed without a graph.
        """
        graph = capture_repeated(run, times) if self.device.type == "cuda" else None
        if graph is None:
            return self(lambda _: run(), change)
        taken: list[float] = []
        while self.wants_repeat(taken):
            change()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3 / times)
        return float(np.median(taken[1:]))

    def wants_repeat(self, taken: Sequence[float]) -> bool:
        """Whether to repeat once more; the first run is a warm-up."""
        return len(taken) <= self.repeats and (len(taken) < 3 or sum(taken) < self.budget)

    def evict_caches(self) -> None:
        """Overwrite a CPU's caches, if `cold`."""
        if self.cold and self.device.type == "cpu":
            _eviction_buffer().add_(1.0)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def capture_repeated(run: Callable[[], Any], times: int = 1) -> torch.cuda.CUDAGraph | None:
    """A CUDA graph of `run`, repeated `times` times; None where `run` synchronizes, which cannot be captured."""

    def runs() -> None:
        for _ in range(times):
            run()

    for _ in range(2):  # compiles kernels and fills memory pools and caches
        run()
    try:
        with forbid_synchronization():
            run()
        torch.cuda.synchronize()
        return capture(runs)
    except RuntimeError as error:
        if "synchronizing" not in str(error) and "captur" not in str(error):
            raise
        return None


def fit(points: Sequence[tuple[float, float]], seconds: Sequence[float]) -> Cost:
    """The non-negative cost with the least squared relative error to `seconds` measured at `points` (lookups, rows)."""
    matrix = np.array([[1.0, lookups, rows] for lookups, rows in points])
    target = np.array(seconds)
    matrix = matrix / target[:, None]
    best, least = np.zeros(3), np.inf
    for used in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
        solution = np.zeros(3)
        solution[list(used)] = np.linalg.lstsq(matrix[:, used], np.ones(len(target)), rcond=None)[0]
        error = float(np.square(matrix @ solution - 1).sum())
        if (solution >= 0).all() and error < least - 1e-12:
            best, least = solution, error
    return Cost(*best.tolist())


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The non-negative line with the least squared relative error to two or more points."""
    cost = fit([(size, 0.0) for size in sizes], seconds)
    return Line(cost.base, cost.per_lookup)
