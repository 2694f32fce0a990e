"""Clock for operations on a device, and least-squares fits of cost formulas to the times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median_low
from typing import Any

import numpy as np
import torch

from holdall.common.errors import ConfigError
from holdall.planning.machine.hardware import Cost, Line
from holdall.runtime.cuda_graph import capture, forbid_synchronization

EVICTION_BYTES = 1 << 25
"""Bytes written between two runs to evict the caches: the size of a large last-level cache."""
SLEEP_CYCLES = 1 << 18
"""Cycles that a GPU sleeps while the host enqueues the work to time, so that no launch is waited for."""


TRIES = 3
"""Measurements of an operation before an impossible time is refused."""
LINE_BYTES = 64
"""Bytes of a cache line of a CPU; a GPU reads sectors of half of that."""


@cache
def _eviction_buffer() -> torch.Tensor:
    return torch.zeros(EVICTION_BYTES // 4)


class OutOfTimeError(Exception):
    """Signal that the time of a measurement that may be left out is up."""


@dataclass(frozen=True)
class Clock:
    """Timer of operations on a device.

    An operation is run once to warm up and then up to `repeats` times, fewer if that takes more than `budget` seconds
    or goes beyond the `deadline`. Its time is the median, of two the shorter.
    """

    device: torch.device
    repeats: int = 2
    budget: float = 0.1
    """Seconds after which no further repeat is started."""
    now: Callable[[], float] = time.perf_counter
    cold: bool = False
    """Whether a CPU's caches are evicted before each run, as the rest of a training step does."""
    deadline: float = math.inf
    """Time by `now` from which every operation has as few repeats as it can."""
    must_finish: bool = True
    """Whether operations are timed beyond the deadline; otherwise they raise `OutOfTimeError`."""
    bandwidth: float = math.inf
    """Bytes a second that no operation can read or write."""

    def __call__(
        self, run: Callable[..., Any], prepare: Callable[[], Any] | None = None, *, least: float = 0.0, what: str = ""
    ) -> float:
        """Median seconds of `run`, which is called with the result of `prepare`; `prepare` is not timed.

        Less than the `least` seconds that it can take is measured again, then refused: `what` names the operation.
        """

        def measure() -> float:
            taken: list[float] = []
            while self.wants_repeat(taken):
                given = () if prepare is None else (prepare(),)
                self.evict_caches()
                self.synchronize()
                start = self.now()
                run(*given)
                self.synchronize()
                taken.append(self.now() - start)
            return median_run(taken)

        return self.possible(measure, least, what)

    def possible(self, measure: Callable[[], float], least: float, what: str) -> float:
        """The seconds that `measure` returns, which is called again where they are below `least`."""
        if self.is_late() and not self.must_finish:
            raise OutOfTimeError
        for _ in range(TRIES):
            seconds = measure()
            if seconds >= least:
                return seconds
        raise ConfigError(
            f"{what} was measured at {seconds:.2g} s, {TRIES} times in turn, but cannot take less than {least:.2g} s: "
            f"this machine is too busy to be measured, or its clock is wrong; run `holdall hardware` again later"
        )

    def replayed(
        self,
        run: Callable[[], Any],
        change: Callable[[], Any] = lambda: None,
        times: int = 1,
        *,
        least: float = 0.0,
        what: str = "",
    ) -> float:
        """Median seconds of `run` inside a training step; `change` updates its inputs in place before each run.

        On a GPU a training step is one CUDA graph. So a graph of `run`, repeated `times` times, is replayed and timed
        by events of the device, without the time of launches. An operation that synchronizes cannot be captured, and is
        timed without a graph.
        """
        graph = capture_repeated(run, times) if self.device.type == "cuda" else None
        if graph is None:
            return self(lambda _: run(), change, least=least, what=what)

        def measure() -> float:
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
            return median_run(taken)

        return self.possible(measure, least, what)

    def wants_repeat(self, taken: Sequence[float]) -> bool:
        """Whether to repeat once more; the first run is a warm-up."""
        if len(taken) < 2:
            return True
        return len(taken) <= self.repeats and sum(taken) < self.budget and not self.is_late()

    def is_late(self) -> bool:
        """Whether the deadline is over."""
        return self.now() > self.deadline

    def hurries(self) -> bool:
        """Whether sizes are left out that others can stand for, to finish soon after the deadline."""
        return self.must_finish and self.is_late()

    def seconds_of_rows(self, num_rows: int, row_bytes: int) -> float:
        """Least seconds to read or write random rows that no cache has: memory is moved in lines."""
        return num_rows * max(row_bytes, LINE_BYTES) / self.bandwidth

    def evict_caches(self) -> None:
        """Overwrite a CPU's caches, if `cold`."""
        if self.cold and self.device.type == "cpu":
            _eviction_buffer().add_(1.0)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def median_run(taken: Sequence[float]) -> float:
    """Median of all runs but the first, of an even number the lower one: other processes only ever add time."""
    return median_low(taken[1:])


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


def rising_line(sizes: Sequence[float], measure: Callable[[], Sequence[float]], least: float) -> Line:
    """The line of an operation that takes at least `least` seconds an item, fitted to what `measure` returns.

    Noise can hide the slope, and then a fit promises any rate. So it is measured again, and at last the rate is that of
    the largest size as a whole, which was seen.
    """
    for _ in range(TRIES):
        seconds = measure()
        line = fit_line(sizes, seconds)
        if line.each > 0 and line.each >= least:
            return line
    return Line(0.0, seconds[-1] / sizes[-1])
