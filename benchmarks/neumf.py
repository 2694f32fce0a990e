"""NeuMF on MovieLens-1M with the published negatives: dense tables, and tables in an eighth of their bytes.

    python -m benchmarks.neumf [--source ../shared/data/ml-1m] [--device auto] [--workers N] [--seconds S]

HR@10 and NDCG@10 of each user's last film among 99 others, as NCF (He et al., 2017) measures them; no pre-training.
Protocol:

1. One more training pair of every user is held out (`holdall prepare --format movielens`); the public pairs have no
   times, so it is drawn at random. It is ranked against 99 films that the user has not chosen.
2. Every setting of the search below is trained on the rest with one seed and scored by NDCG@10 of these validation
   pairs after its last epoch. No epoch is picked: the learning rate falls linearly to zero over the run, and the number
   of epochs is one of the settings.
3. The best dense setting of any size, and the best of at most 32 factors; and for each the best of those whose two
   tables together take at most an eighth of its tables' bytes: these are trained anew on all training pairs
   (`--valid 0`) with five other seeds. Only these models see the test.

What is in an eighth of the bytes is trained from the start, or is the best fit to the dense model of the same seed,
trained on for two epochs; with `bits`, rows are rounded at the end.

Validation pairs are random ones and test pairs the last in time, so validation scores are higher; compare each with its
own kind. The batches are those of `holdall train --shuffle rows --negatives 4`: four fresh negatives a pair and epoch.
They do not depend on the model, so each epoch is drawn once and kept for all. The data is not part of this repository.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.card import print_table, write_card
from benchmarks.neumf_model import SHARE, Job, Setting, draw_epoch, run
from holdall.data.prepare import PrepareConfig, prepare

TUNE_EPOCHS = 2
MOST_FACTORS = (128, 32)
SEARCH_SEED, FINAL_SEEDS = 0, (1, 2, 3, 4, 5)

Started = tuple[Job, "Future[dict[str, Any] | None]"]


def prepare_sets(source: Path, folder: Path) -> dict[str, Path]:
    """`search`: a validation pair held out of every user. `final`: all training pairs."""
    sets = {"search": folder / "search", "final": folder / "final"}
    if not sets["search"].exists():
        prepare([source], sets["search"], PrepareConfig(format="movielens"))
    if not sets["final"].exists():
        prepare([source], sets["final"], PrepareConfig(format="movielens", valid=0))
    return sets


def dense_settings() -> list[Setting]:
    """What is tried with dense tables: sizes first, then the rate and the penalty of the largest."""
    sizes = ((8, 4), (16, 4), (32, 3), (32, 4), (64, 3), (64, 4), (16, 3), (128, 2))
    first = [
        Setting(factors=factors, num_layers=num_layers, lr=lr, l2=l2)
        for (lr, l2), (factors, num_layers) in itertools.product(
            ((0.003, 0.0), (0.003, 0.02), (0.006, 0.02), (0.003, 0.06)), sizes
        )
    ]
    second = [
        Setting(factors=64, num_layers=4, batch_size=16384, epochs=10, lr=lr, l2=l2)
        for lr, l2 in ((0.004, 0.015), (0.004, 0.02), (0.006, 0.02), (0.004, 0.03), (0.006, 0.03), (0.004, 0.04))
    ]
    return [*first, *second, Setting(factors=32, num_layers=3, epochs=8, lr=0.004, l2=0.002)]


def compressed_settings(dense: Setting) -> list[Setting]:
    """What is tried in an eighth of the bytes: methods trained from the start, and fitted to the best dense model."""
    methods = ("mixed_dimension", "frobenius", "hot_cold", "tensor_train", "robe", "quotient_remainder", "memcom")
    scratch = [replace(dense, method=method, lr=lr) for lr, method in itertools.product((0.004, 0.008), methods)]
    fitted = replace(dense, tune_epochs=TUNE_EPOCHS, tune_lr=0.002)
    rounded = [
        replace(fitted, method="mixed_dimension", bits=8, item_share=item_share, tune_lr=lr)
        for item_share, lr in ((SHARE, 0.001), (SHARE, 0.002), (SHARE, 0.004), (0.15, 0.002))
    ]
    return [*scratch, *rounded, replace(fitted, method="mixed_dimension"), replace(fitted, method="clustered")]


class Bench:
    """The prepared sets, and the processes that train models on them side by side."""

    def __init__(self, sets: dict[str, Path], *, device: str, workers: int, seconds: float, log: Path | None):
        self.sets, self.device, self.log = sets, device, log
        self.deadline = time.time() + seconds
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.trainers = ProcessPoolExecutor(workers, mp_context=context)
        self.drawers = ProcessPoolExecutor(max(1, workers // 2), mp_context=context)
        self.rows: list[dict[str, Any]] = []

    def search(self, settings: Sequence[Setting]) -> list[dict[str, Any]]:
        return self.wait(self.start("search", "valid", settings, (SEARCH_SEED,)))

    def final(self, setting: Setting) -> list[dict[str, Any]]:
        return self.wait(self.start("final", "test", [setting], FINAL_SEEDS))

    def start(self, data: str, split: str, settings: Sequence[Setting], seeds: Sequence[int]) -> list[Started]:
        """Start training every setting with every seed."""
        options: dict[str, Any] = {"data": str(self.sets[data]), "split": split}
        options |= {"device": self.device, "deadline": self.deadline}
        jobs = [Job(setting=setting, seed=seed, **options) for setting in settings for seed in seeds]
        started = [(job, self.trainers.submit(run, job)) for job in jobs]
        for epoch in range(max(setting.all_epochs for setting in settings)):
            for seed in seeds:
                self.drawers.submit(draw_epoch, self.sets[data], seed, epoch)
        return started

    def wait(self, started: Sequence[Started]) -> list[dict[str, Any]]:
        """What came of them, best first; those stopped by the deadline last."""
        rows: list[dict[str, Any]] = []
        jobs = {future: job for job, future in started}
        for future in as_completed(jobs):
            job, found = jobs[future], future.result()
            if found is None:
                continue
            rows.append({"split": job.split, "seed": job.seed, **asdict(job.setting), **found})
            if self.log is not None:
                with self.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            score = f"{found['hr@10']:.4f} {found['ndcg@10']:.4f}" if "hr@10" in found else "stopped"
            print(f"{len(rows)}/{len(jobs)} {score} {found['seconds']:.0f}s {job.setting} seed {job.seed}", flush=True)
        return sorted(rows, key=lambda row: -row.get("ndcg@10", 0.0))

    def close(self) -> None:
        for pool in (self.drawers, self.trainers):
            pool.shutdown(cancel_futures=True)


def setting_of(row: dict[str, Any]) -> Setting:
    return Setting(**{name: row[name] for name in asdict(Setting())})


def best_of(rows: Sequence[dict[str, Any]], *, factors: int, num_bytes: float = float("inf")) -> dict[str, Any]:
    """What has the best validation NDCG of those with at most so many factors and bytes."""
    fits = [row for row in rows if "ndcg@10" in row and row["factors"] <= factors and row["bytes"] <= num_bytes]
    return max(fits, key=lambda row: row["ndcg@10"])


def summarise(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds."""
    made: dict[str, Any] = {"tables": name, "seeds": len(rows), "bytes": rows[0]["bytes"]}
    for metric in ("hr@10", "ndcg@10"):
        values = [row[metric] for row in rows]
        made |= {metric: float(np.mean(values)), f"{metric} lowest": min(values), f"{metric} highest": max(values)}
    return made


