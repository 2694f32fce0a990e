"""What the cost model of several processes predicts, against what 1, 2, 3 and 4 of them do here.

    python -m benchmarks.simulate [--processes 1 2 3 4] [--dim 16] [--batch-size 2048] [--scale 0.1] [--steps 20]

Ids are drawn by a Zipf law over tables shaped like those of Criteo Kaggle. Every way trains the same tables on the same
ids over gloo on loopback, with the library's classes, and must end with the same rows. `two-fold` has the rows hot that
a process touches in 95% of its steps, `two-fold, chosen` those that `choose_cut` takes from the links measured in the
same run and from what a lookup of a cold row costs one process (`row-wise` against `two-fold`), within a twentieth of
the tables' bytes, `row-wise` none.

Bytes: the expected messages of a step, which know the law and not the ids, against those that were counted, by kind.

Seconds: a step without any exchange is timed alone, with one process. Its processes have a thread each and share the
machine's cores, so W of them are taken to compute max(1, W / cores) times as long; to that comes the exchange that
`Links` predicts, from collectives measured between the same processes (`here`), and from those of two processes alone,
scaled (`from 2`). Collectives keep cores busy as well, on loopback, which no link between machines would: `in
collectives` is what a process spent in them, waiting for the others included.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks.bytes import ZIPF, batch
from benchmarks.card import print_table, summary, write_card
from holdall.data.batch import Ids
from holdall.data.synthetic import preset
from holdall.distributed.collectives import Collectives
from holdall.distributed.processes import default_processes
from holdall.distributed.row_gradient_exchange import exchange_row_gradients
from holdall.distributed.table_wise import TableWiseBags, assign_tables
from holdall.distributed.two_fold import two_fold
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.planning.collective_cost import Links, Message
from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.machine.hardware import CollectiveRates
from holdall.planning.machine.measure_collectives import measure_collectives
from holdall.planning.messages import (
    data_parallel_messages,
    sent_by_kind,
    table_wise_messages,
    two_fold_messages,
)
from holdall.planning.two_fold_cut import choose_cut

WAYS = ("two-fold", "two-fold, chosen", "row-wise", "table-wise", "data-parallel")
WARMUP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=2048, help="samples of one process")
    parser.add_argument("--scale", type=float, default=0.1, help="of the tables' rows")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    rows = list(preset("criteo-kaggle", scale=arguments.scale).cardinalities)
    found = compare(rows, arguments.dim, arguments.batch_size, arguments.processes, arguments.steps)
    print_table("bytes that a process sends in a step", found["bytes"])
    print_table("ms of a step", found["seconds"])
    print_table("links, ms", found["links"])
    shape = {"scale": arguments.scale, "tables": len(rows), "rows": sum(rows), "zipf": ZIPF, "dim": arguments.dim}
    shape |= {"batch of a process": arguments.batch_size, "steps": arguments.steps, "cores": num_cores()}
    notes = "Seconds are of processes that share cores and a loopback; bytes depend on neither."
    write_card("simulate", {"shape": shape, **found}, notes=notes)


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def compare(rows: list[int], dim: int, batch_size: int, processes: list[int], steps: int) -> dict[str, Any]:
    """Lines of predicted and measured bytes and seconds, for every way and number of processes."""
    lookups = {f"C{number}": law(count) for number, count in enumerate(rows)}
    measured = {1: _run(rows, dim, batch_size, 1, steps)}
    alone = {way: summary(times)["p50"] for way, times in measured[1][0]["step"].items()}
    spared = hot_lookups(measured[1][0], "two-fold", lookups, batch_size)
    work = max(0.0, alone["row-wise"] - alone["two-fold"]) / max(1.0, spared)
    measured |= {count: _run(rows, dim, batch_size, count, steps, work) for count in processes if count > 1}
    by_bytes, by_seconds, links = [], [], []
    for count, found in measured.items():
        if count == 1:
            continue
        # What a process does alone with these rows hot was not timed: the model says it.
        saved = work * hot_lookups(found[0], "two-fold, chosen", lookups, batch_size)
        alone["two-fold, chosen"] = alone["row-wise"] - saved
        for way in WAYS:
            messages = expected(way, lookups, found[0]["hot"].get(way, {}), dim, batch_size, count)
            by_bytes.append(_bytes_line(way, count, messages, [one["sent"][way] for one in found], steps))
            by_seconds.append(_seconds_line(way, count, messages, alone[way], measured))
        for name in ("all_reduce", "all_to_all"):
            curve = {f"{size} B": seconds * 1e3 for size, seconds in found[0]["links"][name].items()}
            links.append({"processes": count, "collective": name, **curve})
    hot = {n: {way: sum(rows.values()) for way, rows in found[0]["hot"].items()} for n, found in measured.items()}
    worst = max((abs(line["its error"]) for line in by_bytes), default=0.0)
    results = {"worst error of bytes": worst, "bytes": by_bytes, "seconds": by_seconds, "links": links}
    return {**results, "hot rows": hot, "seconds of a cold lookup": work}


def hot_lookups(found: dict[str, Any], way: str, lookups: dict[str, LookupCounts], batch_size: int) -> float:
    """Lookups of a process in a step that go to hot rows."""
    hot = found["hot"][way]
    return batch_size * sum(known.share(hot[name]) * known.per_sample for name, known in lookups.items())


def _bytes_line(
    way: str, count: int, messages: list[Message], sent: list[dict[str, int]], steps: int
) -> dict[str, Any]:
    """Predicted and counted, and the largest of the errors of the whole and of its kinds above a hundredth of it."""
    predicted = sent_by_kind(messages)
    counted = {kind: float(np.mean([one.get(kind, 0) for one in sent])) / steps for one in sent for kind in one}
    if way == "data-parallel":  # which names the collective
        predicted = {"sizes": predicted["sizes"], "rows": predicted["row_gradients"]}
        counted = {"sizes": counted["sizes"], "rows": sum(n for kind, n in counted.items() if kind != "sizes")}
    total, whole = sum(predicted.values()), sum(counted.values())
    errors = {kind: predicted.get(kind, 0.0) / n - 1 for kind, n in counted.items() if n > whole / 100}
    errors["all"] = total / whole - 1
    line = {"processes": count, "way": way, "predicted": total, "counted": whole, "error": errors["all"]}
    worst = max(errors, key=lambda kind: abs(errors[kind]))
    return {**line, "worst kind": worst, "its error": errors[worst]}


def _seconds_line(
    way: str, count: int, messages: list[Message], alone: float, measured: dict[int, Any]
) -> dict[str, Any]:
    crowding = max(1.0, count / num_cores())
    slowest = [max(times) for times in zip(*(one["step"][way] for one in measured[count]), strict=True)]
    step = summary(slowest)
    talking = float(np.mean([np.median(one["talking"][way]) for one in measured[count]]))
    line: dict[str, Any] = {"processes": count, "way": way, "alone": alone * 1e3, "crowding": crowding}
    for name, source in (("here", count), ("from 2", 2)):
        if source in measured:
            links = Links(CollectiveRates(**measured[source][0]["links"]))
            exchange = sum(links.by_kind(messages, count).values())
            line[f"exchange {name}"] = exchange * 1e3
            line[f"step {name}"] = (alone * crowding + exchange) * 1e3
    line |= {"in collectives": talking * 1e3, "measured": step["p50"] * 1e3}
    line |= {"p20": step["p20"] * 1e3, "p80": step["p80"] * 1e3}
    return {**line, "predicted / measured": line["step here"] / line["measured"]}


def law(num_rows: int) -> LookupCounts:
    """The Zipf law's expected lookups: the first thousand rows one by one, then in groups of a hundredth."""
    edges = np.unique(np.concatenate([np.arange(min(num_rows, 1000) + 1), np.geomspace(1, num_rows, 2000).round()]))
    edges = edges[edges <= num_rows]
    singles = (np.arange(1, 1001, dtype=np.float64)) ** -ZIPF
    low, high = edges[:-1] + 0.5, edges[1:] + 0.5
    inside = (high ** (1 - ZIPF) - low ** (1 - ZIPF)) / (1 - ZIPF)
    first = int((edges[1:] <= 1000).sum())
    inside[:first] = singles[:first]
    sizes = np.diff(edges)
    return LookupCounts(inside / inside.sum() / sizes, sizes.astype(np.int64), 1)


