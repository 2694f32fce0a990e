"""Measurement of this machine's rates, as `holdall hardware` runs it: at most a minute on a CPU, ten seconds with
`quick`, and more on a GPU, for which kernels are compiled.

It times the code that training runs: lookups and updates go through `EmbeddingBags` and `Optimizers`, the interaction
and the layers are those of the models. All rates are measured once, then again in further passes until the time is up;
each is the median of the passes.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from holdall.common.memory import available_memory
from holdall.common.threads import torch_threads
from holdall.optim.optimizer_kinds import MEASURED
from holdall.planning.machine import measure_dense
from holdall.planning.machine.clock import Clock, OutOfTimeError
from holdall.planning.machine.conditions import LoadWatch, spread
from holdall.planning.machine.hardware import Hardware, Line, device_kind, machine_identity, median_of
from holdall.planning.machine.measure_captured import measure_captured
from holdall.planning.machine.measure_collectives import measure_collectives
from holdall.planning.machine.measure_disk import Rates, measure_disk
from holdall.planning.machine.measure_initial_rows import initial_value_costs
from holdall.planning.machine.measure_pinned import pinned_rows
from holdall.planning.machine.measure_rows import ROW_BYTES, copy_rates, find_cost, row_rates
from holdall.planning.machine.measure_tables import compressed_table_costs, dense_table_costs, sample_dims
from holdall.planning.machine.transfer_path import PINNED, PINNED_DURING_STEPS
from holdall.runtime.allocator import keep_freed_memory

DIMS = (16, 64, 128)
PASSES = 9
"""Passes, at most: more change a median little."""
REPEATS = {"cpu": 2, "cuda": 5}
LARGE_TABLE = 1 << 28
"""Bytes of a table that no cache holds."""
SECONDS = {"cpu": 60.0, "cuda": 300.0}
QUICK_SECONDS = {"cpu": 10.0, "cuda": 90.0}
START_SECONDS = 3.0
"""Seconds of those that are left to importing, loading and printing."""
STAGES = {"tables": 0.3, "compressed tables": 0.5}
"""Share of the time after which the first pass leaves out sizes of a stage; the other stages have what is left."""
QUICK = "measured with --quick: fewer sizes, fewer repeats, rougher forecasts"
LATE = "the time was up before all sizes were measured once: rougher forecasts"
BANDWIDTH_MARGIN = 4.0
"""Bytes a second that caches may add to what memory delivers in order; no rate is beyond it."""

Note = Callable[[str], None]


def hardware(
    device: str = "auto",
    *,
    folder: str | Path = ".",
    disk_bytes: int = 1 << 28,
    table_bytes: int = LARGE_TABLE,
    repeats: int | None = None,
    passes: int = PASSES,
    seconds: float | None = None,
    quick: bool = False,
    now: Callable[[], float] = time.perf_counter,
    note: Note = lambda stage: None,
    dims: Sequence[int] = DIMS,
    optimizers: Sequence[str] = MEASURED,
    precisions: Sequence[str] | None = None,
) -> Hardware:
    """Rates of this machine. `folder` is on the disk to measure, where a file of `disk_bytes` is made and removed.

    Everything is measured once, and again in up to `passes` passes while no more than `seconds` have gone by, of which
    a rate is the median, since other load on a machine comes and goes. Once the time is up, sizes are left out that
    others stand for, as `quick` does from the start. Rates that no machine can have are measured again, then refused.
    `conditions` of the result say how busy the machine was.

    `now` is the clock; `note` is called with the name of each stage. Under torchrun, collectives are measured too.
    Fewer `dims`, `optimizers` and `precisions` take less time: on a GPU, most of it compiles kernels for each.
    """
    started = now()
    kind = torch.device(device_kind(device))
    keep_freed_memory()
    if quick:
        passes, dims = 1, sample_dims(dims)
        disk_bytes, table_bytes = min(disk_bytes, 1 << 26), min(table_bytes, 1 << 26)
    table_bytes = min(table_bytes, available_memory()["host"] // 8)
    limit = (time_limit(kind.type, quick=quick) if seconds is None else seconds) - START_SECONDS
    repeats = REPEATS[kind.type] if repeats is None else repeats
    watch = LoadWatch()
    with torch_threads():
        clock = Clock(kind, repeats, now=now, deadline=started + limit)
        note("memory")
        stream = measure_dense.stream_cost(clock)
        clock = replace(clock, bandwidth=BANDWIDTH_MARGIN * stream)
        note("disk")
        disk = measure_disk(Path(folder), disk_bytes, ROW_BYTES, clock)
        deadlines = {stage: started + share * limit for stage, share in STAGES.items()}
        scope = Scope(Path(folder), table_bytes, tuple(dims), tuple(optimizers), precisions, disk, stream, quick)
        found = _measure_passes(clock, scope, deadlines, passes, note)
    late = len(found) == 1 and clock.is_late()
    return replace(
        median_of(found),
        collectives=measure_collectives(kind),  # not in a pass: all ranks must take part as often
        took_seconds=now() - started,
        conditions=watch.conditions(passes=len(found), quick=quick, spread=spread(found)),
        notes=(*disk[2], *((QUICK,) if quick else ()), *((LATE,) if late else ())),
    )


def time_limit(device: str, *, quick: bool = False) -> float:
    """Seconds that measuring a device takes at most, on a machine that is not busy."""
    return (QUICK_SECONDS if quick else SECONDS)[device]


@dataclass(frozen=True)
class Scope:
    """Sizes that are measured, and what is measured once for all passes."""

    folder: Path
    table_bytes: int
    dims: tuple[int, ...]
    optimizers: tuple[str, ...]
    precisions: Sequence[str] | None
    disk: tuple[Rates, Rates, list[str]]
    stream: float
    quick: bool
    deadlines: Mapping[str, float] = field(default_factory=dict)
    """By stage, where it is not that of the clock."""


def _measure_passes(
    clock: Clock, scope: Scope, deadlines: Mapping[str, float], passes: int, note: Note
) -> list[Hardware]:
    """Passes until the time is up, one at least; a first one that left out sizes counts only if it is the only one."""
    found = [_measure(clock, replace(scope, deadlines=deadlines), _numbered(note, 1, passes))]
    later = replace(clock, must_finish=False)
    with suppress(OutOfTimeError):
        while len(found) < passes and not clock.is_late():
            found.append(_measure(later, scope, _numbered(note, len(found) + 1, passes)))
    return [one for one in found if _sizes(one) == _sizes(found[-1])]


def _sizes(measured: Hardware) -> tuple[int, ...]:
    """Numbers of the sizes that were measured."""
    layers, interactions = measured.layers, measured.interactions
    return (len(measured.tables), len(layers), len(interactions), len(layers[0].seconds), len(interactions[0].seconds))


def _numbered(note: Note, number: int, passes: int) -> Note:
    """`note` with the number of the pass."""
    return note if passes == 1 else lambda stage: note(f"{stage} (pass {number})")


def _measure(device_clock: Clock, scope: Scope, note: Note) -> Hardware:
    """One pass; see `hardware`."""
    on_cpu, quick = device_clock.device.type == "cpu", scope.quick
    dims, table_bytes = scope.dims, scope.table_bytes
    host = replace(device_clock, device=torch.device("cpu"))
    # In a training step the dense part evicts tables from the caches, so tables and rows are timed with cold caches.
    cold_host, cold = replace(host, cold=True), replace(device_clock, cold=True)
    gather, scatter = dict(scope.disk[0]), dict(scope.disk[1])

    def until(stage: str, clock: Clock) -> Clock:
        return replace(clock, deadline=scope.deadlines.get(stage, clock.deadline))

    note("tables")
    timer = until("tables", cold)
    tables = list(dense_table_costs(timer, table_bytes, dims, scope.optimizers, quick=quick))
    host_tables = list(
        tables
        if on_cpu
        else dense_table_costs(until("tables", cold_host), table_bytes, dims, scope.optimizers, quick=quick)
    )
    note("compressed tables")
    tables += list(compressed_table_costs(until("compressed tables", cold), dims, quick=quick))
    note("rows")
    gather["host"], scatter["host"] = row_rates(cold_host, table_bytes)
    gather["device"], scatter["device"] = (gather["host"], scatter["host"]) if on_cpu else row_rates(cold, table_bytes)
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
        layers=tuple(measure_dense.layers(device_clock, scope.precisions, quick=quick)),
        interactions=tuple(measure_dense.interactions(device_clock, scope.precisions, sample_dims(dims))),
        stack=measure_dense.stacking(device_clock),
        dense_update=measure_dense.dense_updates(device_clock),
        read=measure_dense.read_cost(host) if on_cpu else Line(),  # on a GPU, part of `captured`
        overlap=measure_dense.overlap_cost(device_clock),
        call=measure_dense.call_cost(device_clock),
        stream=scope.stream,
        captured=measure_captured(device_clock, scope.folder),
    )
