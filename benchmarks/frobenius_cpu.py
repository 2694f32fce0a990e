"""A training step of one Frobenius table on the CPU, against the dense table it stands for.

    python -m benchmarks.frobenius_cpu [--rows 10000000 --dim 64 --rank 8 --terms 4 --batch-size 4096]

A step is forward, backward from a given gradient, and torch's SGD, for one-hot bags of Zipf-distributed ids in
popularity order. The other side is `nn.EmbeddingBag(sparse=True)` with torch's SGD over the materialised rows: 2.56 GB
instead of 0.8 MB. The sides take turns, several batches at a time, and before that must have computed the same vectors;
the gradients must be those of the plain reference.

Both sides run in a process that has allocated and freed 32 MB once, which makes glibc keep freed memory instead of
returning it to the system after every step; the page faults a step takes are counted.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.card import alternate, print_table, summary, write_card
from holdall.data.zipf import Zipf
from holdall.tables.fitting import block_slices
from holdall.tables.frobenius import Frobenius, FrobeniusTable

TARGET = 1.5  # at most this many times the dense step
NUM_BATCHES = 32
BATCHES_A_TURN = 8
LEARNING_RATE = 1e-6  # any: the values that SGD writes do not change its time


class Side:
    """A table with its optimizer, going through the batches in turn."""

    def __init__(self, table: nn.Module, data: list[tuple[Tensor, Tensor]]):
        self.table, self.data, self.count = table, data, 0
        self.optimizer = torch.optim.SGD(table.parameters(), lr=LEARNING_RATE)
        self.phases: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
        self.faults: list[float] = []

    def turn(self) -> None:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(BATCHES_A_TURN):
            self.step()
        self.faults.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / BATCHES_A_TURN)

    def step(self) -> None:
        ids, gradient = self.data[self.count % len(self.data)]
        self.count += 1
        start = time.perf_counter()
        output = self.table(ids)
        forward = time.perf_counter()
        self.optimizer.zero_grad()
        output.backward(gradient)
        backward = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        for phase, seconds in zip(self.phases, (forward - start, backward - forward, end - backward), strict=True):
            self.phases[phase].append(seconds)


def batches(num_rows: int, size: int, dim: int) -> list[tuple[Tensor, Tensor]]:
    """(ids [size, 1], gradient of the output [size, dim]) of every batch."""
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(Zipf(num_rows, 1.05).ranks(rng.random(NUM_BATCHES * size)))
    gradients = torch.randn(NUM_BATCHES, size, dim, generator=torch.Generator().manual_seed(0))
    return list(zip(ids.view(NUM_BATCHES, size, 1), gradients, strict=True))


def dense_twin(table: FrobeniusTable) -> nn.EmbeddingBag:
    """The dense table with the same rows."""
    weight = torch.empty(table.num_rows, table.dim)
    for place in block_slices(table.num_rows, table.dim):
        weight[place] = table.materialize(torch.arange(place.start, place.stop))
    return nn.EmbeddingBag(table.num_rows, table.dim, mode="sum", sparse=True, _weight=weight)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def check_equal(table: FrobeniusTable, twin: nn.EmbeddingBag, data: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Largest relative differences over the batches; float32 on both sides, so no more than its rounding."""
    parameters = dict(table.named_parameters())
    found: dict[str, list[float]] = {"vectors": [], **{f"gradient of {name}": [] for name in parameters}}
    for ids, gradient in data:
        fast = table(ids)
        with torch.no_grad():
            found["vectors"].append(relative(fast, twin(ids)))
        gradients = torch.autograd.grad(fast, list(parameters.values()), gradient)
        table.fast = False
        expected = torch.autograd.grad(table(ids), list(parameters.values()), gradient)
        table.fast = True
        for name, ours, wanted in zip(list(found)[1:], gradients, expected, strict=True):
            found[name].append(relative(ours, wanted))
    differences = {name: max(values) for name, values in found.items()}
    assert max(differences.values()) < 1e-5, differences
    return differences


def floor(table: FrobeniusTable, batch_size: int) -> dict[str, float]:
    """The least a step can take here: its flops at the speed of a large product, its bytes at that of a large copy."""
    width = table.rank * table.terms
    flops = batch_size * (3 * 2 * table.rank * table.dim + 3 * 2 * width)
    # Forward: gathered rows in, vectors out. Backward: gradient in, rows gathered and their gradients added. The
    # gradient of the parameters is cleared and read, the parameters are read and written.
    moved = 4 * batch_size * (2 * table.dim + 3 * 2 * width) + 4 * table.num_bytes()
    matrix, source, target = torch.randn(1024, 1024), torch.zeros(2**25), torch.zeros(2**25)
    once: dict[str, Callable[[], Any]] = {
        "product": lambda: torch.mm(matrix, matrix),
        "copy": lambda: target.copy_(source),
    }
    best = {what: min(seconds) for what, seconds in alternate(once, 10).items()}
    flops_per_s, bytes_per_s = 2 * 1024**3 / best["product"], 2 * 4 * 2**25 / best["copy"]
    return {
        "flops": flops,
        "bytes": moved,
        "Gflop/s of a large product": flops_per_s / 1e9,
        "GB/s of a large copy": bytes_per_s / 1e9,
        "ms for the flops": 1e3 * flops / flops_per_s,
        "ms for the bytes": 1e3 * moved / bytes_per_s,
    }


def measure(sides: dict[str, Side], repeats: int) -> list[dict[str, Any]]:
    """A row for each side: milliseconds of a step, of its phases, and page faults."""
    times = alternate({name: side.turn for name, side in sides.items()}, repeats, warmup=3)
    rows = []
    for name, side in sides.items():
        whole = summary([1e3 * seconds / BATCHES_A_TURN for seconds in times[name]])
        phases = {phase: 1e3 * float(np.median(seconds)) for phase, seconds in side.phases.items()}
        rows.append({"milliseconds": name, **whole, **phases, "page faults": float(np.median(side.faults))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--terms", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    data = batches(arguments.rows, arguments.batch_size, arguments.dim)
    method = Frobenius(arguments.rank, arguments.terms)
    table = method.build(arguments.rows, arguments.dim, generator=torch.Generator().manual_seed(0))
    assert isinstance(table, FrobeniusTable)
    twin = dense_twin(table)
    differences = check_equal(table, twin, data)
    torch.empty(8_000_000)  # see the docstring

    rows = measure({"frobenius": Side(table, data), "dense": Side(twin, data)}, arguments.repeats)
    ratio = rows[0]["p50"] / rows[1]["p50"]
    least = floor(table, arguments.batch_size)
    print_table(f"{arguments.rows:,} rows of dim {arguments.dim}, {method}: {ratio:.2f} times the dense step", rows)
    print_table("the floor of a step", [{"what": what, "value": value} for what, value in least.items()])
    results = {
        "table": {"rows": arguments.rows, "dim": arguments.dim, "method": method.to_json()},
        "bytes": table.num_bytes(),
        "dense bytes": 4 * arguments.rows * arguments.dim,
        "batch size": arguments.batch_size,
        "threads": torch.get_num_threads(),
        "sides": rows,
        "times the dense step": ratio,
        "target": TARGET,
        "floor": least,
        "relative differences": differences,
    }
    print("card:", write_card("frobenius_cpu", results).name)
    assert ratio <= TARGET, f"{ratio:.2f} times the dense step, more than {TARGET}"


if __name__ == "__main__":
    main()
