"""Predicted bytes against those of real models, tables, optimizers and tiers: to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdall.data.schema import Feature
from holdall.models import DCNConfig, DeepFMConfig, DLRMConfig, NCFConfig, TwoTowerConfig
from holdall.models.model import Model, ModelConfig
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from holdall.optim.optimizers import Optimizers
from holdall.planning.config import PlanConfig
from holdall.planning.dense_work import LiveBytes, _batch, _step, trace_dense_work
from holdall.planning.memory_cost import compressed_bytes
from holdall.planning.plan import Plan
from holdall.planning.planner import make_problem, plan_tables, predict_problem
from holdall.tables import Dense
from holdall.tiers.host_rows import DiskRows, LazyRows
from holdall.tiers.placement import place
from holdall.tiers.staging import buffers_for
from holdall.tiers.tiered_pack import TieredPack
from tests.planning.made_up_hardware import hardware, lookups, schema_of
from tests.tables.cases import CASES

ROWS = {"users": 3000, "items": 500, "hours": 24}
SMALL = PlanConfig.of(dim=8, bottom=(16,), top=(16,), batch_size=64)


def state_bytes(optimizers: Optimizers) -> int:
    return sum(tensor.nbytes for tensor in optimizers.tensors().values())


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
@pytest.mark.parametrize("case", [name for name, method in CASES.items() if not isinstance(method, Dense)])
def test_compressed_tables(case: str, optimizer: str) -> None:
    table = CASES[case].build(777, 8)
    found = compressed_bytes(CASES[case], 777, 8, optimizer)
    assert found.parameters == sum(parameter.nbytes for parameter in table.parameters())
    assert found.buffers == sum(buffer.nbytes for buffer in table.buffers())
    made = Optimizers(table, OptimizerConfig.of_record(optimizer))
    assert found.state == state_bytes(made)


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
@pytest.mark.parametrize(
    "config",
    [DLRMConfig(dim=8, bottom=(16,), top=(32, 8)), DCNConfig(dim=8, top=(16,)), DeepFMConfig(dim=8, top=(16,))],
)
def test_a_step_allocates_what_the_rehearsal_says(config: ModelConfig, optimizer: str) -> None:
    """The rehearsal has seen batches of 16 and 32; this is one of 500."""
    schema = schema_of(dict.fromkeys(ROWS, 500))
    lengths = dict.fromkeys(ROWS, 1.0)
    work = trace_dense_work(config, schema, optimizer, lengths)
    model = config.build(schema)
    optimizers = Optimizers(model, OptimizerConfig.of_record(optimizer))
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
    work = trace_dense_work(
        DLRMConfig(dim=8, bottom=(16,), top=(32,)), schema_of(ROWS), "sgd", dict.fromkeys(ROWS, 1.0)
    )
    assert [(layer.inputs, layer.outputs, layer.per_sample) for layer in work.layers][:2] == [(2, 16, 1), (16, 8, 1)]
    assert work.interaction == (4, 8, 1.0)
    schema = schema_of({"user": 30, "item": 50}, num_dense=0)
    pairs = trace_dense_work(NCFConfig(factors=8), schema, "adam", {"user": 1.0, "item": 1.0})
    assert pairs.interaction is None
    assert pairs.layers[-1].outputs == 1


def test_bags_are_traced_too() -> None:
    schema = schema_of({"a": 40, "b": 40})
    bag = Feature(name="b", num_rows=40, unseen=39, kind="bag", max_length=5)
    schema = replace(schema, features=(schema.features[0], bag))
    short = trace_dense_work(DLRMConfig(dim=4, bottom=(8,), top=(8,)), schema, "sgd", {"a": 1.0, "b": 1.0})
    long = trace_dense_work(DLRMConfig(dim=4, bottom=(8,), top=(8,)), schema, "sgd", {"a": 1.0, "b": 4.0})
    assert long.step_bytes(100) > short.step_bytes(100)


def placed(made: Plan, folder: Path) -> Model:
    """A model placed by the plan, as training does it, with staging buffers for the rows that the plan expects."""
    assert made.forecast is not None
    model = DLRMConfig(dim=8, bottom=(16,), top=(16,)).build(schema_of(ROWS), made.methods(), dense_device="meta")
    num_buffers = buffers_for(made.prefetch)
    tiers = place(model, made.hot_rows(), "cpu", num_buffers=num_buffers, tails=made.tails(), folder=folder)
    for pack in tiers.packs:
        pack.reserve(made.forecast.staging_rows[made.table(next(iter(pack.tables))).tail])
    Optimizers(model, OptimizerConfig.of_record(made.optimizer))
    return model


def bare(config: PlanConfig) -> int:
    """Bytes of the device that a plan takes without any table there."""
    made = plan_tables(schema_of(ROWS), lookups(ROWS), replace(config, preset="dlrm"), hardware()).forecast
    assert made is not None
    return made.total("device")


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("where", ["el-rec", "mixed"])
def test_a_placed_model_takes_what_the_plan_says(optimizer: str, prefetch: int, where: str, tmp_path: Path) -> None:
    """Compressed tables beside tails in memory; and tails in memory beside others on disk."""
    chosen = OptimizerConfig.of_record(optimizer)
    config = replace(SMALL, optimizer=chosen.name, momentum=chosen.momentum, prefetch=prefetch)
    extra = 30_000 + 35_000 * sum(not slot.per_row for slot in OPTIMIZER_KINDS[optimizer].row_slots)
    extra += 5_000 * (optimizer == "rowwise_adagrad")
    config = replace(config, device_memory=str(bare(config) + extra * (1 + prefetch)), host_memory="1GB")
    made = plan_tables(schema_of(ROWS), lookups(ROWS), replace(config, preset="el-rec"), hardware())
    if where == "mixed":
        tails = {"users": "disk", "items": "host", "hours": "device"}
        tables = tuple(
            replace(t, method=Dense(), hot_rows=24 if t.name == "hours" else 200, tail=tails[t.name])  # type: ignore[arg-type]
            for t in made.tables
        )
        limits = dict.fromkeys(("device", "host", "disk"), 1 << 40)
        problem = make_problem(schema_of(ROWS), lookups(ROWS), config, hardware())
        made = predict_problem(replace(made, tables=tables, forecast=None), problem, limits)
        assert made.forecast is not None
        assert set(made.forecast.staging_rows) == {"host", "disk"}
    assert made.forecast is not None
    memory = made.forecast.memory
    model = placed(made, tmp_path)
    packs = [pack for pack in model.bags.packs if isinstance(pack, TieredPack)]
    assert len(packs) == len(made.forecast.staging_rows)
    on_device = sum(tensor.nbytes for pack in model.bags.packs for tensor in (pack.storage, *pack.slots.values()))
    compressed = [t for t in made.tables if t.tail == "compressed"]
    on_device += sum(t.forecast.bytes["device"].total for t in compressed if t.forecast is not None)
    assert on_device == sum(memory["device"][what] for what in ("tables", "table_state", "table_buffers", "staging"))
    fetched: dict[str, list[int]] = {"host": [0, 0], "disk": [0, 0]}
    marks = on_disk = 0
    for pack in packs:
        weights, *state = pack.host_tensors()
        assert isinstance(weights, LazyRows)
        tier = "disk" if isinstance(weights.store, DiskRows) else "host"
        fetched[tier][0] += weights.tensor.nbytes
        fetched[tier][1] += sum(rows.tensor.nbytes for rows in state)
        marks += weights.touched.nbytes
        on_disk += sum(rows.file.num_bytes for rows in (weights.store, *state) if isinstance(rows, DiskRows))
    for tier, (rows, state_of_rows) in fetched.items():
        assert (memory[tier]["tables"], memory[tier]["table_state"]) == (rows, state_of_rows)
    assert memory["host"]["table_buffers"] == marks
    assert on_disk == memory["disk"]["tables"] + memory["disk"]["table_state"]


def test_a_loss_of_all_pairs_is_counted() -> None:
    """The rehearsal has the towers alone; the pairs of a batch grow with its square."""
    config = TwoTowerConfig(dim=8, tower=(16, 4), user=("users", "hours"), item=("items",))
    schema, lengths = schema_of(dict.fromkeys(ROWS, 500)), dict.fromkeys(ROWS, 1.0)
    work = trace_dense_work(config, schema, "adagrad", lengths)
    model = config.build(schema)
    model.log_frequency = torch.zeros(500)
    optimizers = Optimizers(model, OptimizerConfig(name="adagrad"))
    batch = _batch(schema, 500, lengths)

    def step() -> None:
        model.training_loss(model.training_outputs(batch.dense, model.lookup(batch)), batch).backward()
        optimizers.step()

    step()
    with LiveBytes() as live:
        step()
    assert 0.7 * work.step_bytes(500) < max(live.history) <= work.step_bytes(500)
