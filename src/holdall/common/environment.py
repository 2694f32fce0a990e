"""Environment of a measurement: versions, hardware and commit, for run folders and benchmark cards.

It has no user name, no host name and no absolute path.
"""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from holdall import __version__

PACKAGES = ("torch", "numpy", "polars", "pyarrow", "safetensors", "triton")
GIB = 1 << 30


def environment() -> dict[str, Any]:
    """`{"versions": ..., "hardware": ..., "commit": ..., "dirty": ...}`; the commit is None outside a git checkout."""
    return {"versions": versions(), "hardware": hardware(), **checkout()}


def versions() -> dict[str, str]:
    """Versions of Python, Holdall and the packages that numbers depend on; those not installed are left out."""
    found = {"python": platform.python_version(), "holdall": __version__}
    for package in PACKAGES:
        version = _installed(package)
        if version is not None:
            found[package] = version
    found["torch"] = torch.__version__  # has the build (+cpu, +cu130) that the installed name may lack
    return found


@cache
def _installed(package: str) -> str | None:
    """Version of a package, read once: the file that has it is parsed for tens of milliseconds."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory it may use, accelerators."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "num_gpus": torch.cuda.device_count(),
    }


def checkout() -> dict[str, Any]:
    """Commit of the git checkout this package runs from, and whether files differ from it.

    A package installed into an environment inside some other repository has no commit. Benchmark cards do not count as
    differences: writing one would make the next one dirty. A process asks git once: the code it runs stays the same.
    """
    commit, dirty = _commit_of(Path(__file__).resolve().parents[1])
    return {"commit": commit, "dirty": dirty}


@cache
def _commit_of(package: Path) -> tuple[str | None, bool | None]:
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / "holdall" != package:
        return None, None
    commit = _git(package, "rev-parse", "HEAD")
    changes = _git(Path(top), "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    """Physical memory, or the container's limit where that is less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    with suppress(OSError, ValueError):  # no cgroup, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return round(total / GIB, 1)
