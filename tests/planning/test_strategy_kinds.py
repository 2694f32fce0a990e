"""Capabilities of strategies: one record a name, and no capability that contradicts another."""

from __future__ import annotations

from typing import get_args

import pytest

from holdall.planning.plan import PlannedStrategy
from holdall.planning.strategy_kinds import STRATEGY_KINDS, StrategyKind, StrategyName, names_with


def test_every_name_has_one_record() -> None:
    assert tuple(STRATEGY_KINDS) == get_args(StrategyName)
    assert set(get_args(PlannedStrategy)) <= set(STRATEGY_KINDS)


@pytest.mark.parametrize("kind", STRATEGY_KINDS.values(), ids=list(STRATEGY_KINDS))
def test_capabilities_agree(kind: StrategyKind) -> None:
    assert STRATEGY_KINDS[kind.name] is kind
    assert kind.has_hot_rows == (kind.keeps_tail or kind.shards_rows)
    assert kind.has_hot_rows == (kind.max_prefetch != 0)  # rows that are not hot are fetched, so they can be ahead
    assert kind.has_hot_rows or not (kind.refreshes_hot or kind.packs_hot_batches)
    assert not (kind.refreshes_hot and kind.packs_hot_batches)  # batches are packed for hot rows that stay
    assert kind.runs_on_processes or not (kind.shards_rows or kind.shards_tables or kind.merges_tables)


def test_names_for_messages() -> None:
    assert names_with("has_hot_rows") == "split, hot-batches and two-fold"
    assert names_with("keeps_tail") == "split and hot-batches"
    assert names_with("merges_tables") == "local"
