"""Measured cost of initial values that are not stored but computed whenever a row is read or written (`LazyRows`)."""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.planning.machine.clock import Clock, fit
from holdall.planning.machine.hardware import Cost
from holdall.tiers.host_rows import HostRows, InitialValues, LazyRows

TABLES = 26
SHAPES = ((512, 16), (8192, 16), (8192, 64), (2048, 128))
"""Rows and numbers a row of the shapes that are timed."""


def initial_value_costs(clock: Clock) -> dict[str, Cost]:
    """Cost of adding initial values to rows that were read (`read`), and of removing them from rows to be written
    (`write`), on the device: by numbers and by rows."""
    generator = torch.Generator().manual_seed(3)
    points, read, written = [], [], []
    for num_rows, dim in SHAPES:
        all_rows = 64 * num_rows
        stored = LazyRows(
            HostRows(torch.zeros(all_rows, dim)),
            InitialValues(
                torch.arange(TABLES) * (all_rows // TABLES),
                torch.randint(1 << 62, (TABLES,), generator=generator),
                torch.ones(TABLES),
            ),
        )
        host_rows = torch.randint(all_rows, (num_rows,), generator=generator).unique()
        rows, values = host_rows.to(clock.device), torch.zeros(host_rows.numel(), dim, device=clock.device)

        def write(
            stored: LazyRows = stored, host_rows: Tensor = host_rows, rows: Tensor = rows, v: Tensor = values
        ) -> None:
            stored.encode(rows, v)
            stored.touched[host_rows] = True

        points.append((float(values.numel()), float(host_rows.numel())))
        read.append(clock(lambda stored=stored, rows=rows, values=values: stored.decode_(rows, values)))
        written.append(clock(write))
    return {"read": fit(points, read), "write": fit(points, written)}
