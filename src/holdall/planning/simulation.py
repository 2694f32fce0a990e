"""Simulation of a plan's step at any number of processes: step time, bytes sent and memory of a process.

    for row in simulate_steps(plan, problem, parse_world_sizes("8..4096"), "two-fold", schema):
        row.step_seconds, row.seconds["communicate"], row.sent["cold_rows"], row.memory["device"]["tables"]

Everything comes from the planner's cost model (`planning.step_cost`), the expected messages of a strategy
(`planning.messages`) and the measured links (`planning.collective_cost`). By default each process keeps the samples it
has in the plan, so more processes train on more samples per step (weak scaling). With `batch_size` the samples of all
processes stay the same (strong scaling).

Work and storage of one process, with W processes of b samples:

| strategy | looked up | updated | stored |
| --- | --- | --- | --- |
| two-fold | b samples; cold rows are fetched from their owners' hosts | hot rows that any process touched, and 1/W of the cold ones | hot rows, and 1/W of the others |
| row-wise | the same, without hot rows | | 1/W of the rows |
| table-wise | all W b samples, for its tables | its tables | its tables; numbers are those of the process with most |
| data-parallel | b samples | rows that any process touched | everything |

All processes are assumed to compute at the speed that `holdall hardware` measured, each on cores of its own. No part of
the exchange overlaps with computing.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from holdall.common.errors import ConfigError
from holdall.data.schema import Schema
from holdall.distributed.table_wise import assign_tables
from holdall.planning.collective_cost import Links, Message
from holdall.planning.inputs import features_per_table
from holdall.planning.memory_cost import memory_bytes, staging_rows
from holdall.planning.messages import (
    data_parallel_messages,
    dense_message,
    sent_by_kind,
    table_wise_messages,
    two_fold_messages,
)
from holdall.planning.plan import Plan, TablePlan
from holdall.planning.step_cost import Load, Problem, dense_bytes, stage_seconds, step_seconds, table_load
from holdall.planning.strategy_kinds import STRATEGY_KINDS, StrategyKind
from holdall.tables import Dense

SimulatedStrategy = Literal["two-fold", "row-wise", "table-wise", "data-parallel"]

SIMULATED_KINDS: dict[SimulatedStrategy, StrategyKind] = {
    "two-fold": STRATEGY_KINDS["two-fold"],
    "row-wise": replace(STRATEGY_KINDS["two-fold"], name="row-wise", has_hot_rows=False),
    "table-wise": STRATEGY_KINDS["table-wise"],
    "data-parallel": STRATEGY_KINDS["data-parallel"],
}

MOST_PROCESSES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """Predicted step of one process, at one number of processes."""

    world_size: int
    batch_size: int
    """Samples of a process in a step."""
    seconds: dict[str, float]
    """Of a step by stage (`plan.STAGES`)."""
    exchange: dict[str, float]
    """Of the stage `communicate`, by kind of message."""
    messages: tuple[Message, ...]
    step_seconds: float
    memory: dict[str, dict[str, int]]
    """Bytes by tier, then by purpose (`Forecast.memory`)."""

    @property
    def samples_per_second(self) -> float:
        return self.world_size * self.batch_size / self.step_seconds

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a process sends in a step by kind of message, on average."""
        return sent_by_kind(self.messages)

    def total_bytes(self, tier: str) -> int:
        return sum(self.memory[tier].values())

    def to_json(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "batch_size": self.batch_size,
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "seconds": self.seconds,
            "exchange_seconds": self.exchange,
            "sent_bytes": self.sent,
            "messages": [asdict(message) for message in self.messages],
            "memory": self.memory,
        }


