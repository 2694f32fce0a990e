"""A machine with round numbers, and tables whose lookups are known."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.optim.optimizer_kinds import MEASURED
from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.machine.hardware import (
    Captured,
    CollectiveRates,
    Cost,
    Hardware,
    Interaction,
    Layer,
    Line,
    TableCost,
    machine_identity,
)

ELSEWHERE = {"id": "another", "cpu": "abacus", "cores": 1, "memory_gib": 1, "gpu": None, "num_gpus": 0}

CAPTURED = Captured(
    launch_step=Line(1e-4, 1e-9),
    launch_far=Line(4e-4, 2e-9),
    launch_layers=Line(2e-4, 5e-5),
    copied=Cost(2e-3, 1e-9, 4e-7),
)
"""Host costs of a made-up GPU."""


def _rising(work: int) -> dict[str, float]:
    return {str(samples): 1e-10 * work * samples for samples in (1, 1000)}


def hardware(**changes: Any) -> Hardware:
    """A row of 64 bytes costs 10 ns to look up, 1 us to bring from the host or back, 100 us from disk."""
    dense = tuple(
        TableCost({"method": "dense"}, dim, optimizer, Cost(0.0, 1e-8, 0.0), Cost(0.0, 2e-8, 0.0))
        for dim, optimizer in product((4, 64), MEASURED)
    )
    compressed = tuple(
        TableCost(method, dim, "rowwise_adagrad", Cost(1e-6, 1e-7, 0.0), Cost(1e-6, 1e-7, 0.0))
        for method, dim in product(
            (
                {"method": "tensor_train", "rank": 32},
                {"method": "frobenius", "rank": 8, "terms": 4},
                {"method": "robe", "size": 1024},
            ),
            (4, 64),
        )
    )
    rows = {"4": Line(0.0, 0.0), "64": Line(0.0, 1e-6), "512": Line(0.0, 1e-6)}
    rates = {"device": rows, "host": rows, "cached": rows, "disk": {size: Line(0.0, 1e-4) for size in rows}}
    values: dict[str, Any] = {
        "machine": machine_identity(),
        "device": "cpu",
        "threads": 1,
        "date": "2026-01-01",
        "took_seconds": 1.0,
        "tables": dense + compressed,
        "host_tables": dense,
        "gather": rates,
        "scatter": rates,
        "copy": dict.fromkeys(("to_device", "to_host", "to_device_pinned", "to_host_pinned"), Line()),
        "find": Cost(0.0, 1e-9, 0.0),
        "layers": tuple(Layer(a, b, _rising(a * b)) for a, b in product((4, 1024), (4, 1024))),
        "interactions": tuple(Interaction(v, d, _rising(v * v * d)) for v, d in product((2, 64), (4, 64))),
        "stack": {"forward": Line(0.0, 1e-10), "backward": Line(0.0, 1e-10)},
        "dense_update": dict.fromkeys(MEASURED, Line(0.0, 1e-9)),
        "read": Line(0.0, 1e-9),
        "overlap": 0.0,
        "call": 1e-6,
        "stream": 1e10,
        "collectives": CollectiveRates("gloo", 2, {"1024": 1e-4, "1048576": 1e-3}, {"1024": 2e-4, "1048576": 2e-3}),
    }
    if changes.get("device") == "cuda":
        values |= {"captured": CAPTURED, "read": Line()}
    return Hardware(**(values | changes))


def slow_files(**changes: Any) -> Hardware:
    """A machine that takes a second to map a page of a file, even one that is in its memory."""
    rows = {"4": Line(0.0, 0.0), "64": Line(0.0, 1.0), "512": Line(0.0, 1.0)}
    rates = {name: getattr(hardware(), name) | {"cached": rows} for name in ("gather", "scatter")}
    return hardware(**(rates | changes))


def schema_of(rows: dict[str, int], num_dense: int = 2) -> Schema:
    return Schema(
        label="click",
        dense=tuple(DenseColumn(name=f"I{i}") for i in range(num_dense)),
        features=tuple(Feature(name=name, num_rows=count, unseen=count - 1) for name, count in rows.items()),
    )


def zipf_counts(rows: int, samples: int, exponent: float = 1.05) -> Any:
    """Falling lookups of `rows` rows, `samples` in all."""
    weights = (np.arange(rows) + 1.0) ** -exponent
    counts = np.floor(samples * weights / weights.sum()).astype(np.int64)
    counts[0] += samples - counts.sum()
    return counts


def lookups(rows: dict[str, int], samples: int = 100_000, exponent: float = 1.05) -> dict[str, LookupCounts]:
    return {name: LookupCounts.from_counts(zipf_counts(n, samples, exponent), samples) for name, n in rows.items()}
