"""Measurement of this machine's rates, as `holdall hardware` runs it: a minute or two, or more where kernels are
compiled for a GPU.

It times the code that training runs: lookups and updates go through `EmbeddingBags` and `Optimizers`, the interaction
and the layers are those of the models. Every rate is a median of a few repeats; the first repeat is a warm-up.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from holdall.common.memory import available_memory
from holdall.optim.optimizer_kinds import MEASURED
from holdall.planning.machine import measure_dense
from holdall.planning.machine.clock import Clock
from holdall.planning.machine.hardware import Hardware, Line, device_kind, machine_identity, median_of
from holdall.planning.machine.measure_captured import measure_captured
from holdall.planning.machine.measure_collectives import measure_collectives
from holdall.planning.machine.measure_disk import measure_disk
from holdall.planning.machine.measure_initial_rows import initial_value_costs
from holdall.planning.machine.measure_pinned import pinned_rows
from holdall.planning.machine.measure_rows import ROW_BYTES, copy_rates, find_cost, row_rates
from holdall.planning.machine.measure_tables import compressed_table_costs, dense_table_costs, sample_dims
from holdall.planning.machine.transfer_path import PINNED, PINNED_DURING_STEPS
from holdall.runtime.allocator import keep_freed_memory

DIMS = (16, 64, 128)
PASSES = 3
LARGE_TABLE = 1 << 28
"""Bytes of a table that no cache holds."""


def hardware(
    device: str = "auto",
    *,
    folder: str | Path = ".",
    disk_bytes: int = 1 << 28,
    table_bytes: int = LARGE_TABLE,
    repeats: int = 5,
    passes: int = PASSES,
    now: Callable[[], float] = time.perf_counter,
    note: Callable[[str], None] = lambda stage: None,
    dims: Sequence[int] = DIMS,
    optimizers: Sequence[str] = MEASURED,
    precisions: Sequence[str] | None = None,
) -> Hardware:
    """Rates of this machine. `folder` is on the disk to measure, where a file of `disk_bytes` is made and removed.

    Everything is measured in several `passes`, and each rate is the median of them, since other load on a machine comes
    and goes. `now` is the clock; `note` is called with the name of each stage. Under torchrun, collectives are measured
    too. Fewer `dims`, `optimizers` and `precisions` take less time: on a GPU, most of it compiles kernels for each.
    """
    started = time.perf_counter()
    kind = torch.device(device_kind(device))
    keep_freed_memory()
    clock = Clock(kind, repeats, now=now)
    table_bytes = min(table_bytes, available_memory()["host"] // 8)
    found = []
    for number in range(passes):

        def note_pass(stage: str, which: str = f" ({number + 1} of {passes})" if passes > 1 else "") -> None:
            note(stage + which)

        found.append(_measure(clock, Path(folder), disk_bytes, table_bytes, note_pass, dims, optimizers, precisions))
    return replace(median_of(found), took_seconds=time.perf_counter() - started)


def _measure(
    device_clock: Clock,
    folder: Path,
    disk_bytes: int,
    table_bytes: int,
    note: Callable[[str], None],
    dims: Sequence[int],
    optimizers: Sequence[str],
    precisions: Sequence[str] | None,
) -> Hardware:
    """One pass; see `hardware`."""
    device, on_cpu = device_clock.device, device_clock.device.type == "cpu"
    host = replace(device_clock, device=torch.device("cpu"))
    # In a training step the dense part evicts tables from the caches, so tables and rows are timed with cold caches.
    cold_host, cold = replace(host, cold=True), replace(device_clock, cold=True)
    note("disk")
    gather, scatter, notes = measure_disk(folder, disk_bytes, ROW_BYTES)
    note("tables")
    tables = list(dense_table_costs(cold, table_bytes, dims, optimizers))
    host_tables = list(tables if on_cpu else dense_table_costs(cold_host, table_bytes, dims, optimizers))
    note("compressed tables")
    tables += list(compressed_table_costs(cold, dims))
    note("rows")
    for tier, clock in {"host": cold_host, "device": cold}.items():
        gather[tier], scatter[tier] = row_rates(clock, table_bytes)
    for tier in (PINNED, PINNED_DURING_STEPS):
        pinned = pinned_rows(device_clock, table_bytes, ROW_BYTES, during_steps=tier == PINNED_DURING_STEPS)
        if pinned is not None:
            gather[tier], scatter[tier] = pinned
    note("copies, layers, interaction")
    return Hardware(
        machine=machine_identity(),
        device="cpu" if on_cpu else "cuda",
        threads=torch.get_num_threads(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        took_seconds=0.0,
        tables=tuple(tables),
        host_tables=tuple(host_tables),
        gather=gather,
        scatter=scatter,
        copy=copy_rates(device_clock),
        find=find_cost(cold),
        begin=initial_value_costs(cold) if on_cpu else {},
        layers=tuple(measure_dense.layers(device_clock, precisions)),
        interactions=tuple(measure_dense.interactions(device_clock, precisions, sample_dims(dims))),
        stack=measure_dense.stacking(device_clock),
        dense_update=measure_dense.dense_updates(device_clock),
        read=measure_dense.read_cost(host) if on_cpu else Line(),  # on a GPU, part of `captured`
        overlap=measure_dense.overlap_cost(device_clock),
        call=measure_dense.call_cost(device_clock),
        stream=measure_dense.stream_cost(device_clock),
        captured=measure_captured(device_clock, folder),
        collectives=measure_collectives(device),
        notes=tuple(notes),
    )