def parse_world_sizes(text: str) -> list[int]:
    """Numbers of processes: `8`, `1,2,4`, or the powers of two of a range such as `8..4096`."""
    if ".." in text:
        low, _, high = text.partition("..")
        first, last = _processes(low, text), _processes(high, text)
        if first > last:
            raise ConfigError(f"--world-size {text} is not ascending: write {last}..{first}")
        found = [1 << power for power in range(MOST_PROCESSES.bit_length()) if first <= 1 << power <= last]
        if not found:
            raise ConfigError(
                f"--world-size {text} has no power of two in it: name the numbers, such as {first},{last}"
            )
        return found
    return sorted({_processes(part, text) for part in text.split(",")})


def _processes(text: str, whole: str) -> int:
    if not text.strip().isdecimal() or not text.strip().isascii():
        raise ConfigError(f"--world-size {whole!r} is not a number of processes: write 8, 1,2,4 or 8..4096")
    count = int(text)
    if not 1 <= count <= MOST_PROCESSES:
        raise ConfigError(f"--world-size {whole}: {count} processes are not possible; write 1 to {MOST_PROCESSES}")
    return count


def simulate_steps(
    plan: Plan,
    problem: Problem,
    world_sizes: Sequence[int],
    strategy: SimulatedStrategy,
    schema: Schema,
    *,
    batch_size: int | None = None,
) -> list[SimulatedStep]:
    """A predicted step for each number of processes; `problem` is that of the plan (`inputs.make_problem`).

    `batch_size` is that of all processes; each process keeps its share of the plan's when None.
    """
    if plan.world_size < 2:
        raise ConfigError(
            "the plan is for one process, so it shards no rows: plan with --world-size 2 or more, then simulate"
        )
    if problem.hardware.collectives is None:
        raise ConfigError(
            "the hardware file has no rates of collectives: measure them with "
            "`torchrun --nproc-per-node 2 -m holdall hardware`, or between machines with --nnodes"
        )
    links = Links(problem.hardware.collectives)
    found = []
    for world_size in world_sizes:
        share = problem.batch_size if batch_size is None else _share(batch_size, world_size)
        one = replace(problem, world_size=world_size, batch_size=share)
        found.append(_simulate_one(plan, one, strategy, schema, links))
    return found


def _share(batch_size: int, world_size: int) -> int:
    if batch_size < world_size or batch_size % world_size:
        raise ConfigError(
            f"--batch-size {batch_size} does not divide among {world_size} processes: make it a multiple of the most "
            f"processes, or leave it out to keep the samples of each"
        )
    return batch_size // world_size


def _simulate_one(
    plan: Plan, problem: Problem, strategy: SimulatedStrategy, schema: Schema, links: Links
) -> SimulatedStep:
    tables, kind = place_tables(plan, strategy), SIMULATED_KINDS[strategy]
    owners = _owners(problem, tables) if kind.shards_tables else {}
    messages = _messages(problem, tables, kind, schema, owners)
    exchange = links.by_kind(messages, problem.world_size)
    stages = _stages(problem, tables, kind, owners)
    stages["communicate"] = sum(exchange.values())
    step = step_seconds(problem, stages, _planned_strategy(kind))
    return SimulatedStep(
        world_size=problem.world_size,
        batch_size=problem.batch_size,
        seconds=stages,
        exchange=exchange,
        messages=tuple(messages),
        step_seconds=step,
        memory=_memory(plan, problem, tables, kind, owners),
    )


def place_tables(plan: Plan, strategy: SimulatedStrategy) -> tuple[TablePlan, ...]:
    """The plan's tables as a strategy places them; compressed ones do not change."""
    found, kind = [], SIMULATED_KINDS[strategy]
    for table in plan.tables:
        if isinstance(table.method, Dense):
            hot = table.num_rows
            if kind.shards_rows and not kind.has_hot_rows:
                hot = 0
            elif kind.shards_rows and table.tail != "device":
                hot = table.hot_rows
            table = replace(table, hot_rows=hot, tail="device" if hot == table.num_rows else "sharded", forecast=None)
        found.append(table)
    return tuple(found)


def _planned_strategy(kind: StrategyKind) -> Literal["two-fold", "plain"]:
    """The strategy of a plan whose local work (all but the exchange) is that of a simulated one."""
    return "two-fold" if kind.shards_rows else "plain"


