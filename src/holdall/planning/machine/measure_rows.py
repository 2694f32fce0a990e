"""Measured rates of rows: random reads and writes, copies between host and device, and finding the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdall.common.sizes import readable_bytes
from holdall.common.threads import torch_threads
from holdall.kernels import host_rows
from holdall.kernels.dispatch import HAS_TRITON
from holdall.planning.machine.clock import Clock, fit, rising_line
from holdall.planning.machine.hardware import Cost, Line

ROW_BYTES = (4, 64, 256, 512)
"""Sizes of rows that are gathered: one number of optimizer state, and rows of dim 16, 64 and 128."""
FEATURES = 8
"""Features of the batches among whose lookups rows are found."""


def _ids(generator: np.random.Generator, rows: int, num_lookups: int, num_distinct: int) -> Any:
    """`num_lookups` ids, `num_distinct` of them distinct, in random order."""
    step = max(1, rows // num_distinct)  # spread over the table without a permutation of all its rows
    chosen = np.arange(num_distinct) * step + generator.integers(0, step, num_distinct)
    more = generator.integers(0, num_distinct, num_lookups - num_distinct)
    return generator.permutation(np.concatenate([chosen, chosen[more]])).astype(np.int32)


def row_rates(clock: Clock, table_bytes: int) -> tuple[dict[str, Line], dict[str, Line]]:
    """Reading and writing back random distinct rows of a table that no cache holds, by bytes of a row."""
    generator = np.random.default_rng(1)
    gather, scatter = {}, {}
    for row_bytes in ROW_BYTES:
        num_rows = min(table_bytes // row_bytes, 1 << 24)
        with torch_threads(1):  # threads that wait for cores make this many times slower
            table = torch.ones(num_rows, row_bytes // 4, device=clock.device)
        gather[str(row_bytes)], scatter[str(row_bytes)] = rates_of_table(clock, table, generator)
    return gather, scatter


def rates_of_table(clock: Clock, table: Tensor, generator: np.random.Generator) -> tuple[Line, Line]:
    """Reading and writing back random distinct rows of `table` [num_rows, numbers]."""
    num_rows, width = table.shape
    most = min(num_rows, 1 << 15 if clock.device.type == "cpu" else 1 << 19)
    counts = (most // 16, most)

    def draw(count: int) -> Tensor:
        return torch.from_numpy(np.sort(_ids(generator, num_rows, count, count)).astype(np.int64)).to(clock.device)

    def rows_and_values(count: int) -> tuple[Tensor, Tensor]:
        return draw(count), torch.zeros(count, width, device=clock.device)

    def seconds(way: str, count: int) -> float:
        least, what = clock.seconds_of_rows(count, 4 * width), f"{way} {count:,} random rows of {4 * width} bytes"
        if way == "reading":
            return clock(lambda rows: table.index_select(0, rows), lambda: draw(count), least=least, what=what)
        return clock(lambda given: table.index_copy_(0, *given), lambda: rows_and_values(count), least=least, what=what)

    def line(way: str) -> Line:
        return rising_line(counts, lambda: [seconds(way, n) for n in counts], clock.seconds_of_rows(1, 4 * width))

    return line("reading"), line("writing")


def copy_rates(clock: Clock) -> dict[str, Line]:
    """Copies between host and device; on a CPU, from memory to memory."""
    sizes = (1 << 18, 1 << 24)

    def line(make: Callable[[int], tuple[Tensor, Tensor]]) -> Line:
        pairs = [make(size) for size in sizes]

        def seconds(source: Tensor, target: Tensor) -> float:
            least = source.nbytes / clock.bandwidth
            what = f"copying {readable_bytes(source.nbytes)}"
            return clock(lambda: target.copy_(source, non_blocking=True), least=least, what=what)

        return rising_line(sizes, lambda: [seconds(*pair) for pair in pairs], 1 / clock.bandwidth)

    def pair(size: int, *, pinned: bool) -> tuple[Tensor, Tensor]:
        return torch.ones(size // 4, pin_memory=pinned), torch.ones(size // 4, device=clock.device)

    found = {
        "to_device": line(lambda size: pair(size, pinned=False)),
        "to_host": line(lambda size: pair(size, pinned=False)[::-1]),
    }
    if clock.device.type == "cuda":
        found["to_device_pinned"] = line(lambda size: pair(size, pinned=True))
        found["to_host_pinned"] = line(lambda size: pair(size, pinned=True)[::-1])
    return found


def find_cost(clock: Clock) -> Cost:
    """Cost of finding the rows to fetch: compare ids with the hot rows, make the others distinct, locate all of
    them."""
    generator = np.random.default_rng(2)
    points, seconds = [], []
    scale = 1 if clock.device.type == "cpu" else 16
    info = torch.tensor([[5, 0, 0]] * FEATURES, device=clock.device)
    for lookups, fetched in ((12, 10), (16, 14), (16, 11), (16, 0)):
        lookups, fetched = scale << lookups, scale << fetched if fetched else 0
        ids = np.concatenate([np.zeros(lookups - fetched, np.int64), 10 + generator.integers(0, 1 << 22, fetched)])
        values = torch.from_numpy(generator.permutation(ids).reshape(FEATURES, -1).astype(np.int32)).to(clock.device)
        points.append((lookups, fetched))
        seconds.append(clock.replayed(_find_operation(values, info, fetched)))
    return fit(points, seconds)


def _find_operation(values: Tensor, info: Tensor, num_fetched: int) -> Callable[[], Any]:
    """The operation that finds the rows of a batch to fetch: kernels that do not synchronize, where there are any."""
    if not (values.is_cuda and HAS_TRITON):
        return lambda: host_rows.find_host_rows(values, info, 5)[0].cpu()
    from holdall.kernels import host_rows_triton

    located = torch.empty(values.shape[1], values.shape[0], dtype=torch.int32, device=values.device)
    rows = torch.empty(max(16, num_fetched), dtype=torch.int64, device=values.device)
    counts = torch.empty(3, dtype=torch.int32, device=values.device)
    return lambda: host_rows_triton.find_host_rows(values, info, located, rows, counts, num_fetched + 16, 5)
