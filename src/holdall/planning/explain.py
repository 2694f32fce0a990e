"""Explanation of a table's place: the value of its next hot row, and the cost of each alternative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from holdall.common.console import make_console, styled
from holdall.common.console import table as new_table
from holdall.common.errors import ConfigError
from holdall.common.sizes import readable_bytes
from holdall.data.schema import Schema
from holdall.planning.config import config_of
from holdall.planning.forecast import forecast
from holdall.planning.inputs import find_hardware, find_limits, find_lookups, make_problem
from holdall.planning.machine.hardware import Hardware
from holdall.planning.memory_check import shortages
from holdall.planning.plan import Plan, PlannedStrategy, TablePlan
from holdall.planning.step_cost import Problem
from holdall.popularity.profile import Profile
from holdall.tables import Dense
from holdall.tables.budget import auto_method

COMPRESSION = 20
"""The compressed alternative takes 1/20 of the table's bytes."""


@dataclass(frozen=True)
class Alternative:
    """Another place for one table, with the others unchanged."""

    what: str
    seconds: float
    """Seconds a step more than with the plan (less when negative)."""
    device_bytes: int
    """Device bytes more than with the plan."""
    too_large: str
    """Tiers where it does not fit, and by how much; empty when it fits."""


@dataclass(frozen=True)
class Explanation:
    """Values that decided the place of one table."""

    table: TablePlan
    next_row: float
    """Average seconds per step that one more hot row would save."""
    best_next: tuple[str, float] | None
    """The table whose next hot row saves the most, and its seconds: it would get the next byte of the device."""
    worst_last: tuple[str, float] | None
    """The table whose last hot row saves the least, and its seconds: it would give up a byte first."""
    alternatives: tuple[Alternative, ...]
    in_memory: tuple[tuple[str, float], ...] = ()
    """Where some tails are in memory and others on disk: this table, and the one with the least value in memory or the
    most on disk, each with the rows that a step fetches for a megabyte of the table."""


def explain(
    plan: Plan,
    table: str,
    data: str | Path,
    *,
    hardware: Hardware | str | Path | None = None,
    profile: Profile | str | Path | None = None,
) -> Explanation:
    """Explanation of the place of a table of a plan."""
    plan.table(table)  # refuses an unknown table before lookups are counted
    schema = Schema.load(Path(data))
    plan.check(schema)
    config = config_of(plan)
    rates = find_hardware(hardware)
    problem = make_problem(schema, find_lookups(schema, data, profile), config, rates, Path(data))
    return explain_table(plan, table, problem, find_limits(config, rates, Path(data)))


def explain_table(plan: Plan, name: str, problem: Problem, limits: Mapping[str, int]) -> Explanation:
    """`explain` for a problem that is already made."""
    entry = plan.table(name)
    plan = plan if plan.forecast is not None else forecast(plan, problem, limits["host"])
    following = {t.name: _row_worth(problem, t, t.hot_rows) for t in plan.tables if t.tiered}
    last = {t.name: _row_worth(problem, t, t.hot_rows - 1) for t in plan.tables if t.tiered and t.hot_rows}
    return Explanation(
        table=entry,
        next_row=following.get(name, 0.0),
        best_next=max(following.items(), key=lambda item: item[1]) if following else None,
        worst_last=min(last.items(), key=lambda item: item[1]) if last else None,
        alternatives=tuple(_alternatives(plan, entry, problem, limits)),
        in_memory=_worth_memory(plan, entry, problem),
    )


def _worth_memory(plan: Plan, entry: TablePlan, problem: Problem) -> tuple[tuple[str, float], ...]:
    """Values that decided between host memory and disk."""
    row = problem.stored_row_bytes
    worth = {
        t.name: problem.lookups[t.name].distinct(problem.batch_size, t.hot_rows) / (t.num_rows * row / 1e6)
        for t in plan.tables
        if t.tail in ("host", "disk")
    }
    other = {"host": "disk", "disk": "host"}.get(entry.tail)
    others = {t.name: worth[t.name] for t in plan.tables if t.tail == other}
    if not others:
        return ()
    name = max(others, key=lambda n: others[n]) if other == "disk" else min(others, key=lambda n: others[n])
    return (entry.name, worth[entry.name]), (name, others[name])


