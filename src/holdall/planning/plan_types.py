"""Types of a plan: the place of one table, memory caps, and forecasts of bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from holdall.common.decode import Count, NonNegativeFloat, PositiveInt
from holdall.common.errors import ConfigError
from holdall.planning.strategy_kinds import TIERS as TIERS
from holdall.tables import Method

Tail = Literal["device", "host", "disk", "compressed", "sharded"]
PlannedStrategy = Literal["plain", "host", "split", "hot-batches", "two-fold"]
STAGES = ("read", "launch", "find", "fetch", "lookup", "dense", "update", "write_back", "communicate")
RENAMED_STAGES = {"send_back": "write_back"}
"""Stages of plans of 0.1.0, and their names now."""
"""Stages of a step: read the batch, launch kernels, find the host and disk rows it needs, fetch them, look up all rows,
compute the dense part forward and backward, update rows and dense parameters, write fetched rows back, communicate."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of a table in one tier."""

    parameters: Count = 0
    state: Count = 0
    """Optimizer state."""
    buffers: Count = 0
    """Index buffers of compressed tables."""

    @property
    def total(self) -> int:
        return self.parameters + self.state + self.buffers


@dataclass(frozen=True, kw_only=True)
class TableForecast:
    """Predicted bytes and lookups of one table, for one process."""

    bytes: dict[str, Bytes]
    """By tier."""
    lookups: dict[str, NonNegativeFloat]
    """Share of its lookups that each tier serves; `remote` is other processes."""
    per_sample: NonNegativeFloat
    """Lookups a sample."""
    far_rows: NonNegativeFloat
    """Distinct rows of a batch that are fetched, on average."""


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Choice for one table: method, number of hot rows, and place of the tail."""

    name: str
    num_rows: int
    method: Method
    hot_rows: int
    """Rows, from the most popular on, that are exact and on the device."""
    tail: Tail
    """Place of the other rows: `device`; `compressed` (by `method`, on the device); `host`; `disk`; `sharded` over the
    hosts of all processes."""
    forecast: TableForecast | None = None

    @property
    def tiered(self) -> bool:
        """Whether some of its rows have to be fetched to the device."""
        return self.tail in ("host", "disk", "sharded")


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Most bytes that one process may use in each tier; None for what is free."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted memory and step time of a plan, for one process."""

    memory: dict[str, dict[str, Count]]
    """Bytes by tier, then by purpose: tables, table_state, table_buffers, staging, dense, dense_state, step."""
    seconds: dict[str, NonNegativeFloat]
    """Seconds by stage of a step (`STAGES`), without overlap."""
    step_seconds: NonNegativeFloat
    """Seconds of a step, with overlap."""
    staging_rows: dict[str, Count]
    """Rows of the staging buffer for one step, by tail: six standard deviations above the mean of the fetched rows."""
    before: Count
    """Bytes of all tables and their optimizer state if all were dense in one place."""
    binds: str
    """Sentence on what limits the step time."""
    hardware: str
    """Identity of the machine whose rates were used (`Hardware.machine["id"]`)."""

    def total(self, tier: str) -> int:
        return sum(self.memory[tier].values())


# --- as plan.json has them ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """Entry of a table."""

    rows: PositiveInt
    method: dict[str, Any]
    hot_rows: Count
    tail: Tail


@dataclass(frozen=True, kw_only=True)
class StoredCaps:
    """Caps in bytes, or as texts such as 4GB."""

    device: int | str | None = None
    host: int | str | None = None
    disk: int | str | None = None


@dataclass(frozen=True, kw_only=True)
class StoredForecast(Forecast):
    """Forecast with those of the tables, and the hash of the choices that it was made for."""

    of: str
    tables: dict[str, TableForecast]

    def __post_init__(self) -> None:
        for stage in STAGES:
            if stage not in self.seconds:
                raise ConfigError(f"'seconds' has no '{stage}'")
        if not self.step_seconds:
            raise ConfigError("'step_seconds' is 0")
        for tier in TIERS:
            if missing := {"tables", "table_buffers", "table_state"} - set(self.memory.get(tier, ())):
                raise ConfigError(f"'memory.{tier}' has no '{min(missing)}'")
        if "step" not in self.memory["device"]:
            raise ConfigError("'memory.device' has no 'step'")
