"""Free memory of the device (host memory when the device is a CPU), the host and a disk."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import torch


def available_memory(folder: str | Path = ".", device: str = "cpu") -> dict[str, int]:
    """Free bytes of each tier: `device` (the host's when it is a CPU), `host`, and `disk`, where `folder` is."""
    host = _free_host()
    on_device = torch.cuda.mem_get_info()[0] if device != "cpu" and torch.cuda.is_available() else host
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    return {"device": on_device, "host": host, "disk": shutil.disk_usage(existing).free}


def _free_host() -> int:
    """Memory available without swapping: that of the system, or less if a container limits it."""
    free = 1 << 62
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    groups = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no such limit, or "max"
        limit = int((groups / "memory.max").read_text(encoding="utf-8"))
        used = int((groups / "memory.current").read_text(encoding="utf-8"))
        for line in (groups / "memory.stat").read_text(encoding="utf-8").splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])  # the page cache, which the system reclaims on demand
        free = min(free, max(0, limit - used))
    return free
