"""Timing on a device, and costs fitted to what was timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from holdall.planning.machine.hardware import Cost, Line
from holdall.runtime.cuda_graph import captured, no_waiting

COLD_BYTES = 1 << 25
"""Bytes that are written to between two runs: as many as a large cache holds."""


AHEAD = 1 << 18
"""Cycles that a GPU is kept busy, while the host hands it what is timed next."""


@cache
def _elsewhere() -> torch.Tensor:
    return torch.zeros(COLD_BYTES // 4)


@dataclass(frozen=True)
class Clock:
    """Times what runs on a device."""

    device: torch.device
    repeats: int = 5
    budget: float = 0.2
    """Seconds after which no further repeat is started."""
    now: Callable[[], float] = time.perf_counter
    cold: bool = False
    """Whether a CPU's caches hold something else before each run, as the rest of a step leaves them."""

    def __call__(self, run: Callable[..., Any], prepare: Callable[[], Any] | None = None) -> float:
        """Median seconds of `run`, without those of `prepare`, whose result it is given."""
        taken: list[float] = []
        while self.goes_on(taken):
            given = () if prepare is None else (prepare(),)
            self.cool()
            self.wait()
            start = self.now()
            run(*given)
            self.wait()
            taken.append(self.now() - start)
        return float(np.median(taken[1:]))

    def replayed(self, run: Callable[[], Any], change: Callable[[], Any] = lambda: None, times: int = 1) -> float:
        """Median seconds of `run` as a part of training steps; `change` alters, in place, what the next one works on.

        On a GPU such a step is one CUDA graph, so a graph of `run`, so many `times` over, is timed by the device: it
        has no launches to wait for. What waits for the device itself cannot be captured, and is timed as it is.
        """
        graph = repeated(run, times) if self.device.type == "cuda" else None
        if graph is None:
            return self(lambda _: run(), change)
        taken: list[float] = []
        while self.goes_on(taken):
            change()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3 / times)
        return float(np.median(taken[1:]))

    def goes_on(self, taken: Sequence[float]) -> bool:
        """Whether to repeat once more; the first one does not count."""
        return len(taken) <= self.repeats and (len(taken) < 3 or sum(taken) < self.budget)

    def cool(self) -> None:
        """Put other things into the caches."""
        if self.cold and self.device.type == "cpu":
            _elsewhere().add_(1.0)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def repeated(run: Callable[[], Any], times: int = 1) -> torch.cuda.CUDAGraph | None:
    """A graph of `run`, so many times over; None where there can be none, as it waits for the device."""

    def runs() -> None:
        for _ in range(times):
            run()

    for _ in range(2):  # kernels are compiled, and memory and caches settle
        run()
    try:
        with no_waiting():
            run()
        torch.cuda.synchronize()
        return captured(runs)
    except RuntimeError as error:
        if "synchronizing" not in str(error) and "captur" not in str(error):
            raise
        return None


def fit(points: Sequence[tuple[float, float]], seconds: Sequence[float]) -> Cost:
    """The cost that meets measured seconds at (lookups, rows) best in relative terms, with no part below 0."""
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
    """The line through two or more points, with no part below 0."""
    cost = fit([(size, 0.0) for size in sizes], seconds)
    return Line(cost.base, cost.per_lookup)
