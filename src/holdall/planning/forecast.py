"""Forecast of a plan: bytes of every tier, to the byte, and seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdall.common.errors import ConfigError
from holdall.planning.hot_row_selector import choose_hot
from holdall.planning.memory_cost import memory_bytes, shares_memory, staging_rows, table_bytes
from holdall.planning.plan import Forecast, Plan, TableForecast, TablePlan
from holdall.planning.step_cost import Load, Problem, concentration_of, stage_seconds, step_seconds, table_load


def forecast(plan: Plan, problem: Problem, host_limit: int | None = None) -> Plan:
    """The plan with its forecast; `host_limit` bounds the page cache of tables on disk."""
    concentration, hot_share = _hot_batches(plan, problem)
    staging = staging_rows(problem, plan.tables, concentration) if plan.kind.has_hot_rows else {}
    used = memory_bytes(plan, problem, plan.tables, staging)
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
        before=sum(problem.tables.values()) * problem.stored_row_bytes,
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
    row = problem.stored_row_bytes
    free = host_limit - sum(used["host"].values())
    if shares_memory(plan):
        free -= sum(used["device"].values())
    hot = sum(table.hot_rows for table in on_disk)
    known = {table.name: problem.lookups[table.name] for table in on_disk}
    chosen = choose_hot(known, dict.fromkeys(known, 1.0), row, max(0, free) + hot * row, problem.batch_size)
    return {table.name: max(0, chosen[table.name] - table.hot_rows) for table in on_disk}


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
