"""What the community order buys: distinct tensor-train prefixes a batch and the time of forward and backward.

    python -m benchmarks.order [--criteo train.tsv.gz] [--avazu train.csv.gz]

Each data set is prepared, ordered by `holdall order` with its default settings in a process of its own (time and peak
memory), and looked up in both orders: the same samples, in popularity order (before) and in community order (after),
in tensor-train tables of dim 64 and rank 32, batch 2,048. Batches are made in three ways: neighbouring training
samples, as `--shuffle blocks` does (train blocks); training samples drawn at random, as `--shuffle rows` does (train
random); and neighbouring test samples, which the order has not seen (test blocks). Sides take turns. Before that, the
new ids are turned back by the saved bijection and must be the old ones, and the rows of both sides must be those of
their tables' reference. The floor is the flops at the speed of a large product.

The planted set has sessions of 64 samples that draw from one of 1,000 communities. Of the public samples all tables
that were ordered count, together. The Criteo sample is in random order; both are small, and not in this repository.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.card import alternate, print_table, summary, write_card
from benchmarks.session_log import SessionLog, write_sessions
from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.popularity.bijection import load_orders
from holdall.tables.tensor_train import TensorTrain, TensorTrainTable

Array = npt.NDArray[Any]
SESSIONS = SessionLog(rows=1_000_000, num_ids=200_000, communities=1000)
NUM_BATCHES = 20
NOTES = (
    "Where samples are in no order (criteo) the gain of train blocks is not of communities: most ids of the tail occur "
    "once, and the order places them beside those of the same batch. It is there for batches of neighbouring samples "
    "of the same files, and for no others. The machine was shared with other work: compare within a run only."
)
ORDER = """
import json, resource, sys, time
from holdall.popularity.order import order
start = time.perf_counter()
schema = order(sys.argv[1], sys.argv[2])
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found = {name: schema.order[name] for name in ("tables", "left")}
print(json.dumps({"seconds": seconds, "peak memory, bytes": peak, **found}))
"""


def ordered(data: Path, out: Path) -> dict[str, Any]:
    """Order `data` in a process of its own, and what it took."""
    done = subprocess.run([sys.executable, "-c", ORDER, data, out], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    found["tables"] = {
        table: {what: value for what, value in facts.items() if what not in ("sha256", "ids")}
        for table, facts in found["tables"].items()
    }
    return found


def batches_of(data: DataSet, batch_size: int, shuffled: bool) -> list[Array]:
    """Row numbers of the batches to measure: spread evenly over the split, or drawn from all of it."""
    whole = len(data) // batch_size
    order = np.random.default_rng(0).permutation(len(data)) if shuffled else np.arange(len(data))
    chosen = np.unique(np.linspace(0, whole - 1, min(NUM_BATCHES, whole)).astype(int))
    return [order[number * batch_size : (number + 1) * batch_size] for number in chosen]


class Side:
    """The ordered tables of one folder: a tensor train each, and the ids of every batch."""

    def __init__(self, folder: Path, split: str, tables: list[str], batches: list[Array], dim: int, rank: int):
        schema = Schema.load(folder)
        singles = [feature.name for feature in schema.features if feature.one_hot]
        data = DataSet(folder, split)
        columns = data.columns(0, len(data)).ids
        self.ids = [
            [torch.from_numpy(columns[rows, singles.index(name)].astype(np.int64)) for name in tables]
            for rows in batches
        ]
        self.tables: list[TensorTrainTable] = []
        for name in tables:
            table = TensorTrain(rank).build(
                schema.feature(name).num_rows, dim, generator=torch.Generator().manual_seed(0)
            )
            assert isinstance(table, TensorTrainTable)
            self.tables.append(table)
        self.gradient = torch.randn(len(batches[0]), dim, generator=torch.Generator().manual_seed(0))
        self.count = 0

    def step(self) -> None:
        """Forward and backward of all tables for the next batch."""
        batch = self.ids[self.count % len(self.ids)]
        self.count += 1
        for table, ids in zip(self.tables, batch, strict=True):
            for core in table.cores:
                core.grad = None
            table.rows(ids).backward(self.gradient)

    def distinct(self, what: Callable[[TensorTrainTable, Tensor], Tensor]) -> float:
        """Mean number of distinct things a batch, summed over tables."""
        sums = [
            sum(len(torch.unique(what(table, ids))) for table, ids in zip(self.tables, batch, strict=True))
            for batch in self.ids
        ]
        return float(np.mean(sums))

    def flops(self) -> float:
        """Of forward and backward, as `kernels/tensor_train.py` counts them."""
        total = 0.0
        for place, table in enumerate(self.tables):
            (_, _, d1, r1), (_, _, d2, r2), _ = (core.shape for core in table.cores)
            num_ids = np.mean([len(torch.unique(batch[place])) for batch in self.ids])
            num_prefixes = np.mean([len(torch.unique(prefix(table, batch[place]))) for batch in self.ids])
            total += 3 * 2 * (num_prefixes * d1 * d2 * r1 * r2 + num_ids * table.dim * r2)
        return total


def prefix(table: TensorTrainTable, ids: Tensor) -> Tensor:
    """(i1, i2) as one number."""
    return ids // len(table.cores[-1])


def check(before: Side, after: Side, tables: list[str], out: Path) -> float:
    """The sides look the same values up, and compute what their tables stand for; returns the largest difference."""
    orders = load_orders(out)
    for old_ids, new_ids in zip(before.ids, after.ids, strict=True):
        for name, old, new in zip(tables, old_ids, new_ids, strict=True):
            assert torch.equal(torch.from_numpy(orders[name].old.astype(np.int64))[new], old)
    largest = 0.0
    for side in (before, after):
        for table, ids in zip(side.tables, side.ids[0], strict=True):
            rows = table.rows(ids).detach()
            table.path = "reference"
            expected = table.rows(ids).detach()
            table.path = "auto"
            largest = max(largest, float((rows - expected).norm() / expected.norm()))
    assert largest < 1e-5, largest
    return largest


def flops_per_second() -> float:
    """Of a large product here."""
    matrix = torch.randn(1024, 1024)
    return 2 * 1024**3 / min(alternate({"product": lambda: torch.mm(matrix, matrix)}, 10)["product"])


def measure(name: str, data: Path, out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Order one data set and compare both orders."""
    took = ordered(data, out)
    tables = list(took["tables"])
    rows, differences = [], []
    for what, split, shuffled in (
        ("train blocks", "train", False),
        ("train random", "train", True),
        ("test blocks", "test", False),
    ):
        batches = batches_of(DataSet(data, split), arguments.batch_size, shuffled)
        sides = {
            side: Side(folder, split, tables, batches, arguments.dim, arguments.rank)
            for side, folder in (("before", data), ("after", out))
        }
        differences.append(check(sides["before"], sides["after"], tables, out))
        times = alternate({side: found.step for side, found in sides.items()}, arguments.repeats, warmup=2)
        speed = flops_per_second()
        medians = {}
        for side, found in sides.items():
            whole = summary([1e3 * second for second in times[side]])
            medians[side] = whole["p50"]
            floor = 1e3 * found.flops() / speed
            rows.append(
                {
                    "batches": what,
                    "order": side,
                    "num": len(batches),
                    "ids": found.distinct(lambda table, ids: ids),
                    "prefixes": found.distinct(prefix),
                    **{f"ms {p}": whole[p] for p in ("p20", "p50", "p80")},
                    "floor ms": floor,
                    "floor / ms": floor / whole["p50"],
                    "faster": medians["before"] / whole["p50"],
                }
            )
    print_table(f"{name}: {', '.join(tables)}; ordered in {took['seconds']:.0f} s", rows)
    return {"order": took, "sides": rows, "largest relative difference": max(differences)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--criteo", type=Path, default=Path("../shared/data/criteo_kaggle/train.tsv.gz"))
    parser.add_argument("--avazu", type=Path, default=Path("../shared/data/avazu/train.csv.gz"))
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for path in (arguments.criteo, arguments.avazu):
        if not path.exists():
            sys.exit(f"the public sample is not at {path}: give its place with --criteo or --avazu")
    results: dict[str, Any] = {
        "method": TensorTrain(arguments.rank).to_json(),
        "dim": arguments.dim,
        "batch size": arguments.batch_size,
        "threads": torch.get_num_threads(),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sessions(SESSIONS, folder / "planted")
        prepare([arguments.criteo], folder / "criteo", PrepareConfig(test=0.1))
        prepare([arguments.avazu], folder / "avazu", PrepareConfig(format="avazu", test=0.1))
        for data in ("planted", "criteo", "avazu"):
            results[data] = measure(data, folder / data, folder / f"{data}-ordered", arguments)
    before, after = results["planted"]["sides"][:2]
    print("card:", write_card("order", results, NOTES).name)
    assert after["prefixes"] < 0.5 * before["prefixes"], "planted communities were not found"


if __name__ == "__main__":
    main()
