"""A plan with what it will take: bytes of every tier, to the byte, and seconds of a step."""

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
"""Bytes a lookup that telling far rows from hot ones takes at most: row numbers, places and marks."""
NOTED_BYTES = 16
"""Bytes a place of a room that a GPU keeps of it: the row's number, and who holds it (`kernel_moves.Notes`)."""


def forecast(plan: Plan, problem: Problem, host_limit: int | None = None) -> Plan:
    """The same choices with their forecast; `host_limit` bounds what the host keeps in memory of tables on disk."""
    crowding, hot_share = _hot_batches(plan, problem)
    staging = staging_rows(problem, plan.tables, crowding) if plan.kind.has_hot_rows else {}
    used = memory(plan, problem, plan.tables, staging)
    cached = _cached_rows(plan, problem, used, host_limit)
    loads = {t.name: table_load(problem, t, cached.get(t.name, 0), crowding) for t in plan.tables}
    stages = stage_seconds(problem, plan.tables, plan.strategy, loads)
    if hot_share > 0:  # hot batches have nothing far, the others all of it
        plain = {name: Load(load.lookups, load.distinct) for name, load in loads.items()}
        hot_stages = stage_seconds(problem, plan.tables, plan.strategy, plain) | {"find": 0.0}  # nor to be found
        stages = {name: hot_share * hot_stages[name] + (1 - hot_share) * stages[name] for name in stages}
    copied = any(table.tail == "disk" for table in plan.tables) or problem.reached_as is None
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
    """How crowded far lookups are, and the share of hot batches."""
    if not plan.kind.packs_hot_batches:
        return 1.0, 0.0
    if problem.hot_inputs is None:
        raise ConfigError("hot batches need the data set, to see which of its inputs are hot")
    share = problem.hot_inputs({t.name: t.hot_rows if t.tiered else t.num_rows for t in plan.tables})
    return crowding_of(share), share


def _cached_rows(
    plan: Plan, problem: Problem, used: Mapping[str, Mapping[str, int]], host_limit: int | None
) -> dict[str, int]:
    """Rows of tables on disk, after their hot ones, that stay in what the host's memory has left: the popular ones."""
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
    """Whether host and device are one memory, and nobody said how much of it is the host's."""
    return plan.device == "cpu" and plan.caps.host is None


def crowding_of(hot_share: float) -> float:
    """How much closer far lookups come when this share of the samples, which have none, is in batches of its own."""
    return 1 / max(1 - hot_share, 1e-3)


def room_rows(staging: Mapping[str, int]) -> int:
    """Rows of a room of the `TieredPack` of every kind of tail, made ready for its far rows of a step (`staging`)."""
    return sum(with_spare(rows) for rows in staging.values())


def staging_bytes(problem: Problem, staging: Mapping[str, int], prefetch: int) -> int:
    """The rooms, and one more for evaluation."""
    return (buffers_for(prefetch) + 1) * room_rows(staging) * (problem.row_bytes + problem.state_bytes)


def find_bytes(problem: Problem, staging: Mapping[str, int], prefetch: int) -> int:
    """What telling far rows from hot ones takes on the device, in a step. A GPU keeps the batch of every room too, and
    where its lookups find their rows."""
    if not staging:
        return 0
    lookups = math.ceil(sum(problem.batch_lookups(name) for name in problem.tables))
    kept = 0
    if problem.hardware.device != "cpu":
        batch = lookups + problem.batch_size * (problem.num_dense + 1)
        kept = buffers_for(prefetch) * (4 * (batch + lookups) + NOTED_BYTES * room_rows(staging))
    return FIND_BYTES * lookups + kept


def staging_rows(problem: Problem, tables: Sequence[TablePlan], crowding: float = 1.0) -> dict[str, int]:
    """Room for the far rows of a step, by where they come from: six deviations above the mean, and no more than there
    are or are looked up."""
    size = round(problem.batch_size * crowding)
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
    """What a table takes in every tier, of one process.

    A table with far rows has a place for all of its rows where those live: checkpoints bring the hot ones there. The
    host keeps a byte a row that says whether it was ever touched.
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
    marks = table.num_rows if kind.keeps_tail else 0
    if table.tail == "host":
        return {**found, "host": rows(table.num_rows, marks)}
    return {**found, "host": Bytes(buffers=marks), "disk": rows(table.num_rows)}


@lru_cache(maxsize=4096)
def compressed_bytes(method: Method, num_rows: int, dim: int, optimizer: str) -> Bytes:
    """Parameters, buffers and optimizer state of a table, counted on one that has shapes and no memory."""
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
    """Bytes of every tier by what they are for."""
    found: dict[str, dict[str, int]] = {tier: {"tables": 0, "table_state": 0, "table_buffers": 0} for tier in TIERS}
    for table in tables:
        for tier, parts in table_bytes(problem, table, plan.strategy).items():
            found[tier]["tables"] += parts.parameters
            found[tier]["table_state"] += parts.state
            found[tier]["table_buffers"] += parts.buffers
    room = staging_bytes(problem, staging, plan.prefetch)
    step = problem.work.step_bytes(problem.batch_size) + find_bytes(problem, staging, plan.prefetch)
    found["device"] |= {
        "staging": room,
        "dense": problem.work.parameter_bytes,
        "dense_state": problem.work.state_bytes,
        "step": step,
    }
    found["host"]["staging"] = sum(staging.values()) * (problem.row_bytes + problem.state_bytes)
    return found


def _with_forecast(plan: Plan, problem: Problem, table: TablePlan, load: Load) -> TablePlan:
    far = load.far_lookups / load.lookups if load.lookups else 0.0
    if plan.kind.looks_up_on_host:
        lookups = {"host": 1.0}
    elif table.tail == "sharded":
        mine = 1 / problem.world_size
        lookups = {"device": 1 - far, "host": far * mine, "remote": far * (1 - mine)}
    elif table.tail == "disk":
        missed = far * (load.from_disk / load.far if load.far else 0.0)
        lookups = {"device": 1 - far, "host": far - missed, "disk": missed}
    elif table.tail == "host":
        lookups = {"device": 1 - far, "host": far}
    else:
        lookups = {"device": 1.0}
    made = TableForecast(
        bytes=table_bytes(problem, table, plan.strategy),
        lookups=lookups,
        per_sample=problem.lookups[table.name].per_sample,
        far_rows=load.far,
    )
    return replace(table, forecast=made)


def _binds(plan: Plan, stages: Mapping[str, float], seconds: float) -> str:
    """What keeps the step from being faster: its longest stage, and the memory that makes rows far."""
    longest = max(stages, key=lambda stage: stages[stage])
    told = f"{longest.replace('_', ' ')} takes {stages[longest] / max(seconds, 1e-12):.0%} of the step"
    moved = stages["find"] + stages["fetch"] + stages["write_back"]
    if any(table.tiered for table in plan.tables) and moved > 0:
        told += f"; device memory: far rows take {moved / max(seconds, 1e-12):.0%}"
    return told
