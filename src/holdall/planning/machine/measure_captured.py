"""What steps of a GPU cost its host (`Captured`): of the code that trains, with all its threads, since they take turns
with the interpreter, and of a model so small that the device waits for its host.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdall.data.batch import Batch
from holdall.data.columns import Array, Columns
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.kernels.dispatch import HAS_TRITON
from holdall.models.dlrm import DLRMConfig
from holdall.models.loss import logloss
from holdall.models.model import Model
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.planning.machine.clock import Clock, fit, fit_line
from holdall.planning.machine.hardware import Captured
from holdall.runtime.batch_prefetch import prefetch_to_device
from holdall.runtime.captured_step import CapturedStep
from holdall.tiers.pipeline import Pipeline
from holdall.tiers.placement import place
from holdall.tiers.staging import buffers_for

FEATURES, DENSE = 26, 13
"""Of a batch, as Criteo has them."""
SAMPLES = 64
"""Of a batch that takes no time but for what the host does."""
ROWS = 1000
TIERED_ROWS, TIERED_HOT = 100_000, 1000
"""Rows of a table, and of one with far rows: no cache holds those. Hot ones of that, if any."""
COPIED = ((128, 1.0), (2048, 1.0), (16384, 0.1))
"""Samples, and share of their lookups that are far."""
LAUNCHED = ((SAMPLES, 1.0), (16384, 0.05))
"""The same where kernels move the rows: so few that the device waits for its host."""
HIDDEN = (1, 4)
"""Hidden layers of each of the two MLPs that are launched one by one."""
DEPTH = 2
"""Steps ahead that rows are fetched."""
STEPS = (24, 6, 12)
"""Steps of a run that do not count, and turns and steps of each that do."""
NUM_STEPS = STEPS[0] + STEPS[1] * STEPS[2]


def measure_captured(clock: Clock, folder: Path) -> Captured | None:
    """None where there is no GPU. `folder` is where a file of rows is made, and removed."""
    if clock.device.type != "cuda":
        return None
    return taken_apart(
        [_plain(clock, samples) for samples, _ in LAUNCHED],
        [_reached(clock, samples, far) for samples, far in LAUNCHED],
        [_launch_layers(clock, hidden) for hidden in HIDDEN],
        [_copied(clock, folder, samples, far) for samples, far in COPIED],
    )


def taken_apart(
    plain: Sequence[float], reached: Sequence[float], layers: Sequence[float], copied: Sequence[float]
) -> Captured:
    """What steps of several sizes tell: plain ones, with rows that kernels reach, layer by layer, and with rows that
    are copied."""
    numbers = [_numbers(samples) for samples, _ in LAUNCHED]
    launch_step = fit_line(numbers, plain)
    alone = [launch_step.seconds(_numbers(samples)) for samples, _ in COPIED]
    return Captured(
        launch_step=launch_step,
        launch_far=fit_line(numbers, reached),
        launch_layers=fit_line([_num_layers(hidden) for hidden in HIDDEN], layers),
        copied=fit(_copied_work(), [max(1e-9, whole - step) for whole, step in zip(copied, alone, strict=True)]),
    )


def _numbers(samples: int) -> int:
    """Of a batch: ids, dense values and labels."""
    return samples * (FEATURES + DENSE + 1)


def _model(clock: Clock, rows: int = ROWS, dense_device: str | None = None, hidden: int = 1) -> Model:
    """A small model: nothing that it computes takes long."""
    features = tuple(Feature(name=f"f{i}", num_rows=rows, unseen=rows - 1) for i in range(FEATURES))
    schema = Schema(
        label="y", dense=tuple(DenseColumn(name=f"x{i}") for i in range(DENSE)), features=features, splits={}
    )
    config = DLRMConfig(dim=16, bottom=(16,) * hidden, top=(16,) * hidden)
    return config.build(schema, device=clock.device, dense_device=dense_device)


def _ids(samples: int, rows: int, far: float, steps: int = NUM_STEPS) -> Array:
    """Of so many steps: a share `far` of them is not hot."""
    generator = np.random.default_rng(5)
    shape = (steps * samples, FEATURES)
    if far == 1.0:
        return generator.integers(rows, size=shape, dtype=np.int32)
    cold = generator.random(shape, dtype=np.float32) < far
    hot_ids = generator.integers(TIERED_HOT, size=shape, dtype=np.int32)
    return np.where(cold, generator.integers(TIERED_HOT, rows, size=shape, dtype=np.int32), hot_ids)


def _batches(ids: Array) -> Iterator[Batch]:
    """Batches of a run, made as those of a data set are."""
    count = len(ids)
    dense = np.ones((count, DENSE), dtype=np.float32)
    whole = Columns(label=np.ones(count, dtype=np.uint8), dense=dense, ids=ids)
    one_hot, samples = [True] * FEATURES, count // NUM_STEPS
    return (whole.slice(start, start + samples).batch(one_hot) for start in range(0, count, samples))


def _captured(model: Model, samples: int, settle: Callable[[], None] = lambda: None) -> CapturedStep:
    """Steps of a model, as training takes them."""

    def backward(batch: Batch) -> Tensor:
        loss = logloss(model(batch), batch.label)
        loss.backward()
        return loss.detach()

    return CapturedStep(backward, Optimizers(model, OptimizerConfig()), samples, model.bags.addresses, settle)


def _plain(clock: Clock, samples: int) -> float:
    """A step whose batch is read and copied ahead and that is replayed, with its loss."""
    model = _model(clock)
    step = _captured(model, samples)
    batches = _batches(_ids(samples, ROWS, 1.0))
    on_device = prefetch_to_device(batches, clock.device, lambda batch: model.check(batch.ids))
    return _host_seconds(step.step(moved) for _, moved in on_device)


def _num_layers(hidden: int) -> int:
    """Of both MLPs, each with one more to its outputs."""
    return 2 * (hidden + 1)


def _launch_layers(clock: Clock, hidden: int) -> float:
    """A step of the dense part whose kernels are launched one by one, as where tables are looked up on the host; the
    device is waited for in the middle, for gradients."""
    model = _model(clock, hidden=hidden)
    optimizers = Optimizers(model, OptimizerConfig())
    vectors = torch.rand(SAMPLES, FEATURES, 16, device=clock.device, requires_grad=True)
    dense, label = torch.rand(SAMPLES, DENSE, device=clock.device), torch.ones(SAMPLES, device=clock.device)

    def steps() -> Iterator[None]:
        for _ in range(NUM_STEPS):
            logloss(model.score(dense, vectors), label).backward()
            torch.cuda.current_stream(clock.device).synchronize()
            optimizers.step()
            yield

    return _host_seconds(steps())


def _reached(clock: Clock, samples: int, far: float) -> float:
    """A step with a pack of far rows that kernels reach: finding, fetching, taking over, sending back; rows and their
    state. As without them where there are no kernels for it: no pack is moved so then.
    """
    if not HAS_TRITON:
        return _plain(clock, samples)
    model = _model(clock, TIERED_ROWS, dense_device="meta")
    ids = _ids(samples, TIERED_ROWS, far)
    return _seconds_with_far_rows(clock, model, ids, hot=_num_hot(far), fetch_by="kernel")


def _copied(clock: Clock, folder: Path, samples: int, far: float) -> float:
    """The same where the host copies the rows, from a file in the system's memory."""
    model = _model(clock, TIERED_ROWS, dense_device="meta")
    tails = dict.fromkeys(model.bags.features.values(), "disk")
    ids = _ids(samples, TIERED_ROWS, far)
    with tempfile.TemporaryDirectory(dir=folder) as files:
        return _seconds_with_far_rows(clock, model, ids, hot=_num_hot(far), tails=tails, folder=Path(files))


