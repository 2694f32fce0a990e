"""Capabilities of the training strategies, by name.

A strategy decides where tables are stored and how the rows of a step reach the device. Settings, plans and the resume
of a run read its capabilities here; `training/strategies/` has the code, one file a strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["plain", "host", "split", "hot-batches", "data-parallel", "two-fold", "table-wise", "local"]
TIERS = ("device", "host", "disk")
"""Memories that rows are stored in."""


@dataclass(frozen=True, kw_only=True)
class StrategyKind:
    """Name and capabilities of a strategy."""

    name: str
    has_hot_rows: bool = False
    """The most popular rows of dense tables are on the device, the other rows are fetched for each step."""
    keeps_tail: bool = False
    """Rows that are not hot are on the host or the disk of this process: `--hot-bytes` has to bound the others."""
    shards_rows: bool = False
    """Rows that are not hot are sharded over the hosts of all processes; link rates may choose the hot ones."""
    shards_tables: bool = False
    """Each table is on one process as a whole."""
    max_prefetch: int | None = 0
    """Most steps ahead at which rows can be fetched; None: any number."""
    refreshes_hot: bool = False
    """The set of hot rows can change while training."""
    packs_hot_batches: bool = False
    """Samples that look up hot rows only are in batches of their own, so samples come in another order."""
    looks_up_on_host: bool = False
    """Tables are looked up and updated by the host: the device gets pooled vectors."""
    merges_tables: bool = False
    """Each process learns tables of its own, which are merged; none knows the gradients of all."""
    runs_on_processes: bool = False
    """Several processes can follow it."""


STRATEGY_KINDS: dict[str, StrategyKind] = {
    kind.name: kind
    for kind in (
        StrategyKind(name="plain"),
        StrategyKind(name="host", looks_up_on_host=True),
        StrategyKind(name="split", has_hot_rows=True, keeps_tail=True, max_prefetch=None, refreshes_hot=True),
        StrategyKind(
            name="hot-batches",
            has_hot_rows=True,
            keeps_tail=True,
            max_prefetch=None,
            packs_hot_batches=True,
            runs_on_processes=True,
        ),
        StrategyKind(name="data-parallel", runs_on_processes=True),
        StrategyKind(name="two-fold", has_hot_rows=True, shards_rows=True, max_prefetch=1, runs_on_processes=True),
        StrategyKind(name="table-wise", shards_tables=True, runs_on_processes=True),
        StrategyKind(name="local", merges_tables=True, runs_on_processes=True),
    )
}


def names_with(capability: str) -> str:
    """The strategies that have a capability, for messages: `split, hot-batches and two-fold`."""
    *others, last = [name for name, kind in STRATEGY_KINDS.items() if getattr(kind, capability)]
    return f"{', '.join(others)} and {last}" if others else last
