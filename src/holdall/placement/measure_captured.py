"""What steps of a GPU cost its host (`Captured`): that of the code that trains, on batches so small that nothing else
shows, and with all its threads, since they take turns with the interpreter.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdall.batch import Batch, Ids, checked_and_pinned
from holdall.data.loader import prefetched
from holdall.helper_threads import READERS, HelperThreads, made_ahead
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
from holdall.training.step import logloss

FEATURES = 26
SAMPLES = 64
"""Of a batch that takes no time but for what the host does."""
ROWS = 1000
COPIED_ROWS = 100_000
"""Rows of a table, and of one whose rows the host copies: no cache holds those."""
COPIED_SAMPLES = (128, 2048)
READ_SAMPLES = (512, 16384)
LAYERS = (1, 4)
"""Hidden layers of the MLPs that are launched one by one."""
AHEAD = 2
"""Batches that a loader has ready."""
DEPTH = 2
"""Steps ahead that rows are fetched."""
STEPS = (16, 32)
"""Steps of a run that do not count, and that do."""


def measure_captured(clock: Clock, folder: Path) -> Captured | None:
    """None where there is no GPU. `folder` is where a file of rows is made, and removed."""
    if clock.device.type != "cuda":
        return None
    return Captured(
        launch_far=_launch_far(clock),
        launch_step=_launch_step(clock),
        launch_layers=_launch_layers(clock),
        copied=_copied(clock, folder),
    )


def read_cost(clock: Clock) -> Line:
    """A batch that threads check and put where a GPU can copy it from, by its numbers, when many come one after the
    other."""
    model = _model(clock)
    numbers, seconds = [], []
    for samples in READ_SAMPLES:
        make = checked_and_pinned(lambda batch: model.check(batch.ids))
        with HelperThreads("read", few=1, count=READERS) as readers:
            made = made_ahead(_batches(samples), make, readers)
            seconds.append(_host_seconds(future.result() for _, future in made))
        numbers.append(samples * (FEATURES + 2))
    return fit_line(numbers, seconds)


def _model(clock: Clock, rows: int = ROWS, dense_device: str | None = None, hidden: int = 1) -> Model:
    """A small model: nothing that it computes takes long."""
    features = tuple(Feature(name=f"f{i}", num_rows=rows, unseen=rows - 1) for i in range(FEATURES))
    schema = Schema(label="y", dense=(DenseColumn(name="x"),), features=features, splits={})
    config = DLRMConfig(dim=16, bottom=(16,) * hidden, top=(16,) * hidden)
    return config.build(schema, device=clock.device, dense_device=dense_device)


def _batches(samples: int = SAMPLES, rows: int = ROWS) -> Iterator[Batch]:
    """Batches of a run, from a loader's thread, which lie in memory as those of a data set do."""
    generator = torch.Generator().manual_seed(5)
    count = sum(STEPS)
    ids = torch.randint(rows, (count, samples, FEATURES), generator=generator, dtype=torch.int32)
    dense, label = torch.rand(count, samples, 1), torch.ones(count, samples)
    made = (Batch(dense[i], Ids(ids[i].t(), None, FEATURES), label[i]) for i in range(count))
    return prefetched(lambda: made, AHEAD)


def _launch_step(clock: Clock) -> float:
    """A step whose batch is copied ahead and that is replayed, with its loss."""
    model = _model(clock)
    optimizers = Optimizers(model, OptimizerConfig())

    def backward(batch: Batch) -> Tensor:
        loss = model(batch).mean()
        loss.backward()
        return loss.detach()

    step = CapturedStep(backward, optimizers, SAMPLES)
    on_device = copied_ahead(_batches(), clock.device, lambda batch: model.check(batch.ids))
    return _host_seconds(step.step(moved) for _, moved in on_device)


def _launch_layers(clock: Clock) -> Line:
    """A step of the dense part whose kernels are launched one by one, as where tables are looked up on the host, by its
    layers; the device is waited for in the middle, for gradients."""
    vectors = torch.rand(SAMPLES, FEATURES, 16, device=clock.device, requires_grad=True)
    dense, label = torch.rand(SAMPLES, 1, device=clock.device), torch.ones(SAMPLES, device=clock.device)

    def steps(model: Model) -> Iterator[None]:
        optimizers = Optimizers(model, OptimizerConfig())
        for _ in range(sum(STEPS)):
            logloss(model.score(dense, vectors), label).backward()
            torch.cuda.current_stream(clock.device).synchronize()
            optimizers.step()
            yield

    models = [_model(clock, hidden=hidden) for hidden in LAYERS]
    counts = [sum(isinstance(module, nn.Linear) for module in model.modules()) for model in models]
    return fit_line(counts, [_host_seconds(steps(model)) for model in models])


def _launch_far(clock: Clock) -> float:
    """What a pack with far rows adds to a step: finding, fetching, taking over, sending back; rows and their state.

    Nothing where there are no kernels for it: no pack is moved so then.
    """
    if not HAS_TRITON:
        return 0.0
    model = _model(clock, dense_device="meta")
    return _far_seconds(clock, model, _batches(), fetch_by="kernel")


def _copied(clock: Clock, folder: Path) -> Line:
    """The same where the host copies the rows, from a file in the system's memory, by rows."""
    counts, seconds = [], []
    for samples in COPIED_SAMPLES:
        with tempfile.TemporaryDirectory(dir=folder) as files:
            model = _model(clock, COPIED_ROWS, dense_device="meta")
            batches = _batches(samples, COPIED_ROWS)
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
        for _ in pipeline.steps(batches, lambda batch: model.check(batch.ids)):
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
