"""Forecast of a plan: bytes of every tier, to the byte, and seconds of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from holdall.common.errors import ConfigError
from holdall.optim.records import RECORDS
from holdall.planning.lookup_counts import choose_hot
from holdall.planning.plan import TIERS, Bytes, Forecast, Plan, TableForecast, TablePlan
from holdall.planning.step_cost import Load, Problem, stage_seconds, step_seconds, table_load
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.tables import Dense, Method
from holdall.tiers.staging import buffers_for, with_spare

FIND_BYTES = 34
"""Most bytes a lookup that finding the rows to fetch allocates: row numbers, places and flags."""
STAGED_ROW_BYTES = 16
"""Bytes that a GPU records for each row of a staging buffer: its row number, and which buffer owns it."""


def forecast(plan: Plan, problem: Problem, host_limit: int | None = None) -> Plan:
    """The plan with its forecast; `host_limit` bounds the page cache of tables on disk."""
    concentration, hot_share = _hot_batches(plan, problem)
    staging = staging_rows(problem, plan.tables, concentration) if plan.kind.has_hot_rows else {}
    used = memory(plan, problem, plan.tables, staging)
    cached = _cached_rows(plan, problem, used, host_limit)
    loads = {t.name: table_load(problem, t, cached.get(t.name, 0), concentration) for t in plan.tables}
    stages = stage_seconds(problem, plan.tables, plan.strategy, loads)
    if hot_share > 0:  # hot batches fetch nothing, the others all of it
        plain = {name: Load(load.lookups, load.distinct) for name, load in loads.items()}
        hot_stages = stage_seconds(problem, plan.tables, plan.strategy, plain) | {"find": 0.0}  # and find nothing
        stages = {name: hot_share * hot_stages[name] + (1 - hot_share) * stages[name] for name in stages}
    copied = any(table.tail == "disk" for table in plan.tables) or problem.kernel_tier is None
    seconds = step_seconds(problem, stages, plan.strategy, copied=copied)
    made = Forecast(
        memory=used,
        seconds=stages,
        step_seconds=seconds,
        staging_rows=staging,
        before=sum(problem.tables.values()) * (problem.row_bytes + problem.state_bytes),
        binds=_binds(plan, stages, seconds),
        hardware=str(problem.hardware.machine.get("id")),
    )
    tables = tuple(_with_forecast(plan, problem, table, loads[table.name]) for table in plan.tables)
    return replace(plan, tables=tables, forecast=made)


def _hot_batches(plan: Plan, problem: Problem) -> tuple[float, float]:
    """Concentration of the lookups of fetched rows, and share of hot batches."""
    if not plan.kind.packs_hot_batches:
        return 1.0, 0.0
    if problem.hot_inputs is None:
        raise ConfigError("hot batches need the data set, to see which of its inputs are hot")
    share = problem.hot_inputs({t.name: t.hot_rows if t.tiered else t.num_rows for t in plan.tables})
    return concentration_of(share), share


def _cached_rows(
    plan: Plan, problem: Problem, used: Mapping[str, Mapping[str, int]], host_limit: int | None
) -> dict[str, int]:
    """Rows of tables on disk, after their hot rows, that the page cache keeps in the free host memory: popular ones."""
    on_disk = [table for table in plan.tables if table.tail == "disk"]
    if not on_disk or host_limit is None:
        return {}
    row = problem.row_bytes + problem.state_bytes
    free = host_limit - sum(used["host"].values())
    if shares_memory(plan):
        free -= sum(used["device"].values())
    hot = sum(table.hot_rows for table in on_disk)
    known = {table.name: problem.lookups[table.name] for table in on_disk}
    chosen = choose_hot(known, dict.fromkeys(known, 1.0), row, max(0, free) + hot * row, problem.batch_size)
    return {table.name: max(0, chosen[table.name] - table.hot_rows) for table in on_disk}


def shares_memory(plan: Plan) -> bool:
    """Whether host and device share one memory, of which no cap gives the host a part."""
    return plan.device == "cpu" and plan.caps.host is None


def concentration_of(hot_share: float) -> float:
    """Factor of the lookups of fetched rows in other batches when this share of the samples is in hot batches."""
    return 1 / max(1 - hot_share, 1e-3)


def buffer_rows(staging: Mapping[str, int]) -> int:
    """Rows of one staging buffer of each `TieredPack`, given the fetched rows of a step by tail (`staging`)."""
    return sum(with_spare(rows) for rows in staging.values())


def staging_bytes(problem: Problem, staging: Mapping[str, int], prefetch: int) -> int:
    """Bytes of the staging buffers, and of one more for evaluation."""
    return (buffers_for(prefetch) + 1) * buffer_rows(staging) * (problem.row_bytes + problem.state_bytes)


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
    by_row = {id(parameter) for parameter in table.row_parameters().values()}
    state = 0
    record = RECORDS[optimizer]
    for parameter in table.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in by_row:
            state += sum(slot.nbytes for slot in record.row_state(parameter).values())
        else:
            state += record.dense_state_bytes(parameter)
    parameters = sum(parameter.nbytes for parameter in table.parameters())
    return Bytes(parameters=parameters, state=state, buffers=sum(buffer.nbytes for buffer in table.buffers()))


def memory(
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
    found["host"]["staging"] = sum(staging.values()) * (problem.row_bytes + problem.state_bytes)
    return found


def _with_forecast(plan: Plan, problem: Problem, table: TablePlan, load: Load) -> TablePlan:
    """The table with its bytes, and the share of its lookups that each tier serves."""
    fetched = load.fetched_lookups / load.lookups if load.lookups else 0.0
    if plan.kind.looks_up_on_host:
        lookups = {"host": 1.0}
    elif table.tail == "sharded":
        own = 1 / problem.world_size
        lookups = {"device": 1 - fetched, "host": fetched * own, "remote": fetched * (1 - own)}
    elif table.tail == "disk":
        missed = fetched * (load.from_disk / load.fetched if load.fetched else 0.0)
        lookups = {"device": 1 - fetched, "host": fetched - missed, "disk": missed}
    elif table.tail == "host":
        lookups = {"device": 1 - fetched, "host": fetched}
    else:
        lookups = {"device": 1.0}
    made = TableForecast(
        bytes=table_bytes(problem, table, plan.strategy),
        lookups=lookups,
        per_sample=problem.lookups[table.name].per_sample,
        far_rows=load.fetched,
    )
    return replace(table, forecast=made)


def _binds(plan: Plan, stages: Mapping[str, float], seconds: float) -> str:
    """Sentence on what limits the step: its longest stage, and the device memory that makes rows be fetched."""
    longest = max(stages, key=lambda stage: stages[stage])
    text = f"{longest.replace('_', ' ')} takes {stages[longest] / max(seconds, 1e-12):.0%} of the step"
    moved = stages["find"] + stages["fetch"] + stages["write_back"]
    if any(table.tiered for table in plan.tables) and moved > 0:
        text += f"; device memory: fetched rows take {moved / max(seconds, 1e-12):.0%}"
    return text
