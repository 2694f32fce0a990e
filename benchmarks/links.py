"""Samples/s of four processes on four hosts, over links of 1 and 10 Gbit/s, by how tables are spread over them.

    python -m benchmarks.links [--gbits 1 10] [--dims 16 64] [--batch-size 8192] [--scale 0.1] [--model light dlrm]

Hosts are network namespaces whose links a token bucket shapes both ways (`benchmarks.namespaces`); no latency is added.
Every way trains the same model on the same batches in the same run, in turn, and must have the same losses:
- `two-fold`: rows that a process touches in most of its steps are replicated, the others are dealt out by row; those of
  the next batch are fetched while this one computes (`two-fold, in turn`: they are not);
- `row-wise, distinct`: two-fold with nothing replicated; each process asks for its distinct rows once;
- `row-wise, every lookup`: rows dealt out and asked for as often as they occur, the plain way to shard by row;
- `table-wise`: whole tables dealt out, vectors exchanged;
- `torchrec`: TorchRec's table-wise sharding and DDP on gloo, where it is installed (docs/torchrec.md).
Ids follow a Zipf law over tables shaped like Criteo Kaggle's, as in `benchmarks.bytes`, with `--scale` of the rows:
three of the ways hold all tables in memory at once. All hosts share the cores of this machine, so a step computes for
much longer than on hosts of their own. `light` is therefore a model that computes next to nothing (vectors,
concatenated, through one linear layer): what is left to measure is the exchange. `dlrm` multiplies all pairs and has
one hidden layer of 64 units at either end. Bytes are those that the hosts' interfaces counted, headers and all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.bytes import batch as draw
from benchmarks.bytes import hot_rows
from benchmarks.card import ROOT, print_table, summary, write_card
from benchmarks.links_sides import NUM_DENSE, Ours, TorchRec, build_model
from benchmarks.namespaces import INTERFACE, Host, hosts, round_trip, shape, throughput, unavailable
from holdall.data.batch import Batch
from holdall.data.synthetic import preset
from holdall.distributed.processes import default_processes

WAYS = {
    "two-fold": "two-fold",
    "two-fold, in turn": "two-fold",
    "row-wise, distinct": "row-wise",
    "row-wise, every lookup": "every lookup",
    "table-wise": "table-wise",
    "torchrec": "torchrec",
}
MODELS: dict[str, tuple[str, tuple[int, ...]]] = {"light": ("concat", ()), "dlrm": ("dot", (64,))}
NUM_HOSTS = 4
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
"""For all ways: a batch's vectors of 54 MB (dim 64) are else given back to the system, and mapped again, every step; on
one core the two-fold step of `light` then takes twice as long (190 and 97 ms of processor time)."""
OWN = ("two-fold", "two-fold, in turn", "row-wise, distinct")
"""What is new here; the others are what people use today."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbits", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--batch-size", type=int, default=8192, help="samples of one process")
    parser.add_argument("--model", nargs="+", default=["light", "dlrm"], choices=list(MODELS))
    parser.add_argument("--scale", type=float, default=0.1, help="of the tables' rows")
    parser.add_argument("--steps", type=int, default=6, help="in a row, of one way")
    parser.add_argument("--rounds", type=int, default=5, help="through all ways")
    parser.add_argument("--touched", type=float, default=0.95, help="hot rows: touched in this share of steps")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--prefix", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return
    reason = unavailable()
    if reason is not None:
        raise SystemExit(f"links: {reason}")
    results: dict[str, Any] = {"torchrec": _torchrec_version(), "links": [], "lines": []}
    results["load average of the machine, before"] = os.getloadavg()[0]
    with hosts(NUM_HOSTS) as found, tempfile.TemporaryDirectory() as folder:
        for gbits in arguments.gbits:
            set_rate(found, gbits)
            results["links"].append(
                {
                    "Gbit/s": gbits,
                    "measured Gbit/s, one connection": throughput(found[0], found[1]),
                    "round trip, microseconds": round_trip(found[0], found[1]) * 1e6,
                }
            )
        for model in arguments.model:
            for dim in arguments.dims:
                results["lines"] += measure(found, folder, model, dim, arguments)
    rows = list(preset("criteo-kaggle", scale=arguments.scale).cardinalities)
    results["shape"] = {"scale": arguments.scale, "tables": len(rows), "rows": sum(rows), "batch": arguments.batch_size}
    print_table("links", results["links"])
    print_table(f"{NUM_HOSTS} processes on {NUM_HOSTS} hosts", [_flat(line) for line in results["lines"]])
    write_card("links", results, notes="All hosts share the cores of one machine; no latency is added to the links.")


