"""Hot batches against plain training: quality, bytes between host and device, and speed.

    python -m benchmarks.hot_batches [--source ../shared/data/criteo_kaggle/train.tsv.gz] [--seeds 3]
    python -m benchmarks.hot_batches --speed-only --device cuda    # tables on the host against hot batches, on a GPU

Quality: accuracy, AUC and logloss on the test split of a real Criteo sample and of a planted set, with the same
settings for both, over several seeds. Bytes: what a sample costs when tables are looked up on the host (`host`: pooled
vectors go to the device, gradients come back), with `split` and with `hot-batches`. Speed: the same three, end to end,
on a generated set of Criteo Kaggle's shape; on a GPU this is the figure of the paper (1.8 times tables on the host).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.card import print_table, write_card
from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.popularity.hot import count_lookups
from holdall.training.config import TrainConfig
from holdall.training.evaluation import evaluate
from holdall.training.tracking import read_metrics
from holdall.training.trainer import train

METRICS = ("auc", "logloss", "accuracy")
PLANTED = SyntheticConfig(rows=200_000, cardinalities=(20_000, 5_000, 40_000, 300, 50, 10_000), num_dense=4, zipf=1.1)
KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=Path("../shared/data/criteo_kaggle/train.tsv.gz"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hot-share", type=float, default=0.1, help="hot bytes as a share of all table bytes")
    parser.add_argument("--speed-only", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the rows of the tables of the speed part")
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--hot-bytes", default="256MB")
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--card", default="hot_batches")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.speed_only:
            if not arguments.source.exists():
                sys.exit(f"the Criteo sample is not at {arguments.source}: give its place with --source")
            criteo, planted = Path(folder) / "criteo", Path(folder) / "planted"
            prepare([arguments.source], criteo, PrepareConfig(valid=0.05, test=0.2))
            write_prepared(PLANTED, planted)
            for name, data in (("criteo sample", criteo), ("planted", planted)):
                results[name] = quality(name, data, Path(folder), arguments)
        results["speed"] = speed(Path(folder), arguments)
    write_card(arguments.card, results)


def quality(name: str, data: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Metrics of plain training and of hot batches over the seeds, and bytes a sample of every strategy."""
    split = DataSet(data, "train")
    num_rows = sum(len(counts) for counts in count_lookups(split).values())
    hot_bytes = f"{int(num_rows * (16 * 4 + 4) * arguments.hot_share)}B"
    runs: dict[str, list[dict[str, float]]] = {}
    for strategy in ("plain", "hot-batches"):
        for seed in range(arguments.seeds):
            config = TrainConfig(
                model="rmc2",
                epochs=2,
                batch_size=512,
                lr=0.005,
                table_lr=0.03,
                seed=seed,
                evaluate_every=25,
                early_stopping=1000,  # never, but the best one is kept: on data this small, models overfit
                strategy=strategy,  # type: ignore[arg-type]
                hot_bytes=None if strategy == "plain" else hot_bytes,
                device=arguments.device,
            )
            out = folder / f"{name}-{strategy}-{seed}".replace(" ", "-")
            result = train(data, out, config, quiet=True)
            runs.setdefault(strategy, []).append({**result, **evaluate(out, "test")})
    rows = [
        {"strategy": strategy, **{metric: _mean(found, metric) for metric in METRICS}}
        for strategy, found in runs.items()
    ]
    spread = {metric: _spread(runs["plain"], metric) for metric in METRICS}
    rows.append({"strategy": "spread of plain over seeds", **spread})
    print_table(f"{name}: {len(split):,} training rows, {len(DataSet(data, 'test')):,} test rows", rows)
    moved = {"hot-batches": _mean(runs["hot-batches"], "moved_bytes_per_sample")}
    for strategy in ("host", "split"):
        config = TrainConfig(
            model="rmc2",
            batch_size=512,
            lr=0.005,
            strategy=strategy,  # type: ignore[arg-type]
            hot_bytes=hot_bytes if strategy == "split" else None,
            device=arguments.device,
        )
        moved[strategy] = train(data, folder / f"{name}-{strategy}", config, quiet=True)["moved_bytes_per_sample"]
    print(f"bytes moved a sample: {', '.join(f'{key} {value:,.0f}' for key, value in moved.items())}")
    return {
        "train_rows": len(split),
        "hot_bytes": hot_bytes,
        "hot_share_of_inputs": _mean(runs["hot-batches"], "hot_share_of_inputs"),
        "means": rows,
        "difference": {m: _mean(runs["hot-batches"], m) - _mean(runs["plain"], m) for m in METRICS},
        "spread": spread,
        "moved_bytes_per_sample": moved,
        "moved_over_host": {key: value / moved["host"] for key, value in moved.items()},
        "runs": {key: [{m: run[m] for m in METRICS} for run in found] for key, found in runs.items()},
    }


def speed(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples a second of an epoch, end to end, tables of Criteo Kaggle's shape and dim 16."""
    data = folder / "kaggle"
    rows = tuple(max(3, int(count * arguments.scale)) for count in KAGGLE_ROWS)
    write_prepared(SyntheticConfig(rows=arguments.samples, cardinalities=rows, num_dense=13, zipf=1.05), data)
    found = []
    for strategy in ("host", "split", "hot-batches", "plain"):
        tiered = strategy in ("split", "hot-batches")
        config = TrainConfig(
            model="rmc2",
            batch_size=arguments.batch_size,
            lr=0.005,
            strategy=strategy,  # type: ignore[arg-type]
            hot_bytes=arguments.hot_bytes if tiered else None,
            prefetch=arguments.prefetch if tiered else 0,
            device=arguments.device,
            precision="bf16" if arguments.device == "cuda" else "float32",
            evaluate_every=10**9,
            epochs=2,
            log_every=10,
        )
        out = folder / f"speed-{strategy}"
        result = train(data, out, config, quiet=True)
        found.append(
            {
                "strategy": strategy,
                "samples_per_second": steady_speed(out),
                "moved_bytes_per_sample": result.get("moved_bytes_per_sample", 0.0),
                "hot_share_of_inputs": result.get("hot_share_of_inputs", 0.0),
            }
        )
    base = next(row["samples_per_second"] for row in found if row["strategy"] == "host")
    for row in found:
        row["over_host"] = row["samples_per_second"] / base
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print_table(f"end to end on {name}, batch {arguments.batch_size}, hot bytes {arguments.hot_bytes}", found)
    return {"device": name, "tables": list(rows), "batch_size": arguments.batch_size, "runs": found}


def steady_speed(run: Path) -> float:
    """Samples a second of the second half of a run, from its log: without start, evaluation and checkpoints."""
    logged = [row["samples_per_second"] for row in read_metrics(run) if row["split"] == "train"]
    half = logged[len(logged) // 2 :]
    return len(half) / sum(1 / speed for speed in half)


def _mean(runs: list[dict[str, float]], metric: str) -> float:
    return float(np.mean([run[metric] for run in runs]))


def _spread(runs: list[dict[str, float]], metric: str) -> float:
    return float(np.ptp([run[metric] for run in runs]))


if __name__ == "__main__":
    main()
