"""Bytes that a process sends per sample of its share: two-fold, row-wise and table-wise tables, on four processes.

    python -m benchmarks.bytes [--dims 16 64] [--batch-sizes 2048 8192] [--scale 1] [--steps 3]

Ids are drawn by a Zipf law over tables shaped like those of Criteo Kaggle, with one id a feature. Every way runs, over
gloo on loopback, with the same ids, loss and optimizer, and must end with the same rows. `row-wise` is two-fold with no
hot rows: each process asks for its distinct rows once. `row-wise, every lookup` is what sharding by row sends when ids
are not made distinct first (4 bytes an id, a row back, its gradient there); it is computed from the owners of the ids
and not run. In two-fold, a row is hot when a process is expected to touch it in a share `--touched` of its steps.
`before the lookup` is the part that a step cannot begin without, the rest can travel while it computes.

Distinct ids are what saves bytes. Replicating rows cannot: a hot row costs 2 (W - 1) / W * 4 (dim + 1) bytes a step by
all-reduce, and one that is asked for in every step by every process (W - 1) / W * (4 + 8 dim), nearly the same. What it
saves is bytes to wait for. The dense part of a model is not counted. All tables are in memory once, over all
processes, in `table-wise`: 8.7 GB for dim 64 at full size.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks.card import print_table, write_card
from holdall.data.batch import Ids
from holdall.data.synthetic import preset
from holdall.data.zipf import Zipf
from holdall.distributed.collectives import Collectives
from holdall.distributed.processes import default_processes
from holdall.distributed.shards import Shards
from holdall.distributed.table_wise import TableWiseBags, assign_tables
from holdall.distributed.two_fold import two_fold
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers

WAYS = ("two-fold", "row-wise", "table-wise")
ZIPF = 1.05
BEFORE = ("sizes", "cold_ids", "cold_rows", "ids", "pooled_vectors")
"""Kinds of messages that a lookup waits for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2048, 8192], help="samples of one process")
    parser.add_argument("--scale", type=float, default=1.0, help="of the tables' rows")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--touched", type=float, default=0.95)
    arguments = parser.parse_args()
    rows = list(preset("criteo-kaggle", scale=arguments.scale).cardinalities)
    shape = {"scale": arguments.scale, "tables": len(rows), "rows": sum(rows), "zipf": ZIPF}
    measured = [
        bytes_per_sample(rows, dim, size, arguments.processes, arguments.steps, arguments.touched)
        for dim in arguments.dims
        for size in arguments.batch_sizes
    ]
    lines = [line for one in measured for line in one["lines"]]
    print_table(f"bytes sent per sample, {arguments.processes} processes", lines)
    write_card("bytes", {"shape": shape, "touched": arguments.touched, "lines": lines})


def bytes_per_sample(
    rows: list[int], dim: int, batch_size: int, num_processes: int, steps: int, touched: float
) -> dict[str, Any]:
    """What each way sends, per sample of a process: the mean over processes and steps."""
    hot = [hot_rows(count, batch_size, touched) for count in rows]
    with tempfile.TemporaryDirectory() as folder:
        settings = (rows, hot, dim, batch_size, num_processes, steps, folder)
        multiprocessing.spawn(_process, args=settings, nprocs=num_processes)
        found = [_read(Path(folder) / f"{rank}.txt") for rank in range(num_processes)]
    for way in WAYS[1:]:
        if any(abs(one[f"{way} sum"] - one["two-fold sum"]) > 1e-3 * abs(one["two-fold sum"]) for one in found):
            raise SystemExit(f"{way} and two-fold ended with different rows")
    samples = batch_size * steps * num_processes
    lines = []
    for way in (*WAYS, "row-wise, every lookup"):
        total = sum(one[way] for one in found) / samples
        line: dict[str, Any] = {"dim": dim, "batch": batch_size, "way": way, "bytes a sample": total}
        if way in WAYS:
            line["before the lookup"] = sum(one[f"{way} before"] for one in found) / samples
        if way == "two-fold":
            line["hot rows"] = sum(hot)
        lines.append(line)
    for line in lines:
        line["two-fold / it"] = lines[0]["bytes a sample"] / line["bytes a sample"]
    return {"lines": lines}


