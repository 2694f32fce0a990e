"""Tables of 63 GB with 4 GB of device memory: rows fetched ahead, against none ahead and against all on the device.

    python -m benchmarks.tiers_gpu [--rows 246000000] [--samples 4000000] [--batch-size 65536]
    python -m benchmarks.tiers_gpu --device cpu --rows 400000 --samples 20000 --batch-size 512 --hot-bytes 4MB   # small

DLRM with the layers of Criteo Terabyte (rmc3, dim 64), bf16, SGD; ids by a Zipf law of 1.05 in order of popularity.
`split` keeps `--hot-bytes` of hot rows on the device and the others in host memory, moved by the host or by kernels;
exact. All tables on the device is `plain`, with no host rows to move. Every step is one CUDA graph on all sides. Speeds
are end to end, from the log of each run: the median of its second half, and its spread. All `split` runs must end with
the same loss to the last bit, and with that of `plain` up to rounding.

Hot rows are chosen by the law that the ids are drawn from, as a profile of a long log would rank them: the samples
trained on here are too few to rank 246 million rows.
"""

from __future__ import annotations

import argparse
import gc
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.card import print_table, write_card
from benchmarks.tiers_disk import DIM, ZIPF, write_data
from holdall.common.sizes import parse_bytes
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.zipf import Zipf
from holdall.runtime.device_times import DeviceTimes
from holdall.training.config import TrainConfig
from holdall.training.strategies.split import SplitStrategy
from holdall.training.tracking import read_metrics
from holdall.training.trainer import Trainer

FBGEMM = {"samples_per_second": 7.34e6, "of_this_run": False, "model": "DLRM-small, dim 128, 15 GB of tables, bf16"}
"""fbgemm's managed-memory cache, measured earlier on an H200 with another model; fbgemm does not install here."""
SHOWN = (
    *("run", "samples_per_second", "p20", "p80", "step_ms", "over_all_on_device", "over_none_ahead", "device_gb"),
    *("start_seconds", "captured", "hot_share_of_lookups", "moved_bytes_per_sample", "loss"),
)
PIPELINE_STAGES = ("_find", "_fetch", "_begin_compute", "_grow_buffers", "_write_back")
MOVER_STAGES = ("find", "find_owners", "required_rows", "fetch", "forward", "write_back")
SKIPPED = 16
"""Steps at the start of a run that the device's stage times leave out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=246_000_000)
    parser.add_argument("--samples", type=int, default=6_000_000)
    parser.add_argument("--batch-size", type=int, default=65_536)
    parser.add_argument("--hot-bytes", default="2.7GB", help="bytes of hot rows; the rest of 4 GB is for the step")
    parser.add_argument("--runs", nargs="+", default=["copy-0", "copy-2", "kernel-0", "kernel-1", "kernel-2", "plain"])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="print the host's time in the parts of a step")
    arguments = parser.parse_args()
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_data(data, arguments)
        for name in sorted(arguments.runs, key=lambda name: "@" in name):  # those that set launch shapes last
            runs[name] = measure(data, Path(folder) / name, arguments, name)
            print(name, runs[name], flush=True)
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
    report(runs, arguments)


def report(runs: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Tables for people and a run card; an error where runs have different results."""
    for run in runs.values():
        for name, other in (("over_all_on_device", "plain"), ("over_none_ahead", f"{run['fetch_by']}-0")):
            if other in runs:
                run[name] = run["samples_per_second"] / runs[other]["samples_per_second"]
    size = arguments.rows * DIM * 4
    shown = [{name: run.get(name) for name in SHOWN} for run in runs.values()]
    print_table(f"{size / 1e9:.0f} GB of tables, {arguments.hot_bytes} of hot rows", shown)
    for where in ("stages_ms", "host_ms"):
        print_table(f"milliseconds by stage: {where}", [{"run": name, **run[where]} for name, run in runs.items()])
    losses = {run["loss"] for name, run in runs.items() if name != "plain"}
    if len(losses) > 1:
        raise SystemExit(f"the runs ended with different losses: {losses}")
    if losses and "plain" in runs and abs(losses.pop() - runs["plain"]["loss"]) > 1e-3:
        raise SystemExit(f"plain ended with another loss: {runs['plain']['loss']}")
    if arguments.device != "cuda":
        return  # a trial of the script
    write_card(
        "tiers_gpu",
        {
            "table_bytes": size,
            "hot_bytes": arguments.hot_bytes,
            "batch_size": arguments.batch_size,
            "runs": runs,
            "fbgemm_managed_cache": FBGEMM,
        },
        notes="Speeds are of the second half of several epochs over the same samples: the host's pages had been "
        "touched, and the first steps and checkpoints are not in them. fbgemm's figure is not of this run and of "
        "another model.",
    )


