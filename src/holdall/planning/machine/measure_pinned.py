"""Measured rates of random rows in pinned host memory that a kernel on the device reads and writes in place."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from holdall.kernels.dispatch import HAS_TRITON
from holdall.planning.machine.clock import Clock, rising_line
from holdall.planning.machine.hardware import Line

COUNTS = (1 << 11, 1 << 15, 1 << 17)
"""Rows of one transfer."""


def pinned_rows(
    clock: Clock, table_bytes: int, row_bytes: tuple[int, ...], *, during_steps: bool = False
) -> tuple[dict[str, Line], dict[str, Line]] | None:
    """`(gather, scatter)` by bytes of a row, by kernels that have the whole device or run `during_steps`; None where
    there is no such kernel or no GPU."""
    if clock.device.type != "cuda" or not HAS_TRITON:
        return None
    generator = np.random.default_rng(3)
    found: dict[bool, dict[str, Line]] = {False: {}, True: {}}
    for width in row_bytes:
        table = torch.empty(min(table_bytes // width, 1 << 24), width // 4, pin_memory=True).zero_()
        counts = [min(count, len(table)) for count in COUNTS]
        for write_back in (False, True):

            def measure(table: Tensor = table, counts: list[int] = counts, back: bool = write_back) -> list[float]:
                return [_seconds(clock, table, count, generator, back, during_steps) for count in counts]

            found[write_back][str(width)] = rising_line(counts, measure, clock.seconds_of_rows(1, width))
    return found[False], found[True]


def _seconds(
    clock: Clock, table: Tensor, count: int, generator: np.random.Generator, write_back: bool, during_steps: bool
) -> float:
    """Seconds to transfer `count` random rows."""
    from holdall.kernels import host_rows_triton

    staging = torch.zeros(count, table.shape[1], device=clock.device)
    counts = torch.tensor([count, count, 0], dtype=torch.int32, device=clock.device)
    rows = torch.zeros(count, dtype=torch.int64, device=clock.device)
    step = len(table) // count
    shape = host_rows_triton.BESIDE_STEPS if during_steps else host_rows_triton.WHOLE_DEVICE

    def draw() -> None:
        drawn = np.arange(count) * step + generator.integers(0, step, count)  # distinct and ascending
        rows.copy_(torch.from_numpy(drawn))

    draw()
    return clock.replayed(
        lambda: host_rows_triton.copy_rows(table, rows, counts, staging, write_back=write_back, shape=shape), draw
    )