def hot_rows(num_rows: int, batch_size: int, touched: float) -> int:
    """How many of the most popular rows of a table a process's share of a batch holds with this probability."""
    law = Zipf(num_rows, ZIPF)
    low, high = 0, num_rows
    while low < high:
        middle = (low + high) // 2
        if 1 - (1 - law.probability(middle)) ** batch_size >= touched:
            low = middle + 1
        else:
            high = middle
    return low


def batch(rows: list[int], batch_size: int, rank: int, step: int) -> Ids:
    """A process's share; ids are in order of popularity."""
    uniform = np.random.default_rng([rank, step]).random((len(rows), batch_size))
    ids = [Zipf(count, ZIPF).ranks(draws) for count, draws in zip(rows, uniform, strict=True)]
    return Ids(torch.from_numpy(np.stack(ids).astype(np.int32)), None, len(rows))


def _process(
    rank: int, rows: list[int], hot: list[int], dim: int, size: int, num_processes: int, steps: int, folder: str
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    limit = timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_processes, timeout=limit)
    found: dict[str, float] = {}
    for way in WAYS:
        collectives = Collectives(default_processes())
        found[f"{way} sum"], sent = _train(way, collectives, rows, hot, dim, size, steps)
        found[way] = sum(sent.values())
        found[f"{way} before"] = sum(sent.get(kind, 0) for kind in BEFORE)
    found["row-wise, every lookup"] = sum(
        _lookups_elsewhere(batch(rows, size, rank, step), rows, num_processes, rank) * (4 + 8 * dim)
        for step in range(steps)
    )
    dist.barrier()
    dist.destroy_process_group()
    (Path(folder) / f"{rank}.txt").write_text("\n".join(f"{name}\t{value!r}" for name, value in found.items()))


def _train(
    way: str, collectives: Collectives, rows: list[int], hot: list[int], dim: int, size: int, steps: int
) -> tuple[float, dict[str, int]]:
    """Train, and look a last batch up: the sum of its squares says whether two ways learned the same; and the bytes
    that training sent."""
    names = [f"C{number}" for number in range(len(rows))]
    cardinalities = dict(zip(names, rows, strict=True))
    generator = torch.Generator().manual_seed(0)
    bags = EmbeddingBags.build(cardinalities, dim, dense_device="meta", generator=generator)
    shared: Any
    if way == "table-wise":
        sizes = {name: count * dim * 4 for name, count in cardinalities.items()}
        owners = assign_tables(sizes, dict.fromkeys(names, 1.0), collectives.world_size)
        shared = bags = TableWiseBags(bags, owners, collectives)
    else:
        chosen = dict.fromkeys(names, 0) if way == "row-wise" else dict(zip(names, hot, strict=True))
        shared = two_fold(bags, chosen, collectives)
    optimizers = Optimizers(bags, OptimizerConfig(name="rowwise_adagrad", lr=0.05))
    for step in range(steps):
        ids = batch(rows, size, collectives.rank, step)
        shared.prepare(ids)
        bags(ids).sum((1, 2)).add(0.3).square().mean().backward()
        shared.exchange_gradients()
        optimizers.step()
    sent = collectives.bytes_by_kind()
    with torch.no_grad():
        ids = batch(rows, size, collectives.rank, 0)
        shared.prepare(ids, training=False)
        checksum = float(bags(ids).double().square().sum())
    return checksum, sent


def _lookups_elsewhere(ids: Ids, rows: list[int], num_processes: int, rank: int) -> int:
    """How many lookups of a batch are of rows that other processes keep, when none is hot."""
    names = {str(number): count for number, count in enumerate(rows)}
    shards = Shards(names, dict.fromkeys(names, 0), num_processes)
    numbers: Tensor = torch.arange(len(rows))[:, None].expand(ids.values.shape)
    return int((shards.keys(ids.values.long(), numbers) // shards.stride != rank).sum())


def _read(path: Path) -> dict[str, float]:
    return {name: float(value) for name, value in (line.split("\t") for line in path.read_text().splitlines())}


if __name__ == "__main__":
    main()