def measure(data: Path, out: Path, arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Speed, device memory and stages of a run: `copy-K`, `kernel-K`, or `plain`.

    `kernel-K@PxExW` is one with P programs of E numbers and W warps in the kernels that move rows.
    """
    kind, _, shape = name.partition("@")
    fetch_by, _, depth = kind.partition("-")
    if shape:
        from holdall.kernels import host_rows_triton

        host_rows_triton.WHOLE_DEVICE = host_rows_triton.BESIDE_STEPS = host_rows_triton.LaunchShape(
            *map(int, shape.split("x"))
        )
    tiered: dict[str, Any] = {}
    if name != "plain":
        tiered = {
            "strategy": "split",
            "hot_bytes": arguments.hot_bytes,
            "prefetch": int(depth),
            "fetch_by": fetch_by if arguments.device == "cuda" else "copy",
        }
    config = TrainConfig.of(
        model="rmc3",
        batch_size=arguments.batch_size,
        optimizer="sgd",
        precision="bf16" if arguments.device == "cuda" else "float32",
        epochs=arguments.epochs,
        log_every=20,
        device=arguments.device,
        **tiered,
    )
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    hot = hot_by_law(data, parse_bytes(arguments.hot_bytes) // (4 * DIM))
    with mock.patch.object(SplitStrategy, "_choose_hot_rows", return_value=hot):
        trainer = Trainer(data, out, config, quiet=True)
    trainer.save = lambda *_, **__: out  # type: ignore[method-assign]  # 63 GB of checkpoint is not what is measured
    start_seconds = time.perf_counter() - started
    pipeline = getattr(trainer.strategy, "pipeline", None)
    times = DeviceTimes() if on_gpu and pipeline is not None else None
    if pipeline is not None:
        pipeline.times = times
    with host_profile(trainer) if arguments.profile else nullcontext():
        trainer.run()
    rows = [row for row in read_metrics(out) if row["split"] == "train"]
    speeds = [row["samples_per_second"] for row in rows[len(rows) // 2 :]]
    stages = times.medians(SKIPPED) if times is not None else trainer.strategy.stages.means()
    measures = trainer.strategy.measures()
    graph = trainer.steps.graph
    return {
        "run": name,
        "fetch_by": fetch_by,
        "samples_per_second": float(np.median(speeds)),
        "p20": float(np.percentile(speeds, 20)),
        "p80": float(np.percentile(speeds, 80)),
        "step_ms": arguments.batch_size / float(np.median(speeds)) * 1e3,
        "device_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
        "host_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "start_seconds": start_seconds,
        "captured": 0 if graph is None else graph.replays,
        "why_not_captured": "" if graph is None else graph.why_not or "",
        "hot_share_of_lookups": measures.get("hot_share_of_lookups", 1.0),
        "moved_bytes_per_sample": measures.get("moved_bytes_per_sample", 0.0),
        "loss": rows[-1]["loss"],
        "losses": [row["loss"] for row in rows],
        "stages_ms": {stage: seconds * 1e3 for stage, seconds in stages.items()},
        "host_ms": {} if times is None else {s: t * 1e3 for s, t in times.host_medians(SKIPPED).items()},
    }


def hot_by_law(data: Path, num_rows: int) -> dict[str, int]:
    """How many rows of each table are among the `num_rows` likeliest of all tables."""
    laws = {one.name: Zipf(one.num_rows, ZIPF) for one in DataSet(data, "train").schema.features}

    def likelier(law: Zipf, than: float) -> int:
        low, high = 0, law.num_values
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if law.probability(middle) > than else (low, middle)
        return low

    low, high = -60.0, 0.0  # logarithms of a probability
    for _ in range(60):
        middle = (low + high) / 2
        fits = sum(likelier(law, np.exp(middle)) for law in laws.values()) <= num_rows
        low, high = (low, middle) if fits else (middle, high)
    return {name: likelier(law, np.exp(high)) for name, law in laws.items()}


@contextmanager
def host_profile(trainer: Trainer) -> Iterator[None]:
    """Print the host's time in the parts of a step, waiting included, on any thread."""
    taken: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **options)
            taken.setdefault(name, []).append(time.perf_counter() - start)
            return result

        return call

    parts: list[tuple[Any, str]] = [(Batch, "pinned"), (Batch, "to"), (trainer.model.bags, "check")]
    parts += [(trainer.strategy, "after_step"), (trainer, "_after_step"), (trainer.optimizers, "prepare")]
    parts += [(trainer.steps, "run")] + ([(trainer.steps.graph, "step")] if trainer.steps.graph is not None else [])
    if isinstance(trainer.strategy, SplitStrategy):
        parts += [(trainer.strategy.pipeline, name) for name in PIPELINE_STAGES]
        for pack in trainer.strategy.tiers.packs:
            parts += [(pack, "find"), (pack, "begin_step"), *((pack.mover, name) for name in MOVER_STAGES)]
    with ExitStack() as stack:
        for owner, name in parts:
            label = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
            stack.enter_context(mock.patch.object(owner, name, timed(label, getattr(owner, name))))
        yield
    rows = [{"what": name, "ms": float(np.median(times[SKIPPED:])) * 1e3} for name, times in taken.items()]
    print_table("the host", sorted(rows, key=lambda row: -float(row["ms"])))


if __name__ == "__main__":
    main()
