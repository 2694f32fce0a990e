"""Small data sets for the tests of models: schemas, batches, and a few steps of training on them."""

from __future__ import annotations

import torch

from holdall.data.batch import Batch, Ids
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.models import Model, ModelConfig
from holdall.models.loss import logloss
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Frobenius, Hashed, HotCold, Method, Quantized, TensorTrain

METHODS: dict[str, Method | dict[str, Method] | None] = {
    "dense": None,
    "hashed": Hashed(buckets=5),
    "tensor train": TensorTrain(rank=2),
    "frobenius": Frobenius(),
    "hot rows and tensor train": HotCold(hot_rows=3, cold=TensorTrain(rank=2)),
    "codes that train": Quantized(rounding="stochastic", trainable=True),
    "one table hashed": {"item": Hashed(buckets=5)},
}


HISTORY_FAMILIES = ("tbsm", "din")
"""Families of models that read histories."""


def columns(*names: str) -> tuple[DenseColumn, ...]:
    return tuple(DenseColumn(name=name) for name in names)


def clicks(num_dense: int, **rows: int) -> Schema:
    """A data set of one-hot features of so many rows."""
    return Schema(
        label="click",
        dense=columns(*(f"I{i}" for i in range(num_dense))),
        features=tuple(Feature(name=name, num_rows=n, unseen=n - 1) for name, n in rows.items()),
    )


def click_batch(schema: Schema, size: int = 6, seed: int = 0) -> Batch:
    """Random samples of a data set of one-hot features."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.stack([torch.randint(f.num_rows, (size,), generator=generator) for f in schema.features])
    return Batch(
        dense=torch.rand(size, schema.num_dense, generator=generator),
        ids=Ids(values, None, len(schema.features)),
        label=torch.randint(2, (size,), generator=generator).float(),
    )


def histories(num_dense: int = 1, max_length: int | None = None) -> Schema:
    """A user, an item and its category, and the items and categories of the user's last events."""
    options = {"kind": "sequence", "max_length": max_length}
    return Schema(
        label="click",
        dense=columns(*(f"I{i}" for i in range(num_dense))),
        features=(
            Feature(name="past_items", num_rows=20, unseen=19, table="item", **options),
            Feature(name="user", num_rows=9, unseen=8),
            Feature(name="item", num_rows=20, unseen=19),
            Feature(name="past_categories", num_rows=6, unseen=5, table="category", **options),
            Feature(name="category", num_rows=6, unseen=5),
        ),
    )


def history_batch(schema: Schema, lengths: list[int], seed: int = 0) -> Batch:
    """Random samples of `histories`, with so many events each."""
    generator = torch.Generator().manual_seed(seed)
    size = len(lengths)
    of_feature = [lengths if f.kind == "sequence" else [1] * size for f in schema.features]
    values = [
        torch.randint(f.num_rows, (sum(each),), generator=generator)
        for f, each in zip(schema.features, of_feature, strict=True)
    ]
    offsets = torch.tensor([length for each in of_feature for length in each]).cumsum(0)
    return Batch(
        dense=torch.rand(size, schema.num_dense, generator=generator),
        ids=Ids(torch.cat(values), torch.nn.functional.pad(offsets, (1, 0)), len(schema.features)),
        label=torch.randint(2, (size,), generator=generator).float(),
    )


def trained(
    config: ModelConfig,
    schema: Schema,
    batches: list[Batch],
    method: Method | dict[str, Method] | None = None,
    *,
    optimizer: str = "adagrad",
    fused: bool = True,
    lr: float = 0.1,
) -> Model:
    """A model in float64 after one step on each batch."""
    model = config.build(schema, method, fused=fused, generator=torch.Generator().manual_seed(0)).double()
    optimizers = Optimizers(model, OptimizerConfig(name=optimizer, lr=lr))
    for batch in batches:
        dense = batch.dense.double()
        logits = model.score(dense, model.lookup(batch))
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label.double()).backward()
        optimizers.step()
    return model


def same_parameters(found: Model, expected: Model) -> None:
    for (name, ours), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def learns(
    config: ModelConfig,
    schema: Schema,
    batch: Batch,
    method: Method | dict[str, Method] | None = None,
    *,
    table_lr: float = 0.5,
) -> None:
    """A few steps on one batch lower its loss, and change every table that the batch looks up."""
    torch.manual_seed(0)
    model = config.build(schema, method, generator=torch.Generator().manual_seed(0))
    before = {name: model.bags.table(name).materialize() for name in set(model.bags.features.values())}
    settings = OptimizerConfig(name="adagrad", lr=0.05, table_lr=table_lr)
    if isinstance(method, Quantized):  # codes round their own steps of SGD
        settings = OptimizerConfig(name="sgd", lr=0.2, table_lr=100 * table_lr)
    optimizers = Optimizers(model, settings)
    losses = []
    for _ in range(12):
        loss = logloss(model(batch), batch.label)
        loss.backward()
        optimizers.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.02, losses
    for name, rows in before.items():
        assert not torch.equal(model.bags.table(name).materialize(), rows), f"table '{name}' did not move"


def num_dense_parameters(model: Model) -> int:
    """Parameters that are not in tables."""
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("bags"))