def expected(
    way: str, lookups: dict[str, LookupCounts], hot: dict[str, int], dim: int, batch_size: int, world_size: int
) -> list[Message]:
    common: dict[str, Any] = {"row_bytes": 4 * dim, "batch_size": batch_size, "world_size": world_size}
    if way == "table-wise":
        rows = {name: known.num_rows for name, known in lookups.items()}
        return table_wise_messages(lookups, _deal(rows, dim, world_size), dict.fromkeys(lookups, 1), **common)
    if way == "data-parallel":
        return data_parallel_messages(lookups, **common)
    return two_fold_messages(lookups, hot, **common)


def _deal(rows: dict[str, int], dim: int, world_size: int) -> dict[str, int]:
    return assign_tables({name: count * dim * 4 for name, count in rows.items()}, dict.fromkeys(rows, 1.0), world_size)


# --- in the processes ------------------------------------------------------------------------------------------------


class TimedCollectives(Collectives):
    """Collectives that sum up the seconds between their start and their end."""

    talking = 0.0

    def _started(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        pending = super()._started(*arguments, **options)
        finish = pending._finish

        def timed() -> Tensor:
            result = finish()
            self.talking += time.perf_counter() - start
            return result

        pending._finish = timed
        return pending


def _run(
    rows: list[int], dim: int, batch_size: int, num_processes: int, steps: int, work: float = 0.0
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        settings = (rows, dim, batch_size, num_processes, steps, work, folder)
        multiprocessing.spawn(_process, args=settings, nprocs=num_processes)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_processes)]
    for way in WAYS[1:]:
        for one in found:
            if abs(one["sum"][way] - one["sum"]["two-fold"]) > 1e-3 * abs(one["sum"]["two-fold"]):
                raise SystemExit(f"{way} and two-fold ended with different rows on {num_processes} processes")
    return found


