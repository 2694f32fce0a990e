"""Tiered packs: bit-equal to one storage for any hot rows, optimizer and exchange of hot rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from holdall.common.errors import CheckpointError, ConfigError
from holdall.embedding.lookup_plan import LookupPlan
from holdall.models.model import Model
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import NAMES
from holdall.optim.optimizers import Optimizers
from holdall.tables import Frobenius
from holdall.tiers.placement import Tiers, place
from tests.tiers.small import HOT, ROWS, batches, build, plain, same, state, step


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("hot", [HOT, dict.fromkeys(ROWS, 0), ROWS], ids=["some", "none", "all"])
@pytest.mark.parametrize("optimizer", NAMES)
def test_steps_equal_those_of_one_storage(optimizer: str, hot: dict[str, int], bags: bool) -> None:
    model = build("bag" if bags else "categorical")
    tiers = place(model, hot, "cpu")
    optimizers = Optimizers(model, OptimizerConfig(name=optimizer, lr=0.1))  # type: ignore[arg-type]
    for batch in batches(12, bags=bags):
        tiers.fetch(batch.ids)
        step(model, optimizers, batch)
        tiers.write_back()
    tiers.flush()
    assert same(state(model, optimizers), plain(optimizer, 12, bags=bags))


def test_a_skipped_batch_leaves_no_gradients_and_rows_by_table_are_refused() -> None:
    """`zero_grad` of the model drops what was collected; one table alone has no rows of its own on the device."""
    model = build()
    tiers = place(model, HOT, "cpu")
    optimizers = Optimizers(model, OptimizerConfig(name="adagrad", lr=0.1))
    for batch in batches(6):
        tiers.fetch(batch.ids)
        (model(batch).sum() * torch.nan).backward()
        model.zero_grad()
        step(model, optimizers, batch)
        tiers.write_back()
    tiers.flush()
    assert same(state(model, optimizers), plain("adagrad", 6))
    (batch,) = batches(1)
    tiers.fetch(batch.ids)
    model(batch).sum().backward()
    with pytest.raises(ConfigError, match=r"rows are in several places .*: use the clip and zero_grad of Optimizers"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert float(optimizers.clip(1.0)) > 0
    model.bags.table(next(iter(ROWS))).zero_grad()
    with pytest.raises(ConfigError, match="one table at a time"):
        optimizers.step()


def test_only_rows_that_are_not_hot_move() -> None:
    model = build()
    tiers = place(model, HOT, "cpu")
    optimizers = Optimizers(model, OptimizerConfig(name="rowwise_adagrad"))
    before = tiers.traffic.flushed
    rows = lookups = hot = 0
    for batch in batches(5):
        for (name, count), values in zip(HOT.items(), batch.ids.values, strict=True):
            rows += int((torch.unique(values) >= count).sum())
            hot += int((values < count).sum())
            lookups += values.numel()
            assert name in ROWS
        tiers.fetch(batch.ids)
        step(model, optimizers, batch)
        tiers.write_back()
    traffic = tiers.traffic
    assert traffic.fetched_rows == rows
    assert traffic.fetched == traffic.written_back == rows * (8 * 4 + 4)  # the row and its accumulator
    assert (traffic.lookups, traffic.hot_lookups) == (lookups, hot)
    assert traffic.flushed == before


def test_a_model_can_be_called_without_fetching() -> None:
    model = build()
    (batch,) = batches(1)
    with torch.no_grad():
        expected = model(batch)
        place(model, HOT, "cpu")
        assert torch.equal(model(batch), expected)


def test_kernels_read_the_storage_that_holds_the_fetched_rows() -> None:
    """Rows of a lookup without a working set may need larger staging buffers, and with them another storage."""
    model = build()
    expected = {name: model.bags.table(name).materialize() for name in ROWS}
    (pack,) = place(model, dict.fromkeys(ROWS, 0), "cpu").packs
    tables = {name: model.bags.table(name) for name in ROWS}
    plan = LookupPlan(list(ROWS), tables, [pack], fused=True)
    old = pack.storage
    batch = next(batches(1, size=256))
    with torch.no_grad():
        found = plan.packed_rows(batch.ids)
    assert found is not None
    storage, rows = found
    assert storage.shape[0] > old.shape[0]
    for column, (name, weight) in enumerate(expected.items()):
        assert torch.equal(storage[rows[:, column]], weight[batch.ids.values[column].long()]), name


def test_compressed_tables_stay_whole() -> None:
    method = {"c": Frobenius(rank=4)}
    model, other = build(method=method), build(method=method)
    tiers = place(model, {"a": 5, "b": 0}, "cpu")
    ours, theirs = (Optimizers(m, OptimizerConfig(name="adagrad", lr=0.1)) for m in (model, other))
    for batch in batches(6):
        tiers.fetch(batch.ids)
        step(model, ours, batch)
        tiers.write_back()
        step(other, theirs, batch)
    tiers.flush()
    assert same(state(model, ours), state(other, theirs))


def drifting(tiers: Tiers, model: Model, optimizers: Optimizers, num: int, every: int) -> None:
    for number, batch in enumerate(batches(num, shift=0.4), start=1):
        tiers.fetch(batch.ids)
        step(model, optimizers, batch)
        tiers.write_back()
        if number % every == 0:
            tiers.refresh()


@pytest.mark.parametrize("optimizer", NAMES)
def test_rows_are_exchanged_with_their_state(optimizer: str) -> None:
    model = build()
    tiers = place(model, HOT, "cpu", refreshes=True)
    optimizers = Optimizers(model, OptimizerConfig(name=optimizer, lr=0.1))  # type: ignore[arg-type]
    drifting(tiers, model, optimizers, 12, every=3)
    renumbering = tiers.packs[0].renumbering
    assert renumbering is not None
    assert int((renumbering.place != torch.arange(sum(ROWS.values()))).sum()) > 10  # some rows were exchanged
    tiers.flush()
    with tiers.in_order_of_ids():
        assert same(state(model, optimizers), plain(optimizer, 12, shift=0.4))
    tiers.flush()  # rows are in their exchanged places again
    with tiers.in_order_of_ids():
        assert same(state(model, optimizers), plain(optimizer, 12, shift=0.4))


def test_refreshing_finds_what_is_hot_now() -> None:
    """The popular ids are at 40% of each table: without refreshing few lookups are hot, with it most are."""
    shares = []
    for every in (1000, 5):
        model = build()
        tiers = place(model, HOT, "cpu", refreshes=True)
        optimizers = Optimizers(model, OptimizerConfig(name="sgd"))
        drifting(tiers, model, optimizers, 40, every)
        shares.append(tiers.traffic.hot_lookups / tiers.traffic.lookups)
    assert shares[0] < 0.45
    assert shares[1] > 0.55


def test_counts_decay() -> None:
    model = build()
    tiers = place(model, HOT, "cpu", refreshes=True)
    (pack,) = tiers.packs
    assert pack.renumbering is not None
    start = pack.starts["c"]
    counts = pack.renumbering.counts
    pack.renumbering.count(torch.tensor([150] * 8) + start)
    tiers.refresh()
    tiers.refresh()
    pack.renumbering.count(torch.tensor([160] * 3) + start)
    assert counts[start + 160] > counts[start + 150]  # 3 now are more than 8 two refreshes ago at a decay of 1/2


def test_a_map_that_is_no_bijection_is_refused() -> None:
    model = build()
    tiers = place(model, HOT, "cpu", refreshes=True)
    renumbering = tiers.packs[0].renumbering
    assert renumbering is not None
    renumbering.place[60] = renumbering.place[61]
    with pytest.raises(CheckpointError, match="table 'c' is not a bijection"):
        tiers.after_loading()


@pytest.mark.parametrize(
    ("hot", "message"),
    [({"a": 51, "b": 0, "c": 0}, "table 'a' cannot have 51 hot rows"), ({"a": 1}, "hot rows are given for tables")],
)
def test_hot_rows_that_do_not_fit_the_tables(hot: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(build(), hot, "cpu")


def test_a_model_with_an_optimizer_is_not_placed() -> None:
    model = build()
    Optimizers(model, OptimizerConfig())
    with pytest.raises(ConfigError, match="place the model first"):
        place(model, HOT, "cpu")


def test_growing_the_staging_buffers_frees_the_old_tensors() -> None:
    """The device's memory may not suffice for the hot rows twice."""
    model = build()
    (pack,) = place(model, HOT, "cpu").packs
    Optimizers(model, OptimizerConfig(name="adam"))
    old = [weakref.ref(tensor) for tensor in pack.device_tensors()]
    hot = pack.storage[: pack.staging.num_hot].clone()
    pack.reserve(10)
    assert [ref() for ref in old] == [None] * 3
    assert torch.equal(pack.storage[: pack.staging.num_hot], hot)
