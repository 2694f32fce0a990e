"""Runs of `benchmarks.local`: the processes that train together, and what each of them saw."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from holdall.data.dataset import DataSet
from holdall.distributed.processes import process_group
from holdall.evaluation.evaluate_model import evaluate_model
from holdall.training.config import TrainConfig
from holdall.training.run_folder import make_run_folder
from holdall.training.tracking import read_metrics
from holdall.training.trainer import Trainer

CPU = torch.device("cpu")
TIMEOUT = 600.0
PRELOAD = ["torch._dynamo", "torch.utils.tensorboard", "benchmarks.local_runs"]
"""What is slow to import: once, by the server from which processes are forked."""


@dataclass(frozen=True)
class Side:
    """One way to train."""

    name: str
    strategy: str
    merge_every: int | None = None


PLAIN = Side("one process", "plain")
SYNCHRONOUS = Side("data-parallel", "data-parallel")
LOCAL = (
    Side("local, every 1", "local", 1),
    Side("local, every 10", "local", 10),
    Side("local, every 100", "local", 100),
    Side("local, never", "local"),
)


@dataclass(frozen=True)
class Job:
    """One run. The settings are those of `configs/criteo-kaggle.toml`, with the batches of `benchmarks.criteo_sample`.

    Nothing stops early and nothing is saved before the end: a checkpoint would merge the tables.
    """

    side: Side
    seed: int = 0
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 512
    log_every: int = 1

    def config(self) -> TrainConfig:
        return TrainConfig.of(
            model="rmc2",
            optimizer="rowwise_adagrad",
            lr=0.005,
            table_lr=0.03,
            shuffle="rows",
            strategy=self.side.strategy,  # type: ignore[arg-type]
            merge_every=self.side.merge_every,
            seed=self.seed,
            epochs=self.epochs,
            steps=self.steps,
            batch_size=self.batch_size,
            evaluate_every=None if self.steps is None else self.steps,
            log_every=self.log_every,
            timeout=TIMEOUT,
            device="cpu",
        )


class Watched(Trainer):
    """A run that notes what its own tables are worth before the checkpoint at the end merges those of all processes."""

    own: dict[str, float]

    def save(self, *arguments: Any, **options: Any) -> Path:
        self.own = evaluate_model(self.model, DataSet(self.data.folder, "test"))
        return super().save(*arguments, **options)


def run_jobs(jobs: Sequence[Job], num_processes: int, data: Path, folder: Path) -> list[list[dict[str, Any]]]:
    """What each process found in each job, by job and rank. Runs are left as `folder`/run-0, run-1, ..."""
    folder.mkdir(parents=True)
    multiprocessing.set_forkserver_preload(PRELOAD)
    arguments = (num_processes, list(jobs), data, folder)
    multiprocessing.start_processes(_process, arguments, nprocs=num_processes, start_method="forkserver")
    return [
        [json.loads((folder / f"{number}-{rank}.json").read_text()) for rank in range(num_processes)]
        for number in range(len(jobs))
    ]


def _process(rank: int, num_processes: int, jobs: list[Job], data: Path, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    for number, job in enumerate(jobs):
        if num_processes > 1:  # a group of its own for each run, as torchrun would make
            store, limit = f"file://{folder}/store-{number}", timedelta(seconds=TIMEOUT)
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_processes, timeout=limit)
        found = _run(job, data, folder / f"run-{number}")
        if num_processes > 1:
            dist.barrier()
            dist.destroy_process_group()
        (folder / f"{number}-{rank}.json").write_text(json.dumps(found))


def _run(job: Job, data: Path, out: Path) -> dict[str, Any]:
    """Train; what this process measured."""
    with (
        process_group(CPU, TIMEOUT) as processes,
        make_run_folder(out, processes, resume=False, overwrite=False) as rank_log,
    ):
        trainer = Watched(data, out, job.config(), quiet=True, processes=processes, rank_log=rank_log)
        start = [group.weight.detach().clone() for group in trainer.optimizers.row_groups]
        result = trainer.run()
        moved = sum(
            float((group.weight.detach() - before).double().square().sum())
            for group, before in zip(trainer.optimizers.row_groups, start, strict=True)
        )
    return {**result, "own_auc": trainer.own["auc"], "moved": moved**0.5, "stages": trainer.strategy.stages.means()}


def differences(run: Path, result: dict[str, Any]) -> list[float]:
    """How far processes were apart before each merge, that of the checkpoint included; the log has a row a step."""
    found: list[float] = []
    merges = 0.0
    for row in read_metrics(run):
        if row.get("merges", 0) > merges:
            merges = row["merges"]
            found.append(row["difference_between_ranks"])
    if result.get("merges", 0) > merges:
        found.append(result["difference_between_ranks"])
    return found


def step_seconds(run: Path, batch_size: int) -> float:
    """Seconds a step between the first row of the log and the last: without the start, the end and evaluations."""
    rows = [row for row in read_metrics(run) if row["split"] == "train"]
    steps = rows[-1]["step"] - rows[0]["step"]
    seconds = ((b["step"] - a["step"]) * batch_size / b["samples_per_second"] for a, b in itertools.pairwise(rows))
    return sum(seconds) / steps