def _process(
    rank: int, rows: list[int], dim: int, size: int, num_processes: int, steps: int, work: float, folder: str
) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(num_processes)}
    torch.set_num_threads(1)
    limit = timedelta(seconds=600)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_processes, timeout=limit)
    found = _measure(rows, dim, size, num_processes, steps, work)
    dist.barrier()
    dist.destroy_process_group()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def _measure(rows: list[int], dim: int, size: int, num_processes: int, steps: int, work: float) -> dict[str, Any]:
    """Every way, step by step in turn, and what it sent."""
    links = measure_collectives(torch.device("cpu"))
    if links is not None:  # each process timed them: all go by what the first one found, or they would cut differently
        told = [links]
        dist.broadcast_object_list(told)
        links = told[0]
    lookups = {f"C{number}": law(count) for number, count in enumerate(rows)}
    hot = _cuts(lookups, dim, size, num_processes, links, work)
    ways = {way: Trained(way, rows, dim, hot.get(way, {})) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    talking: dict[str, list[float]] = {way: [] for way in WAYS}
    before: dict[str, dict[str, int]] = {}
    for step in range(WARMUP + steps):
        ids = batch(rows, size, dist.get_rank(), step)
        for way in WAYS if step % 2 == 0 else reversed(WAYS):
            one = ways[way]
            if step == WARMUP:
                before[way] = one.collectives.bytes_by_kind()
            dist.barrier()
            start, one.collectives.talking = time.perf_counter(), 0.0
            one.step(ids)
            if step >= WARMUP:
                times[way].append(time.perf_counter() - start)
                talking[way].append(one.collectives.talking)
    sent = {
        way: {kind: now - before[way].get(kind, 0) for kind, now in one.collectives.bytes_by_kind().items()}
        for way, one in ways.items()
    }
    last = batch(rows, size, dist.get_rank(), 0)
    sums = {way: one.checksum(last) for way, one in ways.items()}
    known = None if links is None else vars(links)
    return {"links": known, "hot": hot, "sum": sums, "sent": sent, "step": times, "talking": talking}


def _cuts(
    lookups: dict[str, LookupCounts],
    dim: int,
    size: int,
    num_processes: int,
    links: CollectiveRates | None,
    work: float,
) -> dict[str, dict[str, int]]:
    def cut(measured: CollectiveRates | None) -> dict[str, int]:
        # One process replicates nothing; what it does alone is timed with the rows of two.
        common: dict[str, Any] = {"row_bytes": 4 * dim, "batch_size": size, "world_size": max(2, num_processes)}
        budget = 4 * dim * sum(known.num_rows for known in lookups.values()) // 20
        return choose_cut(lookups, **common, links=measured, budget=budget, lookup_seconds=work).hot_rows

    return {"two-fold": cut(None), "two-fold, chosen": cut(links), "row-wise": {}}


class Trained:
    """Tables that one way trains."""

    def __init__(self, way: str, rows: list[int], dim: int, hot: dict[str, int]):
        self.collectives = TimedCollectives(default_processes())
        cardinalities = {f"C{number}": count for number, count in enumerate(rows)}
        place = "cpu" if way == "data-parallel" else "meta"
        generator = torch.Generator().manual_seed(0)
        self.bags = EmbeddingBags.build(cardinalities, dim, dense_device=place, generator=generator)
        self.shared: Any = None
        if way == "table-wise":
            owners = _deal(cardinalities, dim, self.collectives.world_size)
            self.shared = self.bags = TableWiseBags(self.bags, owners, self.collectives)
        elif way != "data-parallel":
            self.shared = two_fold(self.bags, {name: hot.get(name, 0) for name in cardinalities}, self.collectives)
        self.optimizers = Optimizers(self.bags, OptimizerConfig(name="rowwise_adagrad", lr=0.05))

    def step(self, ids: Ids) -> None:
        if self.shared is not None:
            self.shared.prepare(ids)
        loss = self.bags(ids).sum((1, 2)).add(0.3).square().mean()
        if self.shared is None:
            (loss / self.collectives.world_size).backward()
            exchange_row_gradients(self.optimizers.row_groups, self.collectives)
        else:
            loss.backward()
            self.shared.exchange_gradients()
        self.optimizers.step()

    def checksum(self, ids: Ids) -> float:
        with torch.no_grad():
            if self.shared is not None:
                self.shared.prepare(ids, training=False)
            return float(self.bags(ids).double().square().sum())


if __name__ == "__main__":
    main()
