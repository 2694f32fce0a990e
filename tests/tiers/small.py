"""Small models and batches for tests of tiers, and the results of plain training on them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.data.batch import Batch, Ids
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.models.dlrm import DLRMConfig
from holdall.models.model import Model
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Frobenius

ROWS = {"a": 50, "b": 7, "c": 200}
HOT = {"a": 5, "b": 7, "c": 20}


def schema(kind: str = "categorical") -> Schema:
    features = tuple(
        Feature(name=name, num_rows=rows, unseen=rows - 1, kind=kind, max_length=None if kind == "categorical" else 4)  # type: ignore[arg-type]
        for name, rows in ROWS.items()
    )
    return Schema(label="y", dense=(DenseColumn(name="d"),), features=features)


def batches(num: int, size: int = 32, *, bags: bool = False, shift: float = 0.0) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)

    def draw(rows: int, count: int) -> Tensor:
        skewed = (torch.rand(count, generator=generator) ** 3 * rows + shift * rows).long() % rows
        return skewed.int()

    for _ in range(num):
        if bags:
            lengths = torch.randint(0, 4, (len(ROWS), size), generator=generator)
            values = torch.cat([draw(rows, int(n.sum())) for rows, n in zip(ROWS.values(), lengths, strict=True)])
            ids = Ids(values, F.pad(lengths.reshape(-1).cumsum(0), (1, 0)), len(ROWS))
        else:
            ids = Ids(torch.stack([draw(rows, size) for rows in ROWS.values()]), None, len(ROWS))
        label = (torch.rand(size, generator=generator) < 0.5).float()
        yield Batch(torch.randn(size, 1, generator=generator), ids, label)


def build(kind: str = "categorical", method: dict[str, Frobenius] | None = None) -> Model:
    torch.manual_seed(0)
    return DLRMConfig(dim=8, bottom=(16,), top=(16,)).build(schema(kind), method)


def step(model: Model, optimizers: Optimizers, batch: Batch) -> None:
    F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
    optimizers.step()


def state(model: Model, optimizers: Optimizers) -> dict[str, Tensor]:
    everything = {**model.state_dict(), **optimizers.tensors()}
    return {name: tensor.clone() for name, tensor in everything.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def plain(optimizer: str, num: int, **options: object) -> dict[str, Tensor]:
    model = build("bag" if options.get("bags") else "categorical")
    optimizers = Optimizers(model, OptimizerConfig(name=optimizer, lr=0.1))  # type: ignore[arg-type]
    for batch in batches(num, **options):  # type: ignore[arg-type]
        step(model, optimizers, batch)
    return state(model, optimizers)