# --- exchange --------------------------------------------------------------------------------------------------------


def _owners(problem: Problem, tables: Sequence[TablePlan]) -> dict[str, int]:
    """Rank that owns each table, balanced by bytes and lookups as table-wise training does."""
    row = problem.stored_row_bytes
    sizes = {
        t.name: t.num_rows * row if isinstance(t.method, Dense) else t.method.num_bytes(t.num_rows, problem.dim)
        for t in tables
    }
    loads = {table.name: problem.lookups[table.name].per_sample for table in tables}
    return assign_tables(sizes, loads, problem.world_size)


def _messages(
    problem: Problem,
    tables: Sequence[TablePlan],
    kind: StrategyKind,
    schema: Schema,
    owners: Mapping[str, int],
) -> list[Message]:
    dense = {table.name: table for table in tables if isinstance(table.method, Dense)}
    common: dict[str, int] = {
        "row_bytes": problem.row_bytes,
        "batch_size": problem.batch_size,
        "world_size": problem.world_size,
    }
    if kind.shards_tables:
        known = {table.name: problem.lookups[table.name] for table in tables}
        found = table_wise_messages(known, owners, features_per_table(schema), bagged=not schema.one_hot, **common)
        return [*found, dense_message(problem.work.parameter_bytes, problem.world_size)]
    found = []
    if dense:
        known = {name: problem.lookups[name] for name in dense}
        if kind.shards_rows:
            found = two_fold_messages(known, {name: table.hot_rows for name, table in dense.items()}, **common)
        else:
            found = data_parallel_messages(known, **common)
    return [*found, dense_message(dense_bytes(problem, tables), problem.world_size)]


# --- local work of a process -----------------------------------------------------------------------------------------


def _stages(
    problem: Problem, tables: Sequence[TablePlan], kind: StrategyKind, owners: Mapping[str, int]
) -> dict[str, float]:
    """Seconds by stage without the exchange; of table-wise, those of the process whose tables take longest."""
    local = replace(problem, world_size=1)
    global_batch = problem.batch_size * problem.world_size
    loads = {table.name: table_load(problem, table) for table in tables}
    found = stage_seconds(local, tables, _planned_strategy(kind), loads)
    if kind.shards_tables:
        owner = replace(local, batch_size=global_batch)
        each = [
            stage_seconds(owner, owned, "plain", {table.name: table_load(owner, table) for table in owned})
            for owned in _by_owner(tables, owners)
        ]
        busiest = max(each, key=lambda stages: stages["lookup"] + stages["update"])
        return {**found, "lookup": busiest["lookup"], "update": busiest["update"]}
    updated = {}
    for table in tables:
        known = problem.lookups[table.name]
        rows = known.distinct(global_batch, 0, table.hot_rows)
        rows += known.distinct(global_batch, table.hot_rows) / problem.world_size
        updated[table.name] = Load(loads[table.name].lookups, rows)
    return {**found, "update": stage_seconds(local, tables, "plain", updated)["update"]}


def _by_owner(tables: Sequence[TablePlan], owners: Mapping[str, int]) -> list[tuple[TablePlan, ...]]:
    """The tables of each process that owns any."""
    found: dict[int, list[TablePlan]] = {}
    for table in tables:
        found.setdefault(owners[table.name], []).append(table)
    return [tuple(owned) for owned in found.values()]


def _memory(
    plan: Plan, problem: Problem, tables: Sequence[TablePlan], kind: StrategyKind, owners: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    local_plan = replace(plan, strategy=_planned_strategy(kind), world_size=problem.world_size)
    shares = _by_owner(tables, owners) if kind.shards_tables else [tables]
    each = [memory_bytes(local_plan, problem, share, staging_rows(problem, share)) for share in shares]
    return max(each, key=lambda tiers: sum(sum(parts.values()) for parts in tiers.values()))
