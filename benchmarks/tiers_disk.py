"""Tables of 60 GB on a machine with less memory: rows on disk against rows in memory, on the same data.

    python -m benchmarks.tiers_disk [--samples 300000] [--rows 234000000]

DLRM with dim 64 and tables in the proportions of Criteo Kaggle, 60 GB in all; ids by a Zipf law in order of popularity.
One run keeps its hot rows in memory and the others in a file (`--tail disk`), the other keeps all rows in memory, which
fits because rows that are never touched take none (`--tail host`). Both runs are processes of their own, so that peak
memory is theirs alone, and must end with the same loss to the last bit: where a row is stored changes nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.card import print_table, write_card
from benchmarks.hot_batches import KAGGLE_ROWS, steady_speed
from holdall.common.sizes import readable_bytes
from holdall.data.arrow_files import write_split_file
from holdall.data.schema import DenseColumn, Feature, Schema, Split
from holdall.data.zipf import Zipf
from holdall.training.config import TrainConfig
from holdall.training.tracking import read_metrics
from holdall.training.trainer import Trainer

DIM = 64
NUM_DENSE = 13
ZIPF = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=300_000)
    parser.add_argument("--rows", type=int, default=234_000_000, help="rows of all tables; of 256 bytes each")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--hot-bytes", default="512MB")
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to put the files (default: a temporary folder)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(train_once(Path(arguments.folder), arguments)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        write_data(Path(folder) / "data", arguments)
        runs = {tail: run_alone(Path(folder), tail) for tail in ("disk", "host")}
    size = arguments.rows * DIM * 4
    rows = [{"tail": tail, **{k: v for k, v in run.items() if k != "stages_ms"}} for tail, run in runs.items()]
    print_table(f"tables of {readable_bytes(size)}, hot rows {arguments.hot_bytes}", rows)
    print_table("milliseconds by stage", [{"tail": tail, **run["stages_ms"]} for tail, run in runs.items()])
    if runs["disk"]["loss"] != runs["host"]["loss"]:
        raise SystemExit("the two runs ended with different losses")
    slower = runs["disk"]["samples_per_second"] / runs["host"]["samples_per_second"]
    write_card(
        "tiers_disk", {"table_bytes": size, "hot_bytes": arguments.hot_bytes, "runs": runs, "disk_over_host": slower}
    )


def run_alone(folder: Path, tail: str) -> dict[str, Any]:
    """One run in a process of its own; its measures."""
    command = [sys.executable, "-m", "benchmarks.tiers_disk", *sys.argv[1:], "--folder", str(folder), "--child", tail]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def train_once(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    config = TrainConfig.of(
        model="rmc3",
        batch_size=arguments.batch_size,
        strategy="split",
        tail=arguments.child,
        hot_bytes=arguments.hot_bytes,
        prefetch=arguments.prefetch,
        log_every=10,
    )
    out = folder / f"run-{arguments.child}"
    start = time.perf_counter()
    trainer = Trainer(folder / "data", out, config, quiet=True)
    started = time.perf_counter() - start
    trainer.run()
    return {
        "samples_per_second": steady_speed(out),
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "start_seconds": started,
        "hot_lookups": trainer.strategy.measures()["hot_share_of_lookups"],
        "loss": [row["loss"] for row in read_metrics(out) if row["split"] == "train"][-1],
        "stages_ms": {stage: seconds * 1e3 for stage, seconds in trainer.strategy.stages.means().items()},
    }


def write_data(folder: Path, arguments: argparse.Namespace) -> None:
    """A data set whose ids are drawn in order of popularity; no id maps, which training does not need."""
    scale = arguments.rows / sum(KAGGLE_ROWS)
    sizes = [max(4, int(rows * scale)) for rows in KAGGLE_ROWS]
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    ids = [Zipf(size, ZIPF).ranks(rng.random(arguments.samples)).astype(np.int32) for size in sizes]
    dense = rng.normal(size=(arguments.samples, NUM_DENSE)).astype(np.float32)
    label = (rng.random(arguments.samples) < 0.25).astype(np.uint8)
    file = write_split_file(folder / "train-00000.arrow", label, dense, np.stack(ids, axis=1), {})
    features = tuple(Feature(name=f"C{n}", num_rows=size, unseen=size - 1) for n, size in enumerate(sizes, start=1))
    columns = tuple(DenseColumn(name=f"I{n}") for n in range(1, NUM_DENSE + 1))
    splits = {"train": Split(rows=len(label), positives=int(label.sum()), files=(file,))}
    Schema(label="label", dense=columns, features=features, splits=splits).save(folder)


if __name__ == "__main__":
    main()
