"""Choice of the row mover of a pack: kernels or host copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdall.common.errors import ConfigError
from holdall.common.memory import available_memory
from holdall.common.sizes import readable_bytes
from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED
from holdall.tiers.copy_mover import CopyMover
from holdall.tiers.host_rows import HostRows
from holdall.tiers.kernel_mover import KernelMover
from holdall.tiers.row_mover import RowMover
from holdall.tiers.tiered_storage import TieredStorage

KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of rows that the kernels move."""
KernelIsFaster = Callable[[int, int], bool]
"""Whether kernels move rows of so many bytes, so many of them, faster than host copies do."""
TYPICAL_ROWS = 1 << 15
"""Rows of a step at which the two movers are compared."""


def always(row_bytes: int, num_rows: int) -> bool:
    """Prefer kernels where nothing was measured: they leave the host free."""
    return True


def make_mover(pack: TieredStorage, fetch_by: str, kernel_is_faster: KernelIsFaster = always) -> RowMover[Any]:
    """The mover that `fetch_by` (`auto`, `kernel` or `copy`) asks for."""
    by_kernels = uses_kernels(fetch_by, pack.host_rows, pack.device, kernel_is_faster)
    return KernelMover(pack) if by_kernels else CopyMover(pack)


def uses_kernels(
    fetch_by: str, rows: HostRows, device: torch.device, kernel_is_faster: KernelIsFaster = always
) -> bool:
    """Whether kernels move these rows: with `kernel`, and with `auto` where they can and are faster.

    A `kernel` that is not possible is an error.
    """
    if fetch_by not in ("auto", "kernel", "copy"):
        raise ConfigError(f"rows are fetched by auto, kernel or copy, not {fetch_by!r}")
    if fetch_by == "copy":
        return False
    why_not = why_not_by_kernels(rows, device)
    needed = rows.tensor.nbytes
    free = available_memory()["host"]
    if why_not is None and needed > free and device.type == "cuda":
        why_not = f"{readable_bytes(needed)} of rows must be pinned in memory, and {readable_bytes(free)} are free"
    if fetch_by == "kernel" and why_not is not None:
        raise ConfigError(f"--fetch-by kernel is not possible, {why_not}: use auto or copy")
    if fetch_by == "kernel":
        return True
    fits = why_not is None and device.type == "cuda" and needed <= free // 2
    return fits and kernel_is_faster(rows.tensor[:1].nbytes, TYPICAL_ROWS)


def why_not_by_kernels(rows: HostRows, device: torch.device) -> str | None:
    """Why kernels on a device cannot move these rows; None when they can."""
    if not HAS_TRITON:
        return "Triton is not installed (pip install 'holdall[triton]')"
    if device.type != "cuda" and not INTERPRETED:
        return f"the device is {device}"
    if rows.on_disk:
        return "the rows are on disk"
    if rows.tensor.dtype not in KERNEL_TYPES:
        return f"its kernels do not move rows of {rows.tensor.dtype}"
    return None
