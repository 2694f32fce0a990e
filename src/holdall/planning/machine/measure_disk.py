"""Measured rates of random rows in a memory-mapped file: on disk, and in the page cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from holdall.common.errors import ConfigError
from holdall.common.memory import available_memory
from holdall.common.sizes import readable_bytes
from holdall.planning.machine.clock import Clock
from holdall.planning.machine.hardware import Line

Rates = dict[str, dict[str, Line]]

READS = 256
"""Random rows that are timed, for each row size."""
REPEATS = 5
"""Repeats, each with other rows; the rate is their median."""
SECONDS = 1.0
"""Seconds after which no further repeat of a row size is started."""


def measure_disk(
    folder: Path, num_bytes: int, row_bytes: tuple[int, ...], clock: Clock | None = None
) -> tuple[Rates, Rates, list[str]]:
    """`(gather, scatter, notes)`, by `disk` and `cached` and bytes of a row.

    `disk`: the file is dropped from the page cache before it is read, and written rows are flushed to disk. `cached`:
    it is in the page cache, but its pages are not mapped to this process. Where the system cannot drop a file from the
    page cache, the rates of `disk` are those of memory, and a note says so. No row is read faster than the `bandwidth`
    of `clock` allows.
    """
    clock = Clock(torch.device("cpu")) if clock is None else clock
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} to measure the disk in: name one that exists")
    free = available_memory(folder)["disk"]
    if free < 2 * num_bytes:
        raise ConfigError(
            f"the disk at {folder} is too small to measure: it takes {readable_bytes(2 * num_bytes)}, and "
            f"{readable_bytes(free)} are free; free some, or name a folder on another disk"
        )
    gather: Rates = {"disk": {}, "cached": {}}
    scatter: Rates = {"disk": {}, "cached": {}}
    can_drop = hasattr(os, "posix_fadvise")
    notes = []
    if not can_drop:
        notes.append("this system cannot drop a file from the page cache: the disk's rates are those of memory")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".holdall-", suffix=".measure") as file:
        block = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8).tobytes()
        for _ in range(max(1, num_bytes >> 20)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        for width in row_bytes:
            times = [0.0]

            def measure(width: int = width) -> float:
                nonlocal times
                times = _median_rows(file.fileno(), file.tell(), width, can_drop=can_drop)
                return min(times)

            clock.possible(measure, clock.seconds_of_rows(1, width), f"a random row of {width} bytes of a file")
            for (rates, kind), seconds in zip(
                ((gather, "disk"), (scatter, "disk"), (gather, "cached"), (scatter, "cached")), times, strict=True
            ):
                rates[kind][str(width)] = Line(0.0, seconds)
    if can_drop and all(gather["disk"][size].each < 2 * gather["cached"][size].each for size in gather["disk"]):
        notes.append(f"rows of a file in {folder} are read as fast as from memory: it is in memory, or kept there")
    return gather, scatter, notes


def _median_rows(descriptor: int, size: int, width: int, *, can_drop: bool) -> list[float]:
    """Medians of `_time_rows` over repeats."""
    turns: list[tuple[float, ...]] = []
    start = time.perf_counter()
    while len(turns) < REPEATS and (not turns or time.perf_counter() - start < SECONDS):
        turns.append(_time_rows(descriptor, size, width, len(turns), can_drop=can_drop))
    return [float(seconds) for seconds in np.median(turns, axis=0)]


def _time_rows(
    descriptor: int, size: int, width: int, turn: int, *, can_drop: bool
) -> tuple[float, float, float, float]:
    """Seconds a row of: reading from disk, writing to disk, reading from the page cache, writing to it."""
    places = torch.from_numpy(np.random.default_rng([width, turn]).integers(0, size // width, READS)).unique()
    if can_drop:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(descriptor, size) as mapped:
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        rows = torch.frombuffer(mapped, dtype=torch.float32).view(-1, width // 4)
        times = [time.perf_counter()]
        found = rows.index_select(0, places)
        times.append(time.perf_counter())
        rows.index_copy_(0, places, found)
        mapped.flush()
        times.append(time.perf_counter())
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)
        times.append(time.perf_counter())
        found = rows.index_select(0, places)
        times.append(time.perf_counter())
        rows.index_copy_(0, places, found)
        times.append(time.perf_counter())
        del rows, found  # a mapping in use cannot be closed
    read, written, _, again, back = np.diff(times) / places.numel()
    return float(read), float(written), float(again), float(back)
