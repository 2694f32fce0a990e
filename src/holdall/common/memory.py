"""What this machine has left: memory of its device, of the host, and of a disk. Asked before anything is allocated."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from holdall.common.errors import ConfigError
from holdall.common.sizes import readable_bytes

if TYPE_CHECKING:
    from holdall.planning.plan import Plan


def available_memory(folder: str | Path = ".", device: str = "cpu") -> dict[str, int]:
    """Free bytes of each tier: `device` (the host's when it is a CPU), `host`, and `disk`, where `folder` is."""
    host = _free_host()
    near = torch.cuda.mem_get_info()[0] if device != "cpu" and torch.cuda.is_available() else host
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    return {"device": near, "host": host, "disk": shutil.disk_usage(existing).free}


def _free_host() -> int:
    """Memory that can be had without swapping: the system's, or what a container leaves."""
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
                used -= int(line.split()[1])  # pages of files, which the system takes back when it needs to
        free = min(free, max(0, limit - used))
    return free


def check_room(plan: Plan, folder: str | Path = ".", num_processes: int = 1) -> None:
    """Raise unless this machine has the device, and the free memory, that a plan needs; `folder` is on the plan's disk.

    Where the device is the CPU, what the plan puts on both comes out of one memory. A plan's bytes are those of one of
    the `num_processes` that share this machine; each has a GPU of its own.
    """
    if plan.forecast is None:
        return
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "the plan is for a GPU and this machine has none that torch can use: plan again here, with the hardware "
            "measured here"
        )
    free = available_memory(folder, plan.device)
    needed = {tier: plan.forecast.total(tier) for tier in ("device", "host", "disk")}
    for tier in ("host", "disk") if plan.device == "cuda" else tuple(needed):
        needed[tier] *= num_processes
    if plan.device == "cpu":
        needed["host"] += needed.pop("device")
    for tier, size in needed.items():
        if size > free[tier]:
            where = f"the disk at {folder}" if tier == "disk" else f"the {tier}"
            raise ConfigError(
                f"the plan needs {readable_bytes(size)} of {where}, which has {readable_bytes(free[tier])} free "
                f"({readable_bytes(size - free[tier])} too little): free some, or plan with --{tier}-memory "
                f"{readable_bytes(free[tier]).replace(' ', '')}"
            )
