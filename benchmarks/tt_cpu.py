"""A training step of one tensor-train table on the CPU: each distinct id and prefix once, against one chain per lookup.

    python -m benchmarks.tt_cpu [--rows 10000000 --dim 64 --rank 32 --batch-size 4096]

A step is forward, backward from a given gradient, and torch's SGD on the cores, for one-hot bags of Zipf-distributed
ids in popularity order. The other side is what a few lines of plain torch do: gather the core slices of every lookup,
multiply them in two batched products, leave the rest to autograd. The sides take turns, and before that must have
computed the same rows and the same gradients of every core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.card import alternate, print_table, summary, write_card
from holdall.data.zipf import Zipf
from holdall.kernels.tensor_train import row_digits
from holdall.tables.tensor_train import TensorTrain, TensorTrainTable

TARGET = 5.0  # times as fast as one chain of products per lookup
NUM_BATCHES = 8
LEARNING_RATE = 1e-6  # any: the values that SGD writes do not change its time


def batches(num_rows: int, size: int, dim: int) -> list[tuple[Tensor, Tensor]]:
    """(ids [size, 1], gradient of the output [size, dim]) of every batch."""
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(Zipf(num_rows, 1.05).ranks(rng.random(NUM_BATCHES * size)))
    gradients = torch.randn(NUM_BATCHES, size, dim, generator=torch.Generator().manual_seed(0))
    return list(zip(ids.view(NUM_BATCHES, size, 1), gradients, strict=True))


def chain_per_lookup(ids: Tensor, cores: list[Tensor]) -> Tensor:
    """Plain torch; `F.embedding` because it and its gradient are faster than indexing."""
    slices = [
        F.embedding(digit, core.flatten(1)).view(-1, *core.shape[1:])
        for digit, core in zip(row_digits(ids.flatten(), [len(core) for core in cores]), cores, strict=True)
    ]
    product = slices[0].flatten(1, 2)
    for factor in slices[1:]:
        product = torch.bmm(product, factor.flatten(2)).view(len(ids), -1, factor.shape[3])
    return product.flatten(1)


class Side:
    """One way to compute rows, with cores and an optimizer of its own, going through the batches in turn."""

    def __init__(self, table: TensorTrainTable, rows: Callable[[Tensor], Tensor], data: list[tuple[Tensor, Tensor]]):
        self.rows, self.data, self.count = rows, data, 0
        self.cores = list(table.cores)
        self.optimizer = torch.optim.SGD(self.cores, lr=LEARNING_RATE)
        self.phases: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}

    def step(self) -> None:
        ids, gradient = self.data[self.count % len(self.data)]
        self.count += 1
        start = time.perf_counter()
        output = self.rows(ids)
        forward = time.perf_counter()
        self.optimizer.zero_grad()
        output.backward(gradient)
        backward = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        for phase, seconds in zip(self.phases, (forward - start, backward - forward, end - backward), strict=True):
            self.phases[phase].append(seconds)

    def first(self) -> tuple[Tensor, list[Tensor]]:
        """Rows and gradients of the cores for the first batch, without an update."""
        ids, gradient = self.data[0]
        output = self.rows(ids)
        return output.detach(), list(torch.autograd.grad(output, self.cores, gradient))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def check_equal(ours: Side, theirs: Side) -> dict[str, float]:
    """Relative differences between the sides; both are float32, so no more than its rounding."""
    rows, gradients = ours.first()
    expected_rows, expected_gradients = theirs.first()
    pairs = zip(gradients, expected_gradients, strict=True)
    differences = {"rows": relative(rows, expected_rows)}
    differences |= {f"gradient of core {k + 1}": relative(*pair) for k, pair in enumerate(pairs)}
    assert max(differences.values()) < 1e-5, differences
    return differences


def floor(table: TensorTrainTable, data: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The least a step can take here: its flops at the speed of a large product, its bytes at that of a large copy."""
    shapes = [tuple(core.shape) for core in table.cores]
    distinct = [torch.unique(ids) for ids, _ in data]
    prefixes = [torch.unique(ids // shapes[-1][0]) for ids in distinct]
    num_ids, num_prefixes = (float(np.mean([len(t) for t in tensors])) for tensors in (distinct, prefixes))
    (_, _, d1, r1), (_, _, d2, r2), _ = shapes
    flops = 3 * 2 * (num_prefixes * d1 * d2 * r1 * r2 + num_ids * table.dim * r2)
    # Cores are read in the forward, in the backward and by SGD, which writes them; their gradient is written and read.
    moved = 6 * table.num_bytes() + 4 * (2 * len(data[0][1]) + 4 * num_ids) * table.dim
    matrix, source, target = torch.randn(1024, 1024), torch.zeros(2**25), torch.zeros(2**25)
    once: dict[str, Callable[[], Any]] = {
        "product": lambda: torch.mm(matrix, matrix),
        "copy": lambda: target.copy_(source),
    }
    best = {what: min(seconds) for what, seconds in alternate(once, 10).items()}
    flops_per_s, bytes_per_s = 2 * 1024**3 / best["product"], 2 * 4 * 2**25 / best["copy"]
    return {
        "distinct ids": num_ids,
        "distinct prefixes": num_prefixes,
        "flops": flops,
        "bytes": moved,
        "Gflop/s of a large product": flops_per_s / 1e9,
        "GB/s of a large copy": bytes_per_s / 1e9,
        "ms for the flops": 1e3 * flops / flops_per_s,
        "ms for the bytes": 1e3 * moved / bytes_per_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    data = batches(arguments.rows, arguments.batch_size, arguments.dim)
    method = TensorTrain(arguments.rank)
    tables = []
    for _ in range(2):
        table = method.build(arguments.rows, arguments.dim, generator=torch.Generator().manual_seed(0))
        assert isinstance(table, TensorTrainTable)
        tables.append(table)
    ours = Side(tables[0], tables[0], data)
    theirs = Side(tables[1], lambda ids: chain_per_lookup(ids, theirs.cores), data)
    differences = check_equal(ours, theirs)

    sides = {"holdall": ours, "one chain per lookup": theirs}
    times = alternate({name: side.step for name, side in sides.items()}, arguments.repeats, warmup=3)
    rows, medians = [], []
    for name, side in sides.items():
        whole = summary([1e3 * second for second in times[name]])
        medians.append(whole["p50"])
        phases = {phase: 1e3 * float(np.median(seconds)) for phase, seconds in side.phases.items()}
        rows.append({"milliseconds": name, **whole, **phases})
    ratio = medians[1] / medians[0]
    least = floor(tables[0], data)
    print_table(f"{arguments.rows:,} rows of dim {arguments.dim}, rank {arguments.rank}: {ratio:.1f} times", rows)
    print_table("the floor of a step", [{"what": what, "value": value} for what, value in least.items()])
    results = {
        "table": {"rows": arguments.rows, "dim": arguments.dim, "method": method.to_json()},
        "core bytes": tables[0].num_bytes(),
        "batch size": arguments.batch_size,
        "threads": torch.get_num_threads(),
        "sides": rows,
        "times as fast": ratio,
        "target": TARGET,
        "floor": least,
        "relative differences": differences,
    }
    print("card:", write_card("tt_cpu", results).name)
    assert ratio >= TARGET, f"{ratio:.2f} times as fast, not {TARGET}"


if __name__ == "__main__":
    main()
