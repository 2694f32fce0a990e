"""Memory model of a plan: bytes of every tier, to the byte, for tables, staging buffers, the dense part and a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from holdall.optim.table_bytes import state_bytes
from holdall.planning.plan import TIERS, Bytes, Plan, TablePlan
from holdall.planning.step_cost import Problem
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.tables import Dense, Method
from holdall.tiers.staging import buffers_for, with_spare

FIND_BYTES = 34
"""Most bytes per lookup that finding the rows to fetch allocates: row numbers, positions and flags."""
STAGED_ROW_BYTES = 16
"""Bytes that a GPU records for each row of a staging buffer: its row number, and the buffer and slot that own it."""


def shares_memory(plan: Plan) -> bool:
    """Whether host and device share one memory, of which no cap gives the host a part."""
    return plan.device == "cpu" and plan.caps.host is None


def buffer_rows(staging: Mapping[str, int]) -> int:
    """Rows of one staging buffer of each `TieredPack`, given the fetched rows of a step by tail (`staging`)."""
    return sum(with_spare(rows) for rows in staging.values())


def staging_bytes(problem: Problem, staging: Mapping[str, int], prefetch: int) -> int:
    """Bytes of the staging buffers, and of one more for evaluation."""
    return (buffers_for(prefetch) + 1) * buffer_rows(staging) * problem.stored_row_bytes


def find_bytes(problem: Problem, staging: Mapping[str, int], prefetch: int) -> int:
    """Device bytes to find the rows that a step fetches. A GPU also keeps the batch of every staging buffer, and the
    location of the row of each lookup."""
    if not staging:
        return 0
    lookups = math.ceil(sum(problem.batch_lookups(name) for name in problem.tables))
    kept = 0
    if problem.hardware.device != "cpu":
        batch = lookups + problem.batch_size * (problem.num_dense + 1)
        kept = buffers_for(prefetch) * (4 * (batch + lookups) + STAGED_ROW_BYTES * buffer_rows(staging))
    return FIND_BYTES * lookups + kept


def staging_rows(problem: Problem, tables: Sequence[TablePlan], concentration: float = 1.0) -> dict[str, int]:
    """Rows of the staging buffer for the fetched rows of a step, by tail: six standard deviations above the mean, at
    most the rows of the tail and the lookups of a batch."""
    size = round(problem.batch_size * concentration)
    sums: dict[str, list[float]] = {}
    for table in tables:
        if table.tiered:
            known = problem.lookups[table.name]
            parts = sums.setdefault(table.tail, [0.0, 0.0, 0.0])
            parts[0] += known.distinct(size, table.hot_rows)
            parts[1] += known.variance(size, table.hot_rows)
            parts[2] += min(table.num_rows - table.hot_rows, math.ceil(problem.batch_lookups(table.name)))
    return {
        tail: max(1, min(math.ceil(mean + 6 * math.sqrt(variance)), round(most)))
        for tail, (mean, variance, most) in sums.items()
    }


def table_bytes(problem: Problem, table: TablePlan, strategy: str) -> dict[str, Bytes]:
    """Bytes of a table in every tier, of one process.

    A table with a tail on the host or on disk has space for all its rows there: checkpoints write the hot rows to it.
    The host keeps a flag of one byte a row for whether the row was ever touched.
    """

    def rows(count: int, buffers: int = 0) -> Bytes:
        stored = table.method.num_bytes(count, problem.dim) if count else 0
        return Bytes(parameters=stored, state=count * problem.state_bytes, buffers=buffers)

    kind = STRATEGY_KINDS[strategy]
    if not isinstance(table.method, Dense):
        taken = compressed_bytes(table.method, table.num_rows, problem.dim, problem.optimizer)
        return {"host" if kind.looks_up_on_host else "device": taken}
    if table.tail == "device":
        return {"device": rows(table.num_rows)}
    found = {"device": rows(table.hot_rows)} if table.hot_rows else {}
    if table.tail == "sharded":
        return {**found, "host": rows(-(-(table.num_rows - table.hot_rows) // problem.world_size))}
    flags = table.num_rows if kind.keeps_tail else 0
    if table.tail == "host":
        return {**found, "host": rows(table.num_rows, flags)}
    return {**found, "host": Bytes(buffers=flags), "disk": rows(table.num_rows)}


@lru_cache(maxsize=4096)
def compressed_bytes(method: Method, num_rows: int, dim: int, optimizer: str) -> Bytes:
    """Bytes of parameters, buffers and optimizer state of a table, counted on a table of meta tensors."""
    table = method.build(num_rows, dim, device="meta")
    state = state_bytes(table, OPTIMIZER_KINDS[optimizer])
    parameters = sum(parameter.nbytes for parameter in table.parameters())
    return Bytes(parameters=parameters, state=state, buffers=sum(buffer.nbytes for buffer in table.buffers()))


def memory_bytes(
    plan: Plan, problem: Problem, tables: Sequence[TablePlan], staging: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Bytes of every tier by purpose."""
    found: dict[str, dict[str, int]] = {tier: {"tables": 0, "table_state": 0, "table_buffers": 0} for tier in TIERS}
    for table in tables:
        for tier, parts in table_bytes(problem, table, plan.strategy).items():
            found[tier]["tables"] += parts.parameters
            found[tier]["table_state"] += parts.state
            found[tier]["table_buffers"] += parts.buffers
    buffers = staging_bytes(problem, staging, plan.prefetch)
    step = problem.work.step_bytes(problem.batch_size) + find_bytes(problem, staging, plan.prefetch)
    found["device"] |= {
        "staging": buffers,
        "dense": problem.work.parameter_bytes,
        "dense_state": problem.work.state_bytes,
        "step": step,
    }
    found["host"]["staging"] = sum(staging.values()) * problem.stored_row_bytes
    return found
