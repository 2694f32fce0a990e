"""The command `holdall simulate`: finds what a plan was made of, predicts, and prints for people or programs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from holdall.common.console import table
from holdall.common.errors import ConfigError
from holdall.common.sizes import readable_bytes
from holdall.data.schema import SCHEMA_FILE, Schema
from holdall.planning.inputs import config_of, find_hardware, find_lookups, make_problem
from holdall.planning.machine.hardware import Hardware, HardwareWarning, default_path
from holdall.planning.plan import STAGES, TIERS, Plan
from holdall.planning.simulate import ON_PAPER, Simulated, StrategyOnPaper, parse_world_sizes, simulate

NAMES = {"communicate": "exchange"}
"""Stages whose name says less than another word here."""


def run_simulate(
    path: Path,
    world_size: str,
    strategy: StrategyOnPaper,
    *,
    hardware: Path | None = None,
    data: Path | None = None,
    profile: Path | None = None,
    batch_size: int | None = None,
    as_json: bool = False,
) -> list[Simulated]:
    """Simulate the plan at `path`, print, and return the rows."""
    sizes = parse_world_sizes(world_size)
    plan = Plan.load(path)
    folder = find_data(path, plan, data)
    schema = Schema.load(folder)
    plan.check(schema)
    rates = _rates(hardware)
    problem = make_problem(schema, find_lookups(schema, folder, profile), config_of(plan), rates, folder)
    rows = simulate(plan, problem, sizes, strategy, schema, batch_size=batch_size)
    notes = _notes(rates, plan, strategy, rows)
    if as_json:
        assert rates.collectives is not None
        links = {"backend": rates.collectives.backend, "world_size": rates.collectives.world_size}
        document: dict[str, Any] = {"plan": path.name, "data": plan.data, "strategy": strategy, "links": links}
        print(json.dumps({**document, "notes": notes, "rows": [row.to_json() for row in rows]}, indent=2))
    else:
        show_simulated(rows, plan, strategy, notes)
    return rows


def _rates(given: Path | None) -> Hardware:
    if given is None and not default_path().exists():
        raise ConfigError(
            "this machine and its links were not measured yet: run `torchrun --nproc-per-node 2 -m holdall hardware`, "
            "or name a file with --hardware"
        )
    return find_hardware(given)


def find_data(path: Path, plan: Plan, given: Path | None) -> Path:
    """The data set that a plan was made for: given, or by its name here or beside the plan."""
    if given is not None:
        return given
    for folder in (Path(plan.data), path.parent / plan.data):
        if (folder / SCHEMA_FILE).is_file():
            return folder
    raise ConfigError(
        f"{path} was made for the data set '{plan.data}', which is neither here nor beside it: say where it is with "
        f"--data DIR"
    )


def _notes(rates: Hardware, plan: Plan, strategy: StrategyOnPaper, rows: Sequence[Simulated]) -> list[str]:
    links = rates.collectives
    assert links is not None
    notes = [
        f"links as {links.world_size} processes measured them over {links.backend}, every pair as far apart as those; "
        f"latencies of more processes are upper bounds"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HardwareWarning)  # said as a note
        other = rates.check_machine()
    notes += [] if other is None else [other]
    most = max(row.world_size for row in rows)
    if ON_PAPER[strategy].shards_tables and most > len(plan.tables):
        notes.append(
            f"there are {len(plan.tables)} tables, so of {most:,} processes {most - len(plan.tables):,} or more have "
            f"none; the others answer for everyone, and time and memory are those of the one with most"
        )
    for tier in TIERS:
        cap = getattr(plan.caps, tier)
        over = [row.world_size for row in rows if cap is not None and row.held(tier) > cap]
        if over:
            notes.append(f"more than the {readable_bytes(cap)} that the plan may use of the {tier}, at {_list(over)}")
    return notes


def _list(sizes: Sequence[int]) -> str:
    return f"{', '.join(f'{size:,}' for size in sizes)} processes"


def show_simulated(
    rows: Sequence[Simulated], plan: Plan, strategy: str, notes: Sequence[str] = (), console: Console | None = None
) -> None:
    """Print a line for each number of processes, then its stages, and what its exchange is made of."""
    console = console or Console()
    console.print(f"[bold]{strategy}[/bold] on paper: {plan.data}, dim {plan.dim}, {plan.optimizer}")
    tiers = [tier for tier in TIERS if any(row.held(tier) for row in rows)]
    lines = table("processes", "samples each", "step ms", "samples/s", "sent", *tiers)
    for row in rows:
        sent = readable_bytes(round(sum(row.sent.values())))
        held = [readable_bytes(row.held(tier)) for tier in tiers]
        rate = f"{row.samples_per_second:,.0f}"
        lines.add_row(f"{row.world_size:,}", f"{row.batch_size:,}", _ms(row.step_seconds), rate, sent, *held)
    console.print(lines)
    console.print("[dim]sent in a step, and held in each tier: by one process[/dim]")
    stages = [stage for stage in STAGES if any(row.seconds[stage] > 0 for row in rows)]
    kinds = list(dict.fromkeys(message.kind for row in rows for message in row.messages))
    by_stage = table("step, ms", *(NAMES.get(stage, stage.replace("_", " ")) for stage in stages))
    by_kind = table("exchange, ms", *(kind.replace("_", " ") for kind in kinds))
    sent_by_kind = table("sent", *(kind.replace("_", " ") for kind in kinds))
    for row in rows:
        processes, sent_of = f"{row.world_size:,}", row.sent
        by_stage.add_row(processes, *(_ms(row.seconds[stage]) for stage in stages))
        by_kind.add_row(processes, *(_ms(row.exchange.get(kind, 0.0)) for kind in kinds))
        sent_by_kind.add_row(processes, *(readable_bytes(round(sent_of.get(kind, 0.0))) for kind in kinds))
    for part in (by_stage, by_kind, sent_by_kind):
        console.print(part)
    for note in notes:
        console.print(f"[yellow]note:[/yellow] {note}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
