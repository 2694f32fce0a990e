"""Conditions of a measurement: cores that other processes left free, and how far repeated measurements differ."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from holdall.common import environment
from holdall.common.threads import available_cores
from holdall.planning.machine.hardware import Conditions, Hardware

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
LOOKUPS, ROWS = 32_768, 8_192
"""Lookups and distinct rows of a step by which passes are compared."""


def busy_seconds(stat: Path = Path("/proc/stat")) -> float | None:
    """Core seconds since boot that the cores of this process were not idle, stolen ones included; None if unknown."""
    try:
        lines = stat.read_text(encoding="utf-8").splitlines()
        cores = os.sched_getaffinity(0)
    except (OSError, AttributeError):
        return None
    busy = 0.0
    for name, *numbers in (line.split() for line in lines if line.startswith("cpu")):
        if name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _wait, interrupt, soft, steal = (int(number) for number in numbers[:8])
            busy += user + nice + system + interrupt + soft + steal
    return busy / TICKS_PER_SECOND


def _num_cores() -> int:
    """Cores that this process may run on."""
    return int(environment.hardware()["cores"])


@dataclass(frozen=True)
class LoadWatch:
    """Watch over the cores of this machine, from when it is made."""

    busy: Callable[[], float | None] = busy_seconds
    own: Callable[[], float] = time.process_time
    now: Callable[[], float] = time.perf_counter
    num_cores: int = field(default_factory=_num_cores)
    wanted: int = field(default_factory=available_cores)
    _start: tuple[float | None, float, float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_start", self._read())

    def _read(self) -> tuple[float | None, float, float]:
        return self.busy(), self.own(), self.now()

    def conditions(self, *, passes: int = 1, quick: bool = False, spread: float = 1.0) -> Conditions:
        """Conditions since the watch was made."""
        (busy, own, now), (busy_before, own_before, before) = self._read(), self._start
        free = None
        if busy is not None and busy_before is not None and now > before:
            others = max(0.0, (busy - busy_before) - (own - own_before)) / (now - before)
            free = min(float(self.wanted), max(0.0, self.num_cores - others))
        return Conditions(passes=passes, quick=quick, spread=spread, cores_wanted=self.wanted, cores_free=free)


def spread(passes: Sequence[Hardware]) -> float:
    """How many times the largest of repeated measurements is the smallest, in the median over typical operations."""
    times = [typical_seconds(one) for one in passes]
    ratios = [max(found) / max(min(found), 1e-12) for found in zip(*times, strict=True)]
    return median(ratios)


def typical_seconds(hardware: Hardware) -> list[float]:
    """Seconds of operations of a step: lookups and updates of every table, random rows, and layers."""
    tables = [cost.seconds(LOOKUPS, ROWS) for table in hardware.tables for cost in (table.lookup, table.update)]
    rows = [line.seconds(ROWS) for lines in (hardware.gather, hardware.scatter) for line in lines["host"].values()]
    return [*tables, *rows, *(seconds for layer in hardware.layers for seconds in layer.seconds.values())]
