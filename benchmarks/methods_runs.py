"""One run of the comparison of table methods, by the rules of the accuracy benchmark (`accuracy_runs.RULES`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy_runs import OPTIMIZER, RULES, Job, stepper, train
from benchmarks.methods_release import release_forms
from benchmarks.methods_sides import DENSE, methods_of
from holdall.data.dataset import DataSet
from holdall.models import Model
from holdall.optim.config import OptimizerConfig
from holdall.optim.table_bytes import count_table_bytes


def run(job: Job, data: Path) -> dict[str, Any]:
    """Train one model; of a dense one with its final setting, the forms too."""
    start = time.process_time()
    model, found = train_tables(job, data)
    if job.side == DENSE and job.stage == "final":
        found["forms"] = list(release_forms(without_optimizer(model, job, data), job, data))
    return {**found, "cpu_seconds": round(time.process_time() - start, 1)}


def train_tables(job: Job, data: Path, device: str = "cpu") -> tuple[Model, dict[str, Any]]:
    """The trained model of a job, its scores and its bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    model = build(job, data).to(device)
    found = train(model, stepper(model, job.setting), job, data)
    peak = count_table_bytes(model, OptimizerConfig(name=OPTIMIZER).kind)
    found |= {"bytes": model.bags.num_bytes(), "peak_bytes": peak.total, "dense_peak_bytes": peak.dense_total}
    return model, found


def build(job: Job, data: Path) -> Model:
    """The model of a job with fresh tables."""
    methods = methods_of(job.set, job.side, job.budget, data)
    assert methods is not None, f"{job.side} cannot keep {job.budget}"
    generator = torch.Generator().manual_seed(job.seed)
    return RULES[job.set].model.build(DataSet(data).schema, methods, generator=generator)


def without_optimizer(model: Model, job: Job, data: Path) -> Model:
    """The same dense model, whose tables can be replaced."""
    copy = build(job, data)
    copy.load_state_dict(model.state_dict())
    return copy
