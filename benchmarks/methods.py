"""Quality at equal bytes: every table method from the start, and trained dense models in smaller forms.

    python -m benchmarks.methods [--prepared FOLDER or ARCHIVE | --data ../shared/data] [--sets criteo ...]
        [--work FOLDER] [--seeds 5] [--jobs N] [--minutes M] [--plan] [--finish] [--pack ARCHIVE]

Models, batch sizes, epochs and the rule to stop are those of `accuracy_runs.RULES`. The learning rates of each side of
each set are the best of ten by validation logloss, tried with seed 0 at 1/20 of the dense bytes; then every seed is
trained with them. The test split is opened by those last runs only, once each, and nothing is chosen by it.

A run takes one core and depends on no other that runs at the same time. Runs are kept in `<work>/runs.jsonl` as they
come: a call with `--minutes` ends by itself and says what is left, the next one goes on. The card, the tables and the
figures are made when nothing is left, or with `--finish` of what is there. `--pack` writes the prepared folders into
one archive, which `--prepared` reads on another machine. Samples are not part of this repository; sets that are not
there are left out, and said so.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.accuracy import Work
from benchmarks.accuracy_runs import Job
from benchmarks.methods_data import find_folders, pack
from benchmarks.methods_runs import run
from benchmarks.methods_sides import SETS, final_jobs, plan, seconds, sides, tune_jobs, value
from benchmarks.methods_tables import finish

PATIENCE = 2.0
"""A run is begun if so many times its forecast is left of the time."""


class Queue:
    """Runs that can be made, the most valuable first."""

    def __init__(self, work: Work, folders: Mapping[str, Path], seeds: int):
        self.work, self.folders, self.seeds = work, folders, seeds
        self.heap: list[tuple[Any, int, Job]] = []
        self.pushed: set[Job] = set()
        for name, data in folders.items():
            for side in sides():
                self._push(tune_jobs(name, side, data))
                self.push_final(name, side)

    def push_final(self, name: str, side: str) -> None:
        """Add the runs of a side with every seed, if its settings have all been tried."""
        self._push(final_jobs(self.work, name, side, self.folders[name], self.seeds) or [])

    def _push(self, jobs: list[Job]) -> None:
        for job in jobs:
            if job not in self.pushed and self.work.get(job) is None:
                self.pushed.add(job)
                heapq.heappush(self.heap, (value(job), len(self.pushed), job))

    def pop(self, seconds_left: float) -> Job | None:
        """The next run that ends in time."""
        later = []
        found = None
        while self.heap and found is None:
            entry = heapq.heappop(self.heap)
            if PATIENCE * seconds(entry[2]) > seconds_left:
                later.append(entry)
            else:
                found = entry[2]
        for entry in later:
            heapq.heappush(self.heap, entry)
        return found


def make_runs(queue: Queue, num_workers: int, seconds_left: float) -> None:
    """Make the runs of the queue, and those that follow from them, until none is left or the time is up."""
    deadline = time.monotonic() + seconds_left
    running: dict[Future[dict[str, Any]], Job] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        while True:
            while len(running) < num_workers:
                job = queue.pop(deadline - time.monotonic())
                if job is None:
                    break
                running[pool.submit(run, job, queue.folders[job.set])] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                result = future.result()
                queue.work.add(job, result)
                show(job, result)
                if job.stage == "tune":
                    queue.push_final(job.set, job.side)


def show(job: Job, result: Mapping[str, Any]) -> None:
    scores = f"valid {result['valid_logloss']:.5f}" + (f", test AUC {result['auc']:.4f}" if "auc" in result else "")
    where = f"{job.set} {job.stage} {job.side} {job.budget} {job.setting} seed {job.seed}"
    print(f"{where}: {scores}, {result['cpu_seconds']} s", flush=True)


def print_plan(work: Work, folders: Mapping[str, Path], seeds: int) -> int:
    """Say what is left; the number of runs."""
    left = list(plan(work, folders, seeds))
    number = sum(count for _, _, count in left)
    spent = sum(entry["result"]["cpu_seconds"] for entry in work.done.values())
    forecast = sum(cost for _, cost, _ in left)
    print(f"{len(work.done)} runs are done in {spent:,.0f} core-seconds; {number} are left, about {forecast:,.0f}")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the raw samples")
    parser.add_argument("--prepared", type=Path, help="folder of prepared sets, or an archive of --pack")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "holdall-methods")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, each on a core")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after this time")
    parser.add_argument("--plan", action="store_true", help="say what is left, and stop")
    parser.add_argument("--finish", action="store_true", help="write the card of the runs that are done, and stop")
    parser.add_argument("--pack", type=Path, help="write the prepared sets into this archive (.tar.xz), and stop")
    arguments = parser.parse_args()
    start = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    work = Work(arguments.work)
    folders = find_folders(arguments.sets, work, arguments.prepared, arguments.data)
    if arguments.pack:
        pack(folders, arguments.pack)
        return
    left = print_plan(work, folders, arguments.seeds)
    if arguments.plan:
        return
    if left and not arguments.finish:
        seconds_left = 60 * arguments.minutes - (time.monotonic() - start)
        make_runs(Queue(work, folders, arguments.seeds), arguments.jobs, seconds_left)
        left = print_plan(work, folders, arguments.seeds)
    if arguments.finish or not left:
        finish(work, folders, arguments.seeds)


if __name__ == "__main__":
    main()
