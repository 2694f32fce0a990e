"""Small from the start: what `train --budget 1/40` chooses against dense tables, state of the optimizer counted too.

    python -m benchmarks.methods_start [--prepared FOLDER or ARCHIVE | --data ../shared/data] [--sets criteo ...]
        [--work FOLDER] [--budget 1/40] [--seeds 5] [--jobs N] [--device cuda]

Models, rules and samples are those of `benchmarks.methods`. The learning rates of each side of each set are the best of
the same ten, by the mean validation logloss of two seeds, tried at the budget itself; then every seed is trained with
them. The test split is opened by those last runs only, once each. Runs are kept in `<work>/runs.jsonl` as they come:
a call goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy import Work, commits, describe
from benchmarks.accuracy_runs import Job
from benchmarks.card import print_table, write_card
from benchmarks.methods import show
from benchmarks.methods_data import find_folders
from benchmarks.methods_runs import train_tables
from benchmarks.methods_sides import COUNTED, DENSE, GRID, SETS
from benchmarks.methods_tables import summarise

TUNING_SEEDS = 2
"""Seeds that every setting is tried with: of one seed, the best of ten on the Criteo sample is mostly luck."""
NOTES = (
    "'auto, counts' is what --budget chooses from the counts of a data folder: 8-bit rows, narrow rows of bytes and "
    "one row for the rest of a table. peak_share is the share of tables and optimizer state (row-wise Adagrad) in that "
    "of dense tables. Settings of both sides were tried with two seeds at the budget itself and chosen by validation "
    "logloss. The width of narrow rows and their gain were chosen on the validation splits of the criteo and "
    "bookcrossing samples. A difference to dense has its standard error over seeds."
)


def tune_jobs(name: str, side: str, budget: str) -> list[Job]:
    """Runs that try the settings of a side."""
    return [Job(name, side, budget, setting, seed, "tune") for seed in range(TUNING_SEEDS) for setting in GRID]


def best_setting(work: Work, name: str, side: str, budget: str) -> tuple[float, float]:
    """The setting of the lowest mean validation logloss, when all have been tried."""
    losses: dict[tuple[float, float], list[float]] = {}
    for job in tune_jobs(name, side, budget):
        result = work.get(job)
        assert result is not None, f"{job} is not done"
        losses.setdefault(job.setting, []).append(result["valid_logloss"])
    return min(losses, key=lambda setting: float(np.mean(losses[setting])))


def run(job: Job, data: Path, device: str) -> dict[str, Any]:
    """Train one model."""
    start = time.process_time()
    _, found = train_tables(job, data, device)
    return {**found, "cpu_seconds": round(time.process_time() - start, 1)}


def make_runs(
    pool: ProcessPoolExecutor, work: Work, jobs: Sequence[Job], folders: Mapping[str, Path], device: str
) -> None:
    """Make the runs that are not done."""
    left = sorted((job for job in jobs if work.get(job) is None), key=lambda job: job.side == DENSE)  # long ones first
    running = {pool.submit(run, job, folders[job.set], device): job for job in left}
    for future in as_completed(running):
        work.add(running[future], future.result())
        show(running[future], future.result())


def finish(work: Work, folders: Mapping[str, Path], finals: Sequence[Job], device: str) -> None:
    """Print the table and write the card."""
    samples = {name: describe(name, data) for name, data in folders.items()}
    runs = [{**vars(job), **result} for job in finals if (result := work.get(job)) is not None]
    rows = [row for name in folders for row in summarise(runs, name, samples[name])]
    shown = ("set", "side", "peak_share", "auc", "auc_sd", "minus_dense", "standard_error", "valid_minus_dense")
    print_table("small from the start", [{column: row.get(column) for column in shown} for row in rows])
    results = {"device": device, "samples": samples, "from_start": rows, "runs_by_commit": commits(work)}
    print(write_card("methods_start", results, NOTES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the raw samples")
    parser.add_argument("--prepared", type=Path, help="folder of prepared sets, or an archive of --pack")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["criteo", "bookcrossing"])
    parser.add_argument("--budget", default="1/40")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "holdall-methods-start")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, each on a core")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    work = Work(arguments.work)
    folders = find_folders(arguments.sets, work, arguments.prepared, arguments.data)
    sides = [(name, side, budget) for name in folders for side, budget in ((COUNTED, arguments.budget), (DENSE, "1"))]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        make_runs(pool, work, [job for side in sides for job in tune_jobs(*side)], folders, arguments.device)
        finals = [
            Job(*side, best_setting(work, *side), seed, "final") for side in sides for seed in range(arguments.seeds)
        ]
        make_runs(pool, work, finals, folders, arguments.device)
    finish(work, folders, finals, arguments.device)


if __name__ == "__main__":
    main()
