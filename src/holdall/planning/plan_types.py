"""The parts of a plan: where one table lives, what may be used, and what both are expected to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdall.tables import Method

Tail = Literal["device", "host", "disk", "compressed", "sharded"]
PlannedStrategy = Literal["plain", "host", "split", "hot-batches", "two-fold"]
TIERS = ("device", "host", "disk")
STAGES = ("read", "launch", "find", "fetch", "lookup", "dense", "update", "write_back", "communicate")
"""Parts of a step: batch in, distinct far rows found, brought, looked up; the dense part forward and backward; rows and
dense parameters updated; far rows sent back; what processes say to each other."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """What a table takes in one tier."""

    parameters: int = 0
    state: int = 0
    """Optimizer state."""
    buffers: int = 0
    """Index buffers of compressed tables."""

    @property
    def total(self) -> int:
        return self.parameters + self.state + self.buffers


@dataclass(frozen=True, kw_only=True)
class TableForecast:
    """What a table will take and serve, a process."""

    bytes: dict[str, Bytes]
    """By tier."""
    lookups: dict[str, float]
    """Share of its lookups that each tier serves; `remote` is other processes."""
    per_sample: float
    """Its lookups a sample."""
    far_rows: float
    """Distinct rows of a batch that are fetched, on average."""


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Where the rows of one table live."""

    name: str
    num_rows: int
    method: Method
    hot_rows: int
    """Rows, from the most popular on, that are exact and on the device."""
    tail: Tail
    """Where the rest lives: `device` and `compressed` (by `method`) on the device as well; `host`; `disk`; `sharded`
    over the processes' hosts."""
    forecast: TableForecast | None = None

    @property
    def tiered(self) -> bool:
        """Whether rows of it have to be fetched."""
        return self.tail in ("host", "disk", "sharded")


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Bytes that a plan may use in each tier, a process; None where nothing was said."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a plan is expected to take, a process."""

    memory: dict[str, dict[str, int]]
    """Bytes by tier, then by what for: tables, table_state, table_buffers, staging, dense, dense_state, step."""
    seconds: dict[str, float]
    """Of a step, by stage (`STAGES`), each on its own."""
    step_seconds: float
    """Of a step, with what overlaps."""
    staging_rows: dict[str, int]
    """Room on the device for the far rows of one step, by where they live: six deviations above their mean."""
    before: int
    """Bytes of all tables and their optimizer state, dense, in one place."""
    binds: str
    """What keeps the step from being faster."""
    hardware: str
    """Identity of the machine whose rates were used (`Hardware.machine["id"]`)."""

    def total(self, tier: str) -> int:
        return sum(self.memory[tier].values())
