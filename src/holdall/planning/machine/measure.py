"""Measure this machine, once, in a minute or two, or more where kernels are compiled for a GPU: `holdall hardware`.

What is timed is what training runs: lookups and updates go through `EmbeddingBags` and `Optimizers`, the interaction
and layers are those of the models. Every figure is a median of a few repeats; the first one does not count.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdall.common.memory import available_memory
from holdall.data.batch import Ids
from holdall.data.zipf import Zipf
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels import host_rows
from holdall.kernels.dispatch import HAS_TRITON
from holdall.optim.optimizers import NAMES, OptimizerConfig, Optimizers
from holdall.planning.machine import measure_dense
from holdall.planning.machine.clock import Clock, fit, fit_line
from holdall.planning.machine.gather_path import PINNED, PINNED_BESIDE
from holdall.planning.machine.hardware import Cost, Hardware, Line, TableCost, device_kind, machine_identity, middle_of
from holdall.planning.machine.measure_captured import measure_captured
from holdall.planning.machine.measure_collectives import measure_collectives
from holdall.planning.machine.measure_disk import measure_disk
from holdall.planning.machine.measure_initial_rows import beginnings
from holdall.planning.machine.measure_pinned import pinned_rows
from holdall.planning.table_cost import COMPRESSED_ROWS, Chain, chain_of
from holdall.runtime.allocator import keep_freed_memory
from holdall.tables import Frobenius, Hashed, MemCom, Method, MixedDimension, QuotientRemainder, Robe, TensorTrain

ROW_BYTES = (4, 64, 256, 512)
"""Sizes of rows that are gathered: one number of optimizer state, and rows of dim 16, 64 and 128."""
DIMS = (16, 64, 128)
FEATURES = 8
"""Features of the table that lookups are timed with; they share it."""
PASSES = 3
LARGE_TABLE = 1 << 28
"""Bytes of a table that no cache holds."""
MANY_BYTES = 1 << 24
"""Vectors of the largest lookup that is timed, unless few make up more."""
COMPRESSED: tuple[Method, ...] = (
    TensorTrain(rank=8),
    TensorTrain(rank=32),
    Frobenius(rank=8, terms=4),
    Robe(size=1 << 18),
    Hashed(buckets=1 << 14),
    QuotientRemainder(buckets=1 << 10),
    MemCom(buckets=1 << 14),
    MixedDimension(dim=8),
)


def measure_hardware(
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
    optimizers: Sequence[str] = NAMES,
    precisions: Sequence[str] | None = None,
) -> Hardware:
    """Rates of this machine. `folder` is on the disk to measure, where a file of `disk_bytes` is made and removed.

    Everything is measured in several `passes`, and the middle of what they find counts: what others do on a machine
    comes and goes. `now` is the clock, `note` is told what is being measured. Under torchrun, collectives are measured
    too. Fewer `dims`, `optimizers` and `precisions` take less time, most of which a GPU spends on kernels that are
    compiled for each of them.
    """
    started = time.perf_counter()
    place = torch.device(device_kind(device))
    keep_freed_memory()
    clock = Clock(place, repeats, now=now)
    table_bytes = min(table_bytes, available_memory()["host"] // 8)
    found = []
    for number in range(passes):

        def tell(stage: str, which: str = f" ({number + 1} of {passes})" if passes > 1 else "") -> None:
            note(stage + which)

        found.append(_measure(clock, Path(folder), disk_bytes, table_bytes, tell, dims, optimizers, precisions))
    return replace(middle_of(found), took_seconds=time.perf_counter() - started)


def _measure(
    near: Clock,
    folder: Path,
    disk_bytes: int,
    table_bytes: int,
    note: Callable[[str], None],
    dims: Sequence[int],
    optimizers: Sequence[str],
    precisions: Sequence[str] | None,
) -> Hardware:
    """One pass; see `measure_hardware`."""
    place, on_cpu = near.device, near.device.type == "cpu"
    host = replace(near, device=torch.device("cpu"))
    cold_host, cold = replace(host, cold=True), replace(near, cold=True)  # the dense part has used the caches since
    note("disk")
    gather, scatter, notes = measure_disk(folder, disk_bytes, ROW_BYTES)
    note("tables")
    tables = list(_dense_tables(cold, table_bytes, dims, optimizers))
    host_tables = list(tables if on_cpu else _dense_tables(cold_host, table_bytes, dims, optimizers))
    note("compressed tables")
    tables += list(_compressed_tables(cold, dims))
    note("rows")
    for tier, clock in {"host": cold_host, "device": cold}.items():
        gather[tier], scatter[tier] = _rows(clock, table_bytes)
    for tier in (PINNED, PINNED_BESIDE):
        reached = pinned_rows(near, table_bytes, ROW_BYTES, beside=tier == PINNED_BESIDE)
        if reached is not None:
            gather[tier], scatter[tier] = reached
    note("copies, layers, interaction")
    return Hardware(
        machine=machine_identity(),
        device=place.type,
        threads=torch.get_num_threads(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        took_seconds=0.0,
        tables=tuple(tables),
        host_tables=tuple(host_tables),
        gather=gather,
        scatter=scatter,
        copy=_copies(near),
        find=_find(cold),
        begin=beginnings(cold) if on_cpu else {},
        layers=tuple(measure_dense.layers(near, precisions)),
        interactions=tuple(measure_dense.interactions(near, precisions, _some(dims))),
        stack=measure_dense.stacking(near),
        dense_update=measure_dense.dense_updates(near),
        read=measure_dense.read_cost(host) if on_cpu else Line(),  # part of `captured`
        overlap=measure_dense.overlap_cost(near),
        call=measure_dense.call_cost(near),
        stream=measure_dense.stream_cost(near),
        captured=measure_captured(near, folder),
        collectives=measure_collectives(place),
        notes=tuple(notes),
    )


# --- tables ----------------------------------------------------------------------------------------------------------


def _dense_tables(
    clock: Clock, table_bytes: int, dims: Sequence[int], optimizers: Sequence[str]
) -> Iterator[TableCost]:
    for dim in dims:
        bags = _bags(clock, None, max(1024, table_bytes // (4 * dim)), dim)
        for optimizer in optimizers:
            yield _table_cost(clock, bags, None, optimizer)


def _some(dims: Sequence[int]) -> tuple[int, ...]:
    """Of dims, those that stand for the others in what is measured for few."""
    return tuple(dims)[:2]


def _compressed_tables(clock: Clock, dims: Sequence[int]) -> Iterator[TableCost]:
    for method, dim in product(COMPRESSED, _some(dims)):
        if isinstance(method, MixedDimension) and method.dim >= dim:
            continue
        yield _table_cost(clock, _bags(clock, method, COMPRESSED_ROWS, dim), method, "rowwise_adagrad")


def _bags(clock: Clock, method: Method | None, rows: int, dim: int) -> EmbeddingBags:
    """A table to time: as one feature when it is compressed, since each is looked up by itself; else as several."""
    features = {f"f{i}": "t" for i in range(FEATURES if method is None else 1)}
    return EmbeddingBags.build({"t": rows}, dim, method, features=features, device=clock.device)


def _table_cost(clock: Clock, bags: EmbeddingBags, method: Method | None, optimizer: str) -> TableCost:
    """Fit the cost of one kind of table to a few batches of different size and repetition."""
    rows = bags.table("t").num_rows
    optimizers = Optimizers(bags, OptimizerConfig(name=optimizer, lr=1e-3))  # type: ignore[arg-type]
    many = 1 << 15 if clock.device.type == "cpu" else 1 << 17
    many = many if method is None else many // FEATURES
    points, lookups, updates = [], [], []
    shapes = (  # lookups, ids, skew
        (many // 8, rows, 1.05),
        (many, many // 4, 1.05),  # as of many small tables
        (many, rows, 1.05),
        (many, rows, 0.5),
        (max(many, min(4 * many, MANY_BYTES // (4 * bags.dim))), many, 1.05),  # more vectors than caches hold
    )
    for num_lookups, num_ids, exponent in shapes:
        drawn = np.random.default_rng(0).random((clock.repeats + 1) * num_lookups)
        ids = Zipf(min(num_ids, rows), exponent).ranks(drawn).reshape(-1, num_lookups)
        lookup, update = _time_step(clock, bags, optimizers, ids.astype(np.int32))
        points.append((num_lookups, _work_of(ids, None if method is None else chain_of(method, rows, bags.dim))))
        lookups.append(lookup)
        updates.append(update)
    document = {"method": "dense"} if method is None else method.to_json()
    return TableCost(document, bags.dim, optimizer, fit(points, lookups), fit(points, updates))


def _work_of(ids: Any, chain: Chain | None) -> float:
    """Different ids of a batch, on average; for a tensor train, the products that they take."""
    rows = float(np.mean([len(np.unique(batch)) for batch in ids]))
    if chain is None:
        return rows
    return chain.products(float(np.mean([len(np.unique(batch // chain.block)) for batch in ids])), rows)


def _time_step(clock: Clock, bags: EmbeddingBags, optimizers: Optimizers, ids: Any) -> tuple[float, float]:
    """Median seconds of the lookup, and of its backward and update, over batches `ids` [repeats, lookups]."""
    if clock.device.type == "cuda":
        return _time_captured(clock, bags, optimizers, ids)
    size = ids.shape[1] // bags.num_features
    lookups: list[float] = []
    updates: list[float] = []
    grad = torch.full((size, bags.num_features, bags.dim), 1e-3, device=clock.device)
    while clock.goes_on(updates):
        values = torch.from_numpy(ids[len(updates)].reshape(bags.num_features, size)).to(clock.device)
        clock.cool()
        clock.wait()
        start = clock.now()
        vectors = bags(Ids(values, None, bags.num_features))
        clock.wait()
        lookups.append(clock.now() - start)
        clock.cool()
        clock.wait()
        start = clock.now()
        vectors.backward(grad)
        optimizers.step()
        clock.wait()
        updates.append(clock.now() - start)
    return float(np.median(lookups[1:])), float(np.median(updates[1:]))


def _time_captured(clock: Clock, bags: EmbeddingBags, optimizers: Optimizers, ids: Any) -> tuple[float, float]:
    """The same where steps are captured: the lookup, and what the whole takes longer."""
    size = ids.shape[1] // bags.num_features
    batches = [torch.from_numpy(batch.reshape(bags.num_features, size)).to(clock.device) for batch in ids]
    values = batches[0].clone()
    grad = torch.full((size, bags.num_features, bags.dim), 1e-3, device=clock.device)

    def change() -> None:
        batches.append(batches.pop(0))
        values.copy_(batches[0])
        optimizers.prepare()

    def lookup() -> Tensor:
        return bags(Ids(values, None, bags.num_features))

    def whole() -> None:
        lookup().backward(grad)
        optimizers.apply()

    optimizers.prepare()
    looked_up = clock.replayed(lookup, change)
    taken = clock.replayed(whole, change)
    optimizers.zero_grad()  # of what may have been broken off
    return looked_up, max(1e-9, taken - looked_up)


def _ids(generator: np.random.Generator, rows: int, num_lookups: int, num_distinct: int) -> Any:
    """Ids of which `num_distinct` are different, in random order."""
    step = max(1, rows // num_distinct)  # spread over the table, without a permutation of all its rows
    chosen = np.arange(num_distinct) * step + generator.integers(0, step, num_distinct)
    more = generator.integers(0, num_distinct, num_lookups - num_distinct)
    return generator.permutation(np.concatenate([chosen, chosen[more]])).astype(np.int32)


# --- rows and copies -------------------------------------------------------------------------------------------------


def _rows(clock: Clock, table_bytes: int) -> tuple[dict[str, Line], dict[str, Line]]:
    """Reading and writing back random distinct rows of a table that no cache holds, by bytes of a row."""
    generator = np.random.default_rng(1)
    gather, scatter = {}, {}
    for row_bytes in ROW_BYTES:
        num_rows = min(table_bytes // row_bytes, 1 << 24)
        counts = (min(num_rows, 1 << 15) // 16, min(num_rows, 1 << 15))
        table = torch.ones(num_rows, row_bytes // 4, device=clock.device)

        def draw(count: int, num_rows: int = num_rows) -> Tensor:
            return torch.from_numpy(np.sort(_ids(generator, num_rows, count, count)).astype(np.int64)).to(clock.device)

        def read(rows: Tensor, table: Tensor = table) -> Tensor:
            return table.index_select(0, rows)

        def write(given: tuple[Tensor, Tensor], table: Tensor = table) -> None:
            table.index_copy_(0, *given)

        def updated(count: int, width: int = row_bytes // 4) -> tuple[Tensor, Tensor]:
            return draw(count), torch.zeros(count, width, device=clock.device)

        gather[str(row_bytes)] = fit_line(counts, [clock(read, lambda n=n: draw(n)) for n in counts])  # type: ignore[misc]
        scatter[str(row_bytes)] = fit_line(counts, [clock(write, lambda n=n: updated(n)) for n in counts])  # type: ignore[misc]
    return gather, scatter


def _copies(clock: Clock) -> dict[str, Line]:
    """Copies between host and device; on a CPU, of memory to memory, which is what stands for them there."""
    sizes = (1 << 18, 1 << 24)

    def line(make: Callable[[int], tuple[Tensor, Tensor]]) -> Line:
        taken = []
        for size in sizes:
            source, target = make(size)
            taken.append(clock(lambda source=source, target=target: target.copy_(source, non_blocking=True)))  # type: ignore[misc]
        return fit_line(sizes, taken)

    def there(size: int, *, pinned: bool) -> tuple[Tensor, Tensor]:
        return torch.ones(size // 4, pin_memory=pinned), torch.ones(size // 4, device=clock.device)

    found = {
        "to_device": line(lambda size: there(size, pinned=False)),
        "to_host": line(lambda size: there(size, pinned=False)[::-1]),
    }
    if clock.device.type == "cuda":
        found["to_device_pinned"] = line(lambda size: there(size, pinned=True))
        found["to_host_pinned"] = line(lambda size: there(size, pinned=True)[::-1])
    return found


def _find(clock: Clock) -> Cost:
    """What `TieredPack.needed` does: compare ids with the hot rows, make the far ones distinct, say where all are."""
    generator = np.random.default_rng(2)
    points, seconds = [], []
    scale = 1 if clock.device.type == "cpu" else 16
    info = torch.tensor([[5, 0, 0]] * FEATURES, device=clock.device)
    for lookups, far in ((12, 10), (16, 14), (16, 11), (16, 0)):
        lookups, far = scale << lookups, scale << far if far else 0
        ids = np.concatenate([np.zeros(lookups - far, np.int64), 10 + generator.integers(0, 1 << 22, far)])
        values = torch.from_numpy(generator.permutation(ids).reshape(FEATURES, -1).astype(np.int32)).to(clock.device)
        points.append((lookups, far))
        seconds.append(clock.replayed(_finding(values, info, far)))
    return fit(points, seconds)


def _finding(values: Tensor, info: Tensor, far: int) -> Callable[[], Any]:
    """What finds the far rows of a batch: kernels that wait for nothing, where there are any."""
    if not (values.is_cuda and HAS_TRITON):
        return lambda: host_rows.find_host_rows(values, info, 5)[0].cpu()
    from holdall.kernels import host_rows_triton

    located = torch.empty(values.shape[1], values.shape[0], dtype=torch.int32, device=values.device)
    rows = torch.empty(max(16, far), dtype=torch.int64, device=values.device)
    counts = torch.empty(3, dtype=torch.int32, device=values.device)
    return lambda: host_rows_triton.find_host_rows(values, info, located, rows, counts, far + 16, 5)
