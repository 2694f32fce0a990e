"""Worker functions of the tests of strategies."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.data.batch import Batch, Ids
from holdall.distributed.collectives import Collectives
from holdall.distributed.gradient_buckets import GradientBuckets
from holdall.distributed.processes import process_group
from holdall.distributed.row_gradient_exchange import exchange_row_gradients
from holdall.models.model import Model
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import NAMES
from holdall.optim.optimizers import Optimizers
from holdall.tables import Frobenius, Hashed, Method, TensorTrain
from tests.tiers import small

CPU = torch.device("cpu")
METHODS: dict[str, dict[str, Method] | None] = {
    "dense": None,
    "compressed": {"a": Frobenius(), "b": Hashed(buckets=3), "c": TensorTrain(rank=2)},
}
SIZES = (32, 32, 7, 1)
"""Samples of the global batches: even and uneven shares, and fewer samples than processes."""


def global_batches(bags: bool) -> list[Batch]:
    return [_double(next(small.batches(1, size, bags=bags, shift=0.1 * n))) for n, size in enumerate(SIZES)]


def _double(batch: Batch) -> Batch:
    return Batch(batch.dense.double(), batch.ids, batch.label.double())


def part_of(batch: Batch, start: int, stop: int) -> Batch:
    """Samples start..stop."""
    ids = batch.ids
    if ids.offsets is None:
        return Batch(batch.dense[start:stop], replace(ids, values=ids.values[:, start:stop]), batch.label[start:stop])
    bags = [
        ids.values[ids.offsets[f * len(batch) + b] : ids.offsets[f * len(batch) + b + 1]]
        for f in range(ids.num_features)
        for b in range(start, stop)
    ]
    lengths = torch.tensor([bag.numel() for bag in bags], dtype=torch.int64)
    values = torch.cat([*bags, ids.values[:0]])
    return Batch(
        batch.dense[start:stop],
        Ids(values, F.pad(lengths.cumsum(0), (1, 0)), ids.num_features),
        batch.label[start:stop],
    )


def cases() -> list[tuple[str, bool, str]]:
    """(optimizer, bags, how tables are stored)."""
    return [(name, bags, "dense") for name in NAMES for bags in (False, True)] + [
        ("adagrad", False, "compressed"),
        ("adam", True, "compressed"),
    ]


def build(optimizer: str, bags: bool, stored: str) -> tuple[Model, Optimizers]:
    model = small.build("bag" if bags else "categorical", METHODS[stored]).double()  # type: ignore[arg-type]
    return model, Optimizers(model, OptimizerConfig(name=optimizer, lr=0.1))  # type: ignore[arg-type]


def alone(optimizer: str, bags: bool, stored: str, clip: float | None = None) -> dict[str, Tensor]:
    """The state after steps on the whole batches, in one process."""
    model, optimizers = build(optimizer, bags, stored)
    for batch in global_batches(bags):
        F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
        if clip is not None:
            optimizers.clip(clip)
        optimizers.step()
    return small.state(model, optimizers)


def together(
    rows: Collectives, dense: Collectives, optimizer: str, bags: bool, stored: str, clip: float | None = None
) -> dict[str, Tensor]:
    """The same, each rank on its share."""
    model, optimizers = build(optimizer, bags, stored)
    processes = rows.processes
    buckets = GradientBuckets(optimizers.dense_parameters.values(), dense, num_signals=1, bucket_bytes=600)
    assert buckets.num_buckets > 1
    for batch in global_batches(bags):
        size, rank, num = len(batch), processes.rank, processes.world_size
        share = part_of(batch, size * rank // num, size * (rank + 1) // num)
        buckets.begin(torch.tensor([float(len(share))]))
        if len(share):
            loss = F.binary_cross_entropy_with_logits(model(share), share.label)
            (loss * (len(share) / size)).backward()
        buckets.flush()
        exchange_row_gradients(optimizers.row_groups, rows)
        assert buckets.finish().tolist() == [size]
        if clip is not None:
            optimizers.clip(clip)
        optimizers.step()
    return small.state(model, optimizers)


def all_cases() -> dict[str, dict[str, Tensor]]:
    with process_group(CPU, timeout=20) as processes:
        rows, dense = Collectives(processes), Collectives(processes, own_group=True)
        return {"/".join(map(str, case)): together(rows, dense, *case) for case in cases()}


def clipped() -> dict[str, Tensor]:
    with process_group(CPU, timeout=20) as processes:
        rows, dense = Collectives(processes), Collectives(processes, own_group=True)
        return together(rows, dense, "adagrad", True, "dense", 0.05)