def _num_hot(far: float) -> int:
    return 0 if far == 1.0 else TIERED_HOT


def _copied_work() -> list[tuple[float, float]]:
    """Lookups and different far rows of a batch of each size."""
    found = []
    for samples, far in COPIED:
        batch = _ids(samples, TIERED_ROWS, far, steps=1)
        rows = sum(int((np.unique(column) >= _num_hot(far)).sum()) for column in batch.T)
        found.append((float(batch.size), float(rows)))
    return found


def _seconds_with_far_rows(clock: Clock, model: Model, ids: Array, *, hot: int, **options: Any) -> float:
    """A step of a model that has so many hot rows of every table."""
    hot_rows = dict.fromkeys(model.bags.features.values(), hot)
    pipeline = Pipeline(place(model, hot_rows, clock.device, num_buffers=buffers_for(DEPTH), **options), DEPTH)
    step = _captured(model, len(ids) // NUM_STEPS, pipeline.synchronize)

    def steps() -> Iterator[None]:
        for _, moved in pipeline.steps(_batches(ids), lambda batch: model.check(batch.ids)):
            step.step(moved)
            pipeline.finish_step()
            yield

    seconds = _host_seconds(steps())
    pipeline.close()
    return seconds


def _host_seconds(steps: Iterator[object]) -> float:
    """Seconds of a step, in the median turn of those that count."""
    warm, turns, size = STEPS
    for _ in range(warm):
        next(steps)
    torch.cuda.synchronize()
    taken = []
    for _ in range(turns):
        start = time.perf_counter()
        for _ in range(size):
            next(steps)
        taken.append((time.perf_counter() - start) / size)
    for _ in steps:
        pass
    return float(np.median(taken))
