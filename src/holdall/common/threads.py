"""Threads for the operations of torch: as many as this process has cores, by affinity and by cgroup quota."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SET_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which people and torchrun choose the number of threads themselves."""


def available_cores(cgroup: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use: those of its affinity, at most its cgroup's quota (v1 and v2), rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for quota in (_quota(folder) for folder in _folders(cgroup, process)) if quota is not None]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas)]))


def _folders(cgroup: Path, process: Path) -> list[Path]:
    """Folders of the cgroups of this process and of those around them, of both versions."""
    found = [cgroup, cgroup / "cpu", cgroup / "cpu,cpuacct"]
    for line in _read(process).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        roots = [cgroup] if not controllers else [cgroup / controllers] if "cpu" in controllers.split(",") else []
        parts = Path(path).parts[1:]
        found += [root.joinpath(*parts[:depth]) for root in roots for depth in range(1, len(parts) + 1)]
    return found


def _quota(folder: Path) -> float | None:
    """Cores of time that a cgroup may use; None if it has no limit."""
    numbers = _read(folder / "cpu.max").split()
    numbers = numbers or [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
    try:
        quota, period = (int(number) for number in numbers)
    except ValueError:  # "max", or no such files
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@contextmanager
def torch_threads(chosen: int | None = None) -> Iterator[int]:
    """Context with `chosen` threads; when None, with at most the cores of this process, unless a variable set them.

    Several processes of a host divide its cores. A smaller number that was set before stays.
    """
    before = torch.get_num_threads()
    if chosen is None and any(os.environ.get(name) for name in SET_BY):
        chosen = before
    elif chosen is None:
        processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        chosen = min(before, max(1, available_cores() // processes))
    torch.set_num_threads(chosen)
    try:
        yield chosen
    finally:
        torch.set_num_threads(before)
