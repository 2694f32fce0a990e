"""Measured host time of training steps on a GPU (`Captured`).

It runs the code that trains, with all its threads, since they share the interpreter, on a model so small that the
device waits for the host.
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
"""Features and dense columns of a batch, as in Criteo."""
SAMPLES = 64
"""Samples of a batch on which the device spends next to no time."""
ROWS = 1000
"""Rows of a table on the device."""
TIERED_ROWS, TIERED_HOT = 100_000, 1000
"""Rows of a table with host or disk rows, more than caches hold, and its hot rows, if any."""
COPIED = ((128, 1.0), (2048, 1.0), (16384, 0.1))
"""Samples, and share of their lookups that are not of hot rows, where the host copies rows."""
LAUNCHED = ((SAMPLES, 1.0), (16384, 0.05))
"""The same where kernels transfer rows: so few that the device waits for the host."""
HIDDEN = (1, 4)
"""Hidden layers of each of the two MLPs that are launched one by one."""
DEPTH = 2
"""Steps ahead that rows are fetched."""
WARM_UP, ROUNDS, ROUND_STEPS = 24, 6, 12
"""Steps of a run that are not timed; rounds that are, and steps of each."""
NUM_STEPS = WARM_UP + ROUNDS * ROUND_STEPS


def measure_captured(clock: Clock, folder: Path) -> Captured | None:
    """Host time of steps; None where there is no GPU. A file of rows is made in `folder` and removed."""
    if clock.device.type != "cuda":
        return None
    return fit_captured(
        [_plain(clock, samples) for samples, _ in LAUNCHED],
        [_by_kernel(clock, samples, cold) for samples, cold in LAUNCHED],
        [_launch_layers(clock, hidden) for hidden in HIDDEN],
        [_copied(clock, folder, samples, cold) for samples, cold in COPIED],
    )


def fit_captured(
    plain: Sequence[float], by_kernel: Sequence[float], layers: Sequence[float], copied: Sequence[float]
) -> Captured:
    """Costs fitted to the seconds of steps of several sizes: without fetched rows, with rows that kernels transfer,
    layer by layer, and with rows that the host copies."""
    numbers = [_numbers(samples) for samples, _ in LAUNCHED]
    launch_step = fit_line(numbers, plain)
    steps = [launch_step.seconds(_numbers(samples)) for samples, _ in COPIED]
    return Captured(
        launch_step=launch_step,
        launch_far=fit_line(numbers, by_kernel),
        launch_layers=fit_line([_num_layers(hidden) for hidden in HIDDEN], layers),
        copied=fit(_copied_work(), [max(1e-9, whole - step) for whole, step in zip(copied, steps, strict=True)]),
    )


def _numbers(samples: int) -> int:
    """Numbers of a batch: ids, dense values and labels."""
    return samples * (FEATURES + DENSE + 1)


def _model(clock: Clock, rows: int = ROWS, dense_device: str | None = None, hidden: int = 1) -> Model:
    """A model so small that its computation takes next to no time."""
    features = tuple(Feature(name=f"f{i}", num_rows=rows, unseen=rows - 1) for i in range(FEATURES))
    schema = Schema(
        label="y", dense=tuple(DenseColumn(name=f"x{i}") for i in range(DENSE)), features=features, splits={}
    )
    config = DLRMConfig(dim=16, bottom=(16,) * hidden, top=(16,) * hidden)
    return config.build(schema, device=clock.device, dense_device=dense_device)


def _ids(samples: int, rows: int, cold: float, steps: int = NUM_STEPS) -> Array:
    """Ids of `steps` batches; a share `cold` of them is not hot."""
    generator = np.random.default_rng(5)
    shape = (steps * samples, FEATURES)
    if cold == 1.0:
        return generator.integers(rows, size=shape, dtype=np.int32)
    is_cold = generator.random(shape, dtype=np.float32) < cold
    hot_ids = generator.integers(TIERED_HOT, size=shape, dtype=np.int32)
    return np.where(is_cold, generator.integers(TIERED_HOT, rows, size=shape, dtype=np.int32), hot_ids)


def _batches(ids: Array) -> Iterator[Batch]:
    """Batches of a run, in the memory layout of a data set's."""
    count = len(ids)
    dense = np.ones((count, DENSE), dtype=np.float32)
    whole = Columns(label=np.ones(count, dtype=np.uint8), dense=dense, ids=ids)
    one_hot, samples = [True] * FEATURES, count // NUM_STEPS
    return (whole.slice(start, start + samples).batch(one_hot) for start in range(0, count, samples))


