"""What steps that are CUDA graphs cost the host that launches them (`Captured`): that of the code that trains, on
batches so small that nothing else shows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdall.batch import Batch, Ids
from holdall.kernels.path import HAS_TRITON
from holdall.models.dlrm import DLRMConfig
from holdall.models.model import Model
from holdall.placement.clock import Clock, fit_line
from holdall.placement.hardware import Captured, Line
from holdall.schema import DenseColumn, Feature, Schema
from holdall.tiers.pipeline import Pipeline, rooms_for
from holdall.tiers.place import place
from holdall.training.captured_step import CapturedStep
from holdall.training.copy_ahead import copied_ahead
from holdall.training.optimizers import OptimizerConfig, Optimizers

FEATURES = 26
SAMPLES = 64
"""Of a batch that takes no time but for what the host does."""
ROWS = 1000
COPIED_ROWS = 100_000
"""Rows of a table, and of one whose rows the host copies: no cache holds those."""
COPIED_SAMPLES = (128, 2048)
DEPTH = 2
"""Steps ahead that rows are fetched."""
STEPS = (16, 32)
"""Steps of a run that do not count, and that do."""


def measure_captured(clock: Clock, folder: Path) -> Captured | None:
    """None where there is no GPU. `folder` is where a file of rows is made, and removed."""
    if clock.device.type != "cuda":
        return None
    return Captured(launch_far=_launch_far(clock), launch_step=_launch_step(clock), copied=_copied(clock, folder))


def _model(clock: Clock, rows: int = ROWS, dense_device: str | None = None) -> Model:
    """A small model: nothing that it computes takes long."""
    features = tuple(Feature(name=f"f{i}", num_rows=rows, unseen=rows - 1) for i in range(FEATURES))
    schema = Schema(label="y", dense=(DenseColumn(name="x"),), features=features, splits={})
    config = DLRMConfig(dim=16, bottom=(16,), top=(16,))
    return config.build(schema, device=clock.device, dense_device=dense_device)


def _batches(num: int, samples: int = SAMPLES, rows: int = ROWS) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(num):
        ids = torch.randint(rows, (FEATURES, samples), generator=generator, dtype=torch.int32)
        yield Batch(torch.rand(samples, 1), Ids(ids, None, FEATURES), torch.ones(samples))


def _launch_step(clock: Clock) -> float:
    """A step whose batch is copied ahead and that is replayed, with its loss."""
    model = _model(clock)
    optimizers = Optimizers(model, OptimizerConfig())

    def backward(batch: Batch) -> Tensor:
        loss = model(batch).mean()
        loss.backward()
        return loss.detach()

    step = CapturedStep(backward, optimizers, SAMPLES)
    on_device = copied_ahead(_batches(sum(STEPS)), clock.device, lambda batch: model.bags.check(batch.ids))
    return _host_seconds(step.step(moved) for _, moved in on_device)


def _launch_far(clock: Clock) -> float:
    """What a pack with far rows adds to a step: finding, fetching, taking over, sending back; rows and their state.

    Nothing where there are no kernels for it: no pack is moved so then.
    """
    if not HAS_TRITON:
        return 0.0
    model = _model(clock, dense_device="meta")
    return _far_seconds(clock, model, _batches(sum(STEPS)), fetch_by="kernel")


def _copied(clock: Clock, folder: Path) -> Line:
    """The same where the host copies the rows, from a file in the system's memory, by rows."""
    counts, seconds = [], []
    for samples in COPIED_SAMPLES:
        with tempfile.TemporaryDirectory(dir=folder) as files:
            model = _model(clock, COPIED_ROWS, dense_device="meta")
            batches = _batches(sum(STEPS), samples, COPIED_ROWS)
            tails = dict.fromkeys(model.bags.features.values(), "disk")
            seconds.append(_far_seconds(clock, model, batches, tails=tails, folder=Path(files)))
            counts.append(FEATURES * samples)  # nearly all of them different
    return fit_line(counts, seconds)


def _far_seconds(clock: Clock, model: Model, batches: Iterator[Batch], **options: Any) -> float:
    """Of bringing the rows of batches, none of which is hot, and taking them home."""
    cold = dict.fromkeys(model.bags.features.values(), 0)
    tiers = place(model, cold, clock.device, num_rooms=rooms_for(DEPTH), **options)
    Optimizers(model, OptimizerConfig())
    pipeline = Pipeline(tiers, DEPTH)

    def steps() -> Iterator[None]:
        for _ in pipeline.steps(batches, lambda batch: model.bags.check(batch.ids)):
            yield
            pipeline.finish_step()

    seconds = _host_seconds(steps())
    pipeline.close()
    return seconds


def _host_seconds(steps: Iterator[object], now: Callable[[], float] = time.perf_counter) -> float:
    """Mean seconds of the steps that count."""
    warm, count = STEPS
    for _ in range(warm):
        next(steps)
    torch.cuda.synchronize()
    start = now()
    for _ in range(count):
        next(steps)
    taken = now() - start
    for _ in steps:
        pass
    return taken / count
