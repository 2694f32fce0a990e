"""The command `holdall simulate`: step time, bytes sent and memory of a plan at other numbers of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from holdall.common.console import make_console, styled, table
from holdall.common.errors import ConfigError
from holdall.common.sizes import readable_bytes
from holdall.data.schema import SCHEMA_FILE, Schema
from holdall.planning.config import config_of
from holdall.planning.inputs import find_hardware, find_lookups, make_problem
from holdall.planning.machine.hardware import CollectiveRates, Hardware, default_path
from holdall.planning.plan import STAGES, TIERS, Plan
from holdall.planning.simulation import (
    SIMULATED_KINDS,
    SimulatedStep,
    SimulatedStrategy,
    parse_world_sizes,
    simulate_steps,
)
from holdall.popularity.profile import Profile

STAGE_TITLES = {"communicate": "exchange"}
"""Column titles of stages that are not called by their own name."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Predicted steps of a plan, one row for each number of processes."""

    path: Path
    """File of the plan."""
    plan: Plan
    strategy: SimulatedStrategy
    links: CollectiveRates
    """Measured rates of the collectives."""
    rows: tuple[SimulatedStep, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.path.name,
            "data": self.plan.data,
            "strategy": self.strategy,
            "links": {"backend": self.links.backend, "world_size": self.links.world_size},
            "notes": list(self.notes),
            "rows": [row.to_json() for row in self.rows],
        }


def simulate(
    plan: str | Path,
    world_size: str | Sequence[int] = "8..4096",
    strategy: SimulatedStrategy = "two-fold",
    *,
    hardware: Hardware | str | Path | None = None,
    data: str | Path | None = None,
    profile: Profile | str | Path | None = None,
    batch_size: int | None = None,
) -> Simulation:
    """Predict the step of the plan file `plan` at numbers of processes that need not be there.

    `world_size` is the numbers, or a text such as `8`, `1,2,4` or `8..4096` (`parse_world_sizes`). `hardware` is rates
    measured under torchrun, or their file; this machine's own when None. `data` is the data set of the plan, found by
    its name in the working directory or beside the plan when None; `profile` saves counting its lookups. `batch_size`
    is that of all processes; each process keeps its share of the plan's when None.
    """
    path = Path(plan)
    sizes = parse_world_sizes(world_size if isinstance(world_size, str) else ",".join(map(str, world_size)))
    loaded = Plan.load(path)
    folder = find_data(path, loaded) if data is None else Path(data)
    schema = Schema.load(folder)
    loaded.check(schema)
    rates = _rates(hardware)
    problem = make_problem(schema, find_lookups(schema, folder, profile), config_of(loaded), rates, folder)
    rows = simulate_steps(loaded, problem, sizes, strategy, schema, batch_size=batch_size)
    assert rates.collectives is not None  # simulate_steps refuses rates without them
    notes = _notes(rates, rates.collectives, loaded, strategy, rows)
    return Simulation(
        path=path, plan=loaded, strategy=strategy, links=rates.collectives, rows=tuple(rows), notes=tuple(notes)
    )


def _rates(given: Hardware | str | Path | None) -> Hardware:
    if given is None and not default_path().exists():
        raise ConfigError(
            "this machine and its links were not measured yet: run `torchrun --nproc-per-node 2 -m holdall hardware`, "
            "or name a file with --hardware"
        )
    return find_hardware(given)


def find_data(path: Path, plan: Plan) -> Path:
    """The data set that the plan in file `path` was made for: by its name, in the working directory or beside it."""
    for folder in (Path(plan.data), path.parent / plan.data):
        if (folder / SCHEMA_FILE).is_file():
            return folder
    raise ConfigError(
        f"{path} was made for the data set '{plan.data}', which is neither here nor beside it: say where it is with "
        f"--data DIR"
    )


def _notes(
    rates: Hardware, links: CollectiveRates, plan: Plan, strategy: SimulatedStrategy, rows: Sequence[SimulatedStep]
) -> list[str]:
    notes = [
        f"links as {links.world_size} processes measured them over {links.backend}, assumed equal between every pair; "
        f"latencies of more processes are upper bounds"
    ]
    mismatch = rates.machine_mismatch()
    notes += [] if mismatch is None else [mismatch]
    most = max(row.world_size for row in rows)
    if SIMULATED_KINDS[strategy].shards_tables and most > len(plan.tables):
        notes.append(
            f"there are {len(plan.tables)} tables, so of {most:,} processes {most - len(plan.tables):,} or more have "
            f"none; the others answer for all, and time and memory are those of the process with most"
        )
    for tier in TIERS:
        cap = getattr(plan.caps, tier)
        over = [f"{row.world_size:,}" for row in rows if cap is not None and row.total_bytes(tier) > cap]
        if over:
            notes.append(
                f"more than the {readable_bytes(cap)} that the plan may use of the {tier}, at {', '.join(over)} "
                f"processes"
            )
    return notes


def show(simulation: Simulation, console: Console | None = None) -> None:
    """Print a line for each number of processes, then its stages, and the parts of its exchange."""
    console = console or make_console()
    plan, rows = simulation.plan, simulation.rows
    console.print(
        styled(f"{simulation.strategy},", "bold"), f"simulated: {plan.data}, dim {plan.dim}, {plan.optimizer}"
    )
    tiers = [tier for tier in TIERS if any(row.total_bytes(tier) for row in rows)]
    lines = table("processes", "samples each", "step ms", "samples/s", "sent", *tiers)
    for row in rows:
        sent = readable_bytes(round(sum(row.sent.values())))
        sizes = [readable_bytes(row.total_bytes(tier)) for tier in tiers]
        rate = f"{row.samples_per_second:,.0f}"
        lines.add_row(f"{row.world_size:,}", f"{row.batch_size:,}", _ms(row.step_seconds), rate, sent, *sizes)
    console.print(lines)
    console.print("bytes sent in a step and bytes used of each tier: of one process", style="dim")
    stages = [stage for stage in STAGES if any(row.seconds[stage] > 0 for row in rows)]
    kinds = list(dict.fromkeys(message.kind for row in rows for message in row.messages))
    by_stage = table("step, ms", *(STAGE_TITLES.get(stage, stage.replace("_", " ")) for stage in stages))
    by_kind = table("exchange, ms", *(kind.replace("_", " ") for kind in kinds))
    sent_by_kind = table("sent", *(kind.replace("_", " ") for kind in kinds))
    for row in rows:
        processes, sent_of = f"{row.world_size:,}", row.sent
        by_stage.add_row(processes, *(_ms(row.seconds[stage]) for stage in stages))
        by_kind.add_row(processes, *(_ms(row.exchange.get(kind, 0.0)) for kind in kinds))
        sent_by_kind.add_row(processes, *(readable_bytes(round(sent_of.get(kind, 0.0))) for kind in kinds))
    for part in (by_stage, by_kind, sent_by_kind):
        console.print(part)
    for note in simulation.notes:
        console.print(styled("note:", "yellow"), note)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