def _torchrec_version() -> str:
    if importlib.util.find_spec("torchrec") is None:
        return "not installed, so not measured"
    import torchrec

    return str(torchrec.__version__)


def _flat(line: dict[str, Any]) -> dict[str, Any]:
    """Without what is for scripts."""
    shown = {key: value for key, value in line.items() if key not in ("stages, ms", "losses")}
    return {**shown, "samples/s": line["samples/s"]["p50"]}


def set_rate(found: list[Host], gbits: float) -> None:
    """Shape the links of all hosts, at both ends."""
    switch = found[0].name.rsplit("-", 1)[0] + "-switch"
    for number, host in enumerate(found):
        shape(host.name, INTERFACE, gbits)
        shape(switch, f"port{number}", gbits)


def measure(
    found: list[Host], folder: str, model: str, dim: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One line for each way and rate."""
    words = [sys.executable, "-m", "benchmarks.links", "--folder", folder, "--model", model, "--dims", str(dim)]
    for name in ("batch_size", "scale", "steps", "rounds", "touched"):
        words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    words += ["--gbits", *map(str, arguments.gbits), "--prefix", found[0].name.rsplit("-", 1)[0]]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "MASTER_ADDR": found[0].address,
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        **KEEP_MEMORY,
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    started = [
        subprocess.Popen(host.command([*words, "--worker", str(rank)]), env=environment)
        for rank, host in enumerate(found)
    ]
    try:
        if any(process.wait(7200) for process in started):
            raise SystemExit(f"links: a process ended with {[process.returncode for process in started]}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_HOSTS)]
    return _lines(told, model, dim, arguments)


def _lines(told: list[dict[str, Any]], model: str, dim: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """From what every process noted: `told[rank][rate][way]`."""
    lines = []
    samples = arguments.batch_size * NUM_HOSTS
    for gbits in arguments.gbits:
        rate = told[0][str(gbits)]
        speeds = {way: summary([samples / seconds for seconds in one["step seconds"]]) for way, one in rate.items()}
        best = max(speeds[way]["p50"] for way in speeds if way not in OWN)
        for way in rate:
            everyones = [one[str(gbits)][way] for one in told]
            sent = float(np.mean([one["sent"] for one in everyones]))
            busiest = max(max(one["sent"], one["received"]) for one in everyones)
            floor = busiest * 8 / (gbits * 1e9)
            lines.append(
                {
                    "model": model,
                    "dim": dim,
                    "Gbit/s": gbits,
                    "way": way,
                    "samples/s": speeds[way],
                    "two-fold / it": speeds["two-fold"]["p50"] / speeds[way]["p50"],
                    "it / best of others": speeds[way]["p50"] / best,
                    "bytes a sample": sent / arguments.batch_size,
                    "floor of the link, ms": floor * 1e3,
                    "step, ms": samples / speeds[way]["p50"] * 1e3,
                    "stages, ms": {
                        stage: float(np.mean([np.median(one["stages"][stage]) for one in everyones])) * 1e3
                        for stage in everyones[0]["stages"]
                    },
                    "last loss": rate[way]["losses"][-1],
                }
            )
    return lines


# --- one process, inside of its namespace -----------------------------------------------------------------------------


def work(arguments: argparse.Namespace) -> None:
    """Measure every way at every rate, and note what this process saw in `folder/rank.json`."""
    rank, (dim,), (model,) = arguments.worker, arguments.dims, arguments.model
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_HOSTS, timeout=timedelta(seconds=1800))
    rows = list(preset("criteo-kaggle", scale=arguments.scale).cardinalities)
    batches = [make_batch(rows, arguments.batch_size, rank, place) for place in range(arguments.steps)]
    sides = make_sides(rows, dim, model, arguments, batches)
    found: dict[str, Any] = {}
    reference: dict[str, list[float]] = {way: [] for way in sides}
    for gbits in arguments.gbits:
        if rank == 0:
            set_rate([Host(f"{arguments.prefix}-{i + 1}", "") for i in range(NUM_HOSTS)], gbits)
        dist.barrier()
        found[str(gbits)] = {
            way: {"step seconds": [], "stages": {}, "losses": reference[way], "sent": 0, "received": 0} for way in sides
        }
        for turn in range(arguments.rounds + 1):  # the first one warms up
            order = list(sides) if turn % 2 else list(sides)[::-1]
            for way in order:
                run_side(sides[way], found[str(gbits)][way], arguments.steps, keep=turn > 0)
    check_losses(reference)
    (Path(arguments.folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def make_batch(rows: list[int], size: int, rank: int, place: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * place + rank)
    label = (torch.rand(size, generator=generator) < 0.25).float()
    return Batch(torch.rand(size, NUM_DENSE, generator=generator), draw(rows, size, rank, place), label)


def make_sides(
    rows: list[int], dim: int, model: str, arguments: argparse.Namespace, batches: list[Batch]
) -> dict[str, Any]:
    interaction, hidden = MODELS[model]
    processes = default_processes()
    hot = {f"C{i + 1}": hot_rows(count, arguments.batch_size, arguments.touched) for i, count in enumerate(rows)}
    sides: dict[str, Any] = {}
    for way, name in WAYS.items():
        fresh = build_model(rows, dim, interaction, hidden)
        if name != "torchrec":
            sides[way] = Ours(name, fresh, processes, hot, batches, ahead=way == "two-fold")
        elif importlib.util.find_spec("torchrec") is not None:
            sides[way] = TorchRec(fresh, processes, batches)
    return sides


def run_side(side: Any, notes: dict[str, Any], steps: int, *, keep: bool) -> None:
    """`steps` steps of one way; the time from when all are ready to when all are done."""
    dist.barrier()
    before, start = _counted(), time.perf_counter()
    losses = side.run(range(steps))
    dist.barrier()
    seconds, after = time.perf_counter() - start, _counted()
    everyones = torch.stack(losses)
    dist.all_reduce(everyones)
    notes["losses"] += (everyones / NUM_HOSTS).tolist()
    if keep:
        for stage, measured in side.stages.seconds.items():
            notes["stages"].setdefault(stage, []).extend(measured)
        notes["step seconds"].append(seconds / steps)
        notes["sent"], notes["received"] = ((b - a) / steps for a, b in zip(before, after, strict=True))


def _counted() -> tuple[int, int]:
    """Bytes that this host's interface has sent and received."""
    statistics = Path("/sys/class/net") / INTERFACE / "statistics"
    return tuple(int((statistics / name).read_text()) for name in ("tx_bytes", "rx_bytes"))  # type: ignore[return-value]


def check_losses(reference: dict[str, list[float]]) -> None:
    """Every way computed the same: float32 sums in another order apart."""
    expected = np.array(reference["two-fold"])
    for way, losses in reference.items():
        difference = np.abs(np.array(losses) - expected).max()
        if not difference < 1e-3 * expected.max():
            raise SystemExit(f"links: the losses of {way} are up to {difference:.2g} from those of two-fold")


if __name__ == "__main__":
    main()