def measure(bench: Bench) -> dict[str, Any]:
    """The whole protocol."""
    search, found = bench.search(dense_settings()), {}
    for factors in MOST_FACTORS:
        dense = best_of([row for row in search if row["method"] == "dense"], factors=factors)
        tried = bench.search(compressed_settings(setting_of(dense)))
        small = best_of(tried, factors=factors, num_bytes=SHARE * dense["bytes"])
        search += tried
        for name, row in (("dense", dense), ("an eighth", small)):
            found[f"{row['factors']} factors, {name}"] = bench.final(setting_of(row))
    return results_of(found, search)


def results_of(found: dict[str, list[dict[str, Any]]], search: list[dict[str, Any]]) -> dict[str, Any]:
    means = [summarise(name, rows) for name, rows in found.items()]
    print_table("NeuMF on MovieLens-1M, test", means)
    return {
        "test": means,
        "settings": {name: asdict(setting_of(rows[0])) for name, rows in found.items()},
        "runs": found,
        "search": search,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path("../shared/data/ml-1m"))
    parser.add_argument("--sets", type=Path, help="folder for the prepared sets, which are used if they are there")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="models trained side by side")
    parser.add_argument("--seconds", type=float, default=1e9, help="leave out models that are not done by then")
    parser.add_argument("--log", type=Path, help="JSON lines of every model as it is done")
    arguments = parser.parse_args()
    if arguments.sets is None and not arguments.source.exists():
        sys.exit(f"MovieLens-1M is not at {arguments.source}: give its place with --source")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        sets = prepare_sets(arguments.source, arguments.sets or Path(folder))
        options = {name: getattr(arguments, name) for name in ("device", "workers", "seconds", "log")}
        bench = Bench(sets, **options)
        results = measure(bench)
        bench.close()
    write_card("neumf", results)


if __name__ == "__main__":
    main()
