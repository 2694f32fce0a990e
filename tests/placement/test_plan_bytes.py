"""Predicted bytes against those of real models, tables, optimizers and tiers: to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdall.models import DCNConfig, DLRMConfig, NCFConfig
from holdall.models.model import Model, ModelConfig
from holdall.placement.forecast import compressed_bytes
from holdall.placement.plan import Plan
from holdall.placement.planner import PlanConfig, plan_tables
from holdall.placement.work import LiveBytes, _batch, _step, rehearse
from holdall.schema import Feature
from holdall.tables import (
    Clustered,
    Frobenius,
    Hashed,
    HotCold,
    MemCom,
    Method,
    MixedDimension,
    Quantized,
    QuotientRemainder,
    Robe,
    Sketch,
    TensorRing,
    TensorTrain,
)
from holdall.tiers.pipeline import rooms_for
from holdall.tiers.place import place
from holdall.training.optimizers import NAMES, OptimizerConfig, Optimizers
from tests.placement.made_up_hardware import hardware, lookups, schema_of

ROWS = {"users": 3000, "items": 500, "hours": 24}
SMALL = PlanConfig(dim=8, bottom=(16,), top=(16,), batch_size=64)


def state_bytes(optimizers: Optimizers) -> int:
    return sum(tensor.nbytes for tensor in optimizers.tensors().values())


METHODS: list[tuple[Method, str]] = [
    (TensorTrain(rank=4), "adam"),
    (TensorRing(rank=3), "adagrad"),
    (Frobenius(rank=4, terms=2), "rowwise_adagrad"),
    (Hashed(buckets=50), "rowwise_adagrad"),
    (Hashed(buckets=50), "adam"),
    (QuotientRemainder(buckets=20), "adagrad"),
    (MemCom(buckets=20), "rowwise_adagrad"),
    (Robe(size=256), "adagrad"),
    (Sketch(dim=4), "rowwise_adagrad"),
    (MixedDimension(dim=2), "rowwise_adagrad"),
    (Quantized(bits=8), "sgd"),
    (Clustered(clusters=10), "adagrad"),
    (HotCold(hot_rows=30, cold=Frobenius(rank=4, terms=2)), "rowwise_adagrad"),
]


@pytest.mark.parametrize(("method", "optimizer"), METHODS, ids=lambda value: str(value)[:24])
def test_compressed_tables(method: Method, optimizer: str) -> None:
    table = method.build(777, 8)
    found = compressed_bytes(method, 777, 8, optimizer)
    assert found.parameters == sum(parameter.nbytes for parameter in table.parameters())
    assert found.buffers == sum(buffer.nbytes for buffer in table.buffers())
    made = Optimizers(table, OptimizerConfig(name=optimizer))  # type: ignore[arg-type]
    assert found.state == state_bytes(made)


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize("config", [DLRMConfig(dim=8, bottom=(16,), top=(32, 8)), DCNConfig(dim=8, top=(16,))])
def test_a_step_allocates_what_the_rehearsal_says(config: ModelConfig, optimizer: str) -> None:
    """The rehearsal has seen batches of 16 and 32; this is one of 500."""
    schema = schema_of(dict.fromkeys(ROWS, 500))
    lengths = dict.fromkeys(ROWS, 1.0)
    work = rehearse(config, schema, optimizer, lengths)
    model = config.build(schema)
    optimizers = Optimizers(model, OptimizerConfig(name=optimizer))  # type: ignore[arg-type]
    batch = _batch(schema, 500, lengths)
    _step(model, optimizers, batch)
    with LiveBytes() as live:
        _step(model, optimizers, batch)
    assert max(live.history) == pytest.approx(work.step_bytes(500), rel=1e-3)
    dense = [p for name, p in model.named_parameters() if not name.startswith("bags.")]
    assert work.parameter_bytes == sum(p.nbytes for p in dense)
    names = [name for name in optimizers.tensors() if name.startswith("dense.")]
    assert work.state_bytes == sum(optimizers.tensors()[name].nbytes for name in names)


def test_layers_are_counted_as_often_as_a_sample_passes() -> None:
    work = rehearse(DLRMConfig(dim=8, bottom=(16,), top=(32,)), schema_of(ROWS), "sgd", dict.fromkeys(ROWS, 1.0))
    assert [(layer.inputs, layer.outputs, layer.per_sample) for layer in work.layers][:2] == [(2, 16, 1), (16, 8, 1)]
    assert work.interaction == (4, 8, 1.0)
    schema = schema_of({"user": 30, "item": 50}, num_dense=0)
    pairs = rehearse(NCFConfig(factors=8), schema, "adam", {"user": 1.0, "item": 1.0})
    assert pairs.interaction is None
    assert pairs.layers[-1].outputs == 1


def test_bags_are_rehearsed_too() -> None:
    schema = schema_of({"a": 40, "b": 40})
    bag = Feature(name="b", num_rows=40, unseen=39, kind="bag", max_length=5)
    schema = replace(schema, features=(schema.features[0], bag))
    short = rehearse(DLRMConfig(dim=4, bottom=(8,), top=(8,)), schema, "sgd", {"a": 1.0, "b": 1.0})
    long = rehearse(DLRMConfig(dim=4, bottom=(8,), top=(8,)), schema, "sgd", {"a": 1.0, "b": 4.0})
    assert long.step_bytes(100) > short.step_bytes(100)


def placed(made: Plan) -> tuple[Model, Optimizers]:
    """A model put where the plan says, made ready for the far rows that it expects."""
    assert made.forecast is not None
    model = DLRMConfig(dim=8, bottom=(16,), top=(16,)).build(schema_of(ROWS), made.methods())
    for pack in place(model, made.hot_rows(), "cpu", num_rooms=rooms_for(made.prefetch)).packs:
        pack.make_room(made.forecast.staging_rows)
    return model, Optimizers(model, OptimizerConfig(name=made.optimizer))  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_placed_model_takes_what_the_plan_says(optimizer: str, prefetch: int) -> None:
    config = replace(SMALL, optimizer=optimizer, prefetch=prefetch)  # type: ignore[arg-type]
    bare = plan_tables(schema_of(ROWS), lookups(ROWS), replace(config, preset="dlrm"), hardware()).forecast
    assert bare is not None
    extra = {"sgd": 30_000, "rowwise_adagrad": 35_000, "adagrad": 70_000, "adam": 100_000}[optimizer]
    room = bare.total("device") + extra * (1 + prefetch)
    config = replace(config, device_memory=str(room), host_memory="1GB", preset="el-rec")
    made = plan_tables(schema_of(ROWS), lookups(ROWS), config, hardware())
    assert made.strategy == "split"
    assert made.forecast is not None
    assert made.forecast.total("device") <= room
    model, optimizers = placed(made)
    memory = made.forecast.memory
    (pack,) = model.bags.packs
    near = [pack.storage, *pack.slots.values()]
    compressed = [t for t in made.tables if t.tail == "compressed"]
    elsewhere = sum(t.forecast.bytes["device"].total for t in compressed if t.forecast is not None)
    tables = sum(memory["device"][what] for what in ("tables", "table_state", "table_buffers", "staging"))
    assert sum(tensor.nbytes for tensor in near) == tables - elsewhere
    weights = sum(table.weight.nbytes for table in pack.tables.values())
    assert weights == memory["host"]["tables"]
    state = [value for name, value in optimizers.tensors().items() if name.startswith("rows.")]
    assert sum(value.nbytes for value in state) == memory["host"]["table_state"]
