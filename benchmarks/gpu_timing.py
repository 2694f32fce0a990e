"""What the GPU benchmarks share: the ids of DLRM-small, device timing, and the measured ceilings."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.data.synthetic import PRESETS
from holdall.data.zipf import Zipf
from holdall.tables import Frobenius, Method

CARDINALITIES = PRESETS["criteo-1tb"].cardinalities
DIM = 128
NUM_DENSE = 13
SKEW = 1.05
BATCH = 65_536
LARGEST = sorted(range(len(CARDINALITIES)), key=lambda i: -CARDINALITIES[i])[:5]
"""Positions of the five largest tables, 31.5 of 33.2 million rows."""


def stored_as(tables: str) -> dict[str, Method]:
    """How tables are stored: all "dense", or the five largest as "frobenius" (8, 4)."""
    assert tables in ("dense", "frobenius")
    return {} if tables == "dense" else {f"C{i + 1}": Frobenius(rank=8, terms=4) for i in LARGEST}


@functools.lru_cache(maxsize=32)
def skewed_ids(size: int, seed: int) -> Tensor:
    """Ids [26, B] on the GPU, each feature drawn from a Zipf distribution over its cardinality."""
    rng = numpy.random.default_rng(seed)
    columns = [Zipf(num_rows, SKEW).ranks(rng.random(size)) for num_rows in CARDINALITIES]
    return torch.from_numpy(numpy.stack(columns, axis=1).astype(numpy.int32)).cuda().t()


def dlrm_small_schema() -> Schema:
    """Thirteen dense columns and 26 one-hot features."""
    return Schema(
        label="label",
        dense=tuple(DenseColumn(name=f"I{i + 1}") for i in range(NUM_DENSE)),
        features=tuple(
            Feature(name=f"C{i + 1}", num_rows=rows, unseen=rows - 1) for i, rows in enumerate(CARDINALITIES)
        ),
        splits={},
    )


def alternate_on_device(
    sides: Mapping[str, Callable[[], Any]], *, repeats: int = 15, inner: int = 4, warmup: int = 3
) -> dict[str, float]:
    """Median milliseconds of one call of each side, taken in turn; `inner` calls between two device events."""
    for run in sides.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in list(sides) if repeat % 2 == 0 else reversed(list(sides)):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for _ in range(inner):
                sides[side]()
            stop.record()
            torch.cuda.synchronize()
            times[side].append(start.elapsed_time(stop) / inner)
    return {side: statistics.median(values) for side, values in times.items()}


def captured(step: Callable[[], Any], warmup: int = 3) -> Callable[[], Any]:
    """`step` as one CUDA graph: the same kernels on the same memory, launched at once; its result is overwritten."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def ceilings() -> dict[str, float]:
    """Measured copy bandwidth (bytes read plus written a second) and bf16 matrix rate of this device."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    other = torch.randn_like(matrix)
    times = alternate_on_device({"copy": lambda: target.copy_(source), "product": lambda: matrix @ other}, repeats=5)
    return {
        "bytes_per_second": 2 * source.numel() * 4 / times["copy"] * 1e3,
        "bf16_flops_per_second": 2 * 8192**3 / times["product"] * 1e3,
    }


def profile(step: Callable[[], Any], calls: int = 3) -> list[dict[str, Any]]:
    """Milliseconds a call of the kernels that take longest."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
    rows = [
        {"kernel": event.key[:80], "ms": event.self_device_time_total / 1e3 / calls, "launches": event.count / calls}
        for event in found.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row["ms"])[:16]


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())
