"""What steps that are CUDA graphs cost beyond the device's part of lookups, layers and updates; see `Captured`.

The host's part is that of the code that trains, on batches so small that nothing else shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from holdall.batch import Batch, Ids
from holdall.kernels.path import HAS_TRITON
from holdall.models.dlrm import DLRMConfig
from holdall.models.model import Model
from holdall.placement.clock import Clock, fit
from holdall.placement.hardware import Captured, Cost
from holdall.schema import DenseColumn, Feature, Schema
from holdall.tiers.pipeline import Pipeline, rooms_for
from holdall.tiers.place import place
from holdall.training.captured_step import CapturedStep
from holdall.training.copy_ahead import copied_ahead
from holdall.training.optimizers import OptimizerConfig, Optimizers

FEATURES = 26
SAMPLES = 64
ROWS = 1000
HOT = 900
SHAPES = ((1 << 16, 1 << 14), (1 << 20, 1 << 18), (1 << 20, 1 << 14), (1 << 20, 0))
"""Lookups, and far ones among them, that are timed."""
DEPTH = 2
"""Steps ahead that rows are fetched."""
STEPS = (16, 48)
"""Steps of a run that do not count, and that do."""


def measure_captured(clock: Clock) -> Captured | None:
    """None where there is no GPU, or no kernels for it."""
    if clock.device.type != "cuda" or not HAS_TRITON:
        return None
    step = _launch_step(clock)
    return Captured(find=_find(clock), launch_far=max(0.0, _launch_far(clock)), launch_step=step)


def _find(clock: Clock) -> Cost:
    """`far_rows_triton.find`, by lookups and far ones."""
    from holdall.kernels import far_rows_triton

    seconds = []
    info = torch.tensor([[5, 0, 0]] * FEATURES, device=clock.device)
    for lookups, far in SHAPES:
        ids = _ids(lookups, far, clock.device)
        located = torch.empty(ids.shape[1], ids.shape[0], dtype=torch.int32, device=clock.device)
        rows = torch.empty(max(16, far), dtype=torch.int64, device=clock.device)

        def find(ids: Tensor = ids, located: Tensor = located, rows: Tensor = rows, far: int = far) -> Tensor:
            return far_rows_triton.find(ids, info, located, rows, far + far // 4 + 16, 0)

        seconds.append(clock.replayed(find))
    return fit(SHAPES, seconds)


def _ids(lookups: int, far: int, device: torch.device) -> Tensor:
    """Ids [F, B], of which so many are 5 or more."""
    generator = np.random.default_rng(4)
    hot = np.zeros(lookups // FEATURES * FEATURES - far, np.int32)
    ids = np.concatenate([hot, 5 + generator.integers(0, 1 << 22, far, dtype=np.int32)])
    return torch.from_numpy(generator.permutation(ids).reshape(FEATURES, -1)).to(device)


# --- the host --------------------------------------------------------------------------------------------------------


def _model(clock: Clock, dense_device: str | None = None) -> Model:
    """A small model: nothing that it computes takes long."""
    features = tuple(Feature(name=f"f{i}", num_rows=ROWS, unseen=ROWS - 1) for i in range(FEATURES))
    schema = Schema(label="y", dense=(DenseColumn(name="x"),), features=features, splits={})
    config = DLRMConfig(dim=16, bottom=(16,), top=(16,))
    return config.build(schema, device=clock.device, dense_device=dense_device)


def _batches(num: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(num):
        ids = torch.randint(ROWS, (FEATURES, SAMPLES), generator=generator, dtype=torch.int32)
        yield Batch(torch.rand(SAMPLES, 1), Ids(ids, None, FEATURES), torch.ones(SAMPLES))


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
    """What a pack with far rows adds to a step: finding, fetching, taking over, sending back; rows and their state."""
    model = _model(clock, dense_device="meta")
    hot = dict.fromkeys(model.bags.features.values(), HOT)
    tiers = place(model, hot, clock.device, num_rooms=rooms_for(DEPTH), fetch_by="kernel")
    Optimizers(model, OptimizerConfig())
    pipeline = Pipeline(tiers, DEPTH)

    def steps() -> Iterator[None]:
        for _ in pipeline.steps(_batches(sum(STEPS)), lambda batch: model.bags.check(batch.ids)):
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
