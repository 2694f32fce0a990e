"""Lookup plan: features that can share a call do, and a plan follows its tables when they change."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.embedding.lookup_plan import LookupPlan
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Frobenius, Hashed, Method, TensorTrain

ROWS = {"a": 50, "b": 700, "c": 7, "d": 90, "e": 30, "f": 70}
METHODS: dict[str, Method] = {
    "b": Frobenius(rank=4, terms=2),
    "d": Frobenius(rank=4, terms=2),
    "e": Hashed(buckets=9),
    "f": Frobenius(rank=3, terms=1),
}
IDS = Ids(torch.arange(6 * 5).reshape(6, 5) % 7, None, 6)


def build(methods: dict[str, Method] | None = None, **options: bool) -> EmbeddingBags:
    return EmbeddingBags.build(ROWS, 8, methods, generator=torch.Generator().manual_seed(0), **options)


def plan_of(bags: EmbeddingBags) -> LookupPlan:
    tables = {name: bags.table(name) for name in ROWS}
    return LookupPlan(list(ROWS), tables, bags.packs, fused=bags.fused)


def test_features_that_share_a_call() -> None:
    with torch.no_grad():
        route = plan_of(build(METHODS)).route(IDS)
    assert [group.positions for group in route.packs] == [(0, 2)]
    assert [group.positions for group in route.table_groups] == [(1, 3)]
    assert [position for position, _ in route.ungrouped] == [4, 5]
    assert [position for position, _ in route.unpacked] == [1, 3, 4, 5]
    assert route.only_pack is None
    assert route.pooled_tables is None


def test_one_pack_has_all_features() -> None:
    plan = plan_of(build())
    with torch.no_grad():
        assert plan.route(IDS).only_pack is not None
        assert plan.route(IDS, [3, 1]).only_pack.positions == (3, 1)
    assert plan.route(IDS).only_pack is None, "without an optimizer gradients go to the tables themselves"
    plan.packs[0].collects = True
    assert plan.route(IDS).only_pack is not None


def test_bags_of_one_kernel_group_are_pooled_in_one_call() -> None:
    same = dict.fromkeys(ROWS, TensorTrain(2))
    route = plan_of(build(same)).route(IDS)
    assert route.pooled_tables == [table for _, table in route.unpacked]
    assert plan_of(build({**same, "a": TensorTrain(1)})).route(IDS).pooled_tables is None
    assert plan_of(build(same)).route(IDS, range(6)).pooled_tables is None, "some of the features only"
    assert plan_of(build(same, fused=False)).route(IDS).pooled_tables is None


@pytest.mark.parametrize("change", ["cast", "cast of tables", "replaced", "optimizer"])
def test_a_plan_follows_its_tables(change: str) -> None:
    """A first lookup fixes a plan; after the change, results are those of tables that are called one by one."""
    bags, plain = build(METHODS), build(METHODS, fused=False)
    plain.load_state_dict(bags.state_dict())
    bags(IDS)
    for changed in (bags, plain):
        if change == "cast":
            changed.double()
        elif change == "cast of tables":
            changed.tables.double()
            changed.plan_lookups()
        elif change == "replaced":
            generator = torch.Generator().manual_seed(1)
            changed.replace_tables({"d": Frobenius(rank=2, terms=2).build(90, 8, generator=generator)})
        else:
            Optimizers(changed, OptimizerConfig(name="sgd", lr=0.1))
    expected = plain(IDS)
    torch.testing.assert_close(bags(IDS), expected)
    with torch.no_grad():
        torch.testing.assert_close(bags(IDS), expected)


def test_a_plan_keeps_no_tables_alive() -> None:
    """Tables are freed with their bags at once, and not when the garbage collector runs."""
    bags = build(METHODS)
    with torch.no_grad():
        bags(IDS)
    storage = weakref.ref(bags.packs[0].storage)
    gc.disable()
    try:
        del bags
        assert storage() is None
    finally:
        gc.enable()