def _captured(model: Model, samples: int, settle: Callable[[], None] = lambda: None) -> CapturedStep:
    """Captured steps of a model, as in training."""

    def backward(batch: Batch) -> Tensor:
        loss = logloss(model(batch), batch.label)
        loss.backward()
        return loss.detach()

    return CapturedStep(backward, Optimizers(model, OptimizerConfig()), samples, model.bags.addresses, settle)


def _plain(clock: Clock, samples: int) -> float:
    """Seconds of a replayed step whose batch is read and copied ahead."""
    model = _model(clock)
    step = _captured(model, samples)
    batches = _batches(_ids(samples, ROWS, 1.0))
    on_device = prefetch_to_device(batches, clock.device, lambda batch: model.check(batch.ids))
    return _host_seconds(step.step(moved) for _, moved in on_device)


def _num_layers(hidden: int) -> int:
    """Layers of both MLPs, each with an output layer."""
    return 2 * (hidden + 1)


def _launch_layers(clock: Clock, hidden: int) -> float:
    """Seconds of a step of the dense part whose kernels are launched one by one, as where tables are looked up on the
    host. The host waits for the gradients in the middle of the step."""
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


def _by_kernel(clock: Clock, samples: int, cold: float) -> float:
    """Seconds of a step with a pack of host rows that kernels find, fetch and write back, with their state. Where there
    are no such kernels, those of a plain step: they are not used then.
    """
    if not HAS_TRITON:
        return _plain(clock, samples)
    model = _model(clock, TIERED_ROWS, dense_device="meta")
    ids = _ids(samples, TIERED_ROWS, cold)
    return _seconds_with_fetched_rows(clock, model, ids, hot=_num_hot(cold), fetch_by="kernel")


def _copied(clock: Clock, folder: Path, samples: int, cold: float) -> float:
    """Seconds of a step where the host copies the rows from a file in the page cache."""
    model = _model(clock, TIERED_ROWS, dense_device="meta")
    tails = dict.fromkeys(model.bags.features.values(), "disk")
    ids = _ids(samples, TIERED_ROWS, cold)
    with tempfile.TemporaryDirectory(dir=folder) as files:
        return _seconds_with_fetched_rows(clock, model, ids, hot=_num_hot(cold), tails=tails, folder=Path(files))


def _num_hot(cold: float) -> int:
    return 0 if cold == 1.0 else TIERED_HOT


def _copied_work() -> list[tuple[float, float]]:
    """Lookups and distinct fetched rows of a batch of each size."""
    found = []
    for samples, cold in COPIED:
        batch = _ids(samples, TIERED_ROWS, cold, steps=1)
        rows = sum(int((np.unique(column) >= _num_hot(cold)).sum()) for column in batch.T)
        found.append((float(batch.size), float(rows)))
    return found


def _seconds_with_fetched_rows(clock: Clock, model: Model, ids: Array, *, hot: int, **options: Any) -> float:
    """Seconds of a step of a model with `hot` hot rows of every table."""
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
    """Seconds of a step: the median over the timed rounds."""
    for _ in range(WARM_UP):
        next(steps)
    torch.cuda.synchronize()
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(ROUND_STEPS):
            next(steps)
        taken.append((time.perf_counter() - start) / ROUND_STEPS)
    for _ in steps:
        pass
    return float(np.median(taken))