def _row_worth(problem: Problem, table: TablePlan, row: int) -> float:
    """Seconds a step that a row costs while it is not hot: its probability in a batch times its transfer."""
    tier = "disk" if table.tail == "disk" else "host"
    return problem.lookups[table.name].touched(problem.batch_size, row) * problem.row_seconds(tier)


def _alternatives(plan: Plan, entry: TablePlan, problem: Problem, limits: Mapping[str, int]) -> list[Alternative]:
    changed: dict[str, TablePlan] = {
        "all of it on the device": replace(entry, method=Dense(), hot_rows=entry.num_rows, tail="device"),
        "no hot rows, all of it on the host": replace(entry, method=Dense(), hot_rows=0, tail="host"),
        "no hot rows, all of it on disk": replace(entry, method=Dense(), hot_rows=0, tail="disk"),
    }
    if entry.tiered and entry.tail != "sharded":
        other = "disk" if entry.tail == "host" else "host"
        changed[f"the same hot rows, the rest on {other}"] = replace(entry, tail=other)  # type: ignore[arg-type]
    method = auto_method(entry.num_rows, problem.dim, 4 * entry.num_rows * problem.dim // COMPRESSION)
    if method is not None:
        smaller = replace(entry, method=method, hot_rows=0, tail="compressed")
        changed[f"compressed to 1/{COMPRESSION} as {method.name}, no longer exact"] = smaller
    return [
        _alternative(plan, what, table, problem, limits)
        for what, table in changed.items()
        if (table.method, table.hot_rows, table.tail) != (entry.method, entry.hot_rows, entry.tail)
    ]


def _alternative(plan: Plan, what: str, changed: TablePlan, problem: Problem, limits: Mapping[str, int]) -> Alternative:
    tables = tuple(changed if table.name == changed.name else table for table in plan.tables)
    strategy: PlannedStrategy = plan.strategy
    if not plan.kind.has_hot_rows and any(table.tiered for table in tables):
        strategy = "split"
    other = forecast(replace(plan, tables=tables, strategy=strategy, forecast=None), problem, limits["host"])
    assert other.forecast is not None
    assert plan.forecast is not None
    short = ", ".join(
        f"{readable_bytes(size)} too much on the {tier}" for tier, size in shortages(other, limits).items()
    )
    return Alternative(
        what=what,
        seconds=other.forecast.step_seconds - plan.forecast.step_seconds,
        device_bytes=other.forecast.total("device") - plan.forecast.total("device"),
        too_large=short,
    )


def show_explanation(found: Explanation, plan: Plan, console: Console | None = None) -> None:
    """Print an explanation."""
    console = console or make_console()
    entry = found.table
    if plan.forecast is None:
        raise ConfigError("the plan has no forecast to explain: make it with `holdall plan DIR --edited FILE`")
    place = {"device": "on the device", "compressed": "compressed, on the device"}.get(entry.tail, f"on {entry.tail}")
    kind = "hot" if entry.tiered else "exact"
    partly = entry.tiered or 0 < entry.hot_rows < entry.num_rows
    hot = f"{entry.hot_rows:,} of {entry.num_rows:,} rows {kind}, the rest {place}" if partly else place
    console.print(styled(f"{entry.name}:", "bold"), hot)
    if entry.tiered:
        console.print(f"its next hot row would save {found.next_row * 1e9:.3g} ns a step")
        if found.best_next is not None and found.best_next[0] != entry.name:
            console.print(
                f"that of '{found.best_next[0]}' would save {found.best_next[1] * 1e9:.3g} ns, so it comes first"
            )
        if found.worst_last is not None:
            name, seconds = found.worst_last
            console.print(f"the hot row that saves least is one of '{name}': it saves {seconds * 1e9:.3g} ns")
    if found.in_memory:
        (_, own), (other_name, others) = found.in_memory
        place = "in memory" if entry.tail == "disk" else "on disk"
        console.print(f"a step fetches {own:.3g} of its rows for each MB, and {others:.3g} of '{other_name}', {place}")
    lines = new_table("instead", "step", "device memory", "fits")
    for other in found.alternatives:
        sign = "-" if other.device_bytes < 0 else "+"
        more = f"{sign}{readable_bytes(abs(other.device_bytes))}"
        lines.add_row(other.what, f"{other.seconds * 1e3:+.3f} ms", more, other.too_large or "yes")
    console.print(lines)
