"""Console output of plans and of measured rates."""

from __future__ import annotations

from rich.console import Console

from holdall.common.console import make_console, styled, table
from holdall.common.sizes import readable_bytes
from holdall.planning.machine.hardware import Hardware, Layer
from holdall.planning.plan import STAGES, TIERS, Plan, TablePlan
from holdall.tables import Bands, Dense, HotCold
from holdall.tables.describe import describe_method

MOST_LINES = 40
"""Tables shown at most; the others are summed in one line."""


def show(plan: Plan, console: Console | None = None) -> None:
    """Print a plan: its tables, bytes and lookups by tier, seconds by stage, and what limits the step."""
    console = console or make_console()
    console.print(
        styled("plan", "bold"),
        f"'{plan.preset}' for {plan.data}: {plan.model.get('model')}, batch {plan.batch_size:,}, "
        f"{plan.optimizer}, strategy {plan.strategy} on {plan.device}"
        + (f", {plan.world_size} processes" if plan.world_size > 1 else "")
        + (f", {plan.prefetch} steps ahead" if plan.prefetch else ""),
    )
    lines = table("table", "rows", "stored as", "hot rows", "rest", "dense", *_used(plan), "on device", "fetched rows")
    ordered = sorted(plan.tables, key=lambda t: -t.num_rows)
    for entry in ordered[:MOST_LINES]:
        lines.add_row(*_line(plan, entry))
    console.print(lines)
    console.print(
        "on device: share of the lookups that device rows serve; fetched rows: distinct rows fetched a step",
        style="dim",
    )
    if len(ordered) > MOST_LINES:
        rest = ordered[MOST_LINES:]
        console.print(f"and {len(rest)} smaller tables with {sum(t.num_rows for t in rest):,} rows")
    _show_forecast(plan, console)
    for note in plan.notes:
        console.print(styled("note:", "yellow"), note)


def _line(plan: Plan, entry: TablePlan) -> list[str]:
    dense = readable_bytes(entry.num_rows * plan.dim * 4)
    cells = [entry.name, f"{entry.num_rows:,}", _stored(entry), f"{entry.hot_rows:,}", entry.tail, dense]
    if entry.forecast is None:
        return [*cells, "?", "?"]
    for tier in _used(plan):
        parts = entry.forecast.bytes.get(tier)
        cells.append("-" if parts is None else readable_bytes(parts.total))
    on_device = entry.forecast.lookups.get("device", 0.0)
    return [*cells, f"{on_device:.1%}", f"{entry.forecast.far_rows:,.0f}" if entry.tiered else "-"]


def _used(plan: Plan) -> list[str]:
    """The tiers that store rows of any table."""
    known = [entry.forecast.bytes for entry in plan.tables if entry.forecast is not None]
    return [tier for tier in TIERS if any(tier in stored for stored in known)]


def _stored(entry: TablePlan) -> str:
    method = entry.method.cold if isinstance(entry.method, HotCold) else entry.method
    if isinstance(method, Dense):
        return "dense"
    if isinstance(method, Bands):
        return describe_method(method, entry.num_rows)
    settings = {name: value for name, value in method.to_json().items() if isinstance(value, int) and name != "seed"}
    return f"{method.name}({', '.join(f'{n}={v}' for n, v in settings.items() if not isinstance(v, bool))})"


def _show_forecast(plan: Plan, console: Console) -> None:
    made = plan.forecast
    if made is None:
        console.print("the plan was edited and is without a forecast: `holdall plan DIR --edited FILE` makes one")
        return
    tiers = table("tier", "may use", "uses", "tables", "optimizer state", "fetched rows", "model", "step", "lookups")
    shares = lookups_by_tier(plan)
    for tier in TIERS:
        parts = made.memory[tier]
        cap = getattr(plan.caps, tier)
        tiers.add_row(
            tier,
            "what is free" if cap is None else readable_bytes(cap),
            readable_bytes(made.total(tier)),
            readable_bytes(parts["tables"] + parts["table_buffers"]),
            readable_bytes(parts["table_state"] + parts.get("dense_state", 0)),
            readable_bytes(parts.get("staging", 0)),
            readable_bytes(parts.get("dense", 0)),
            readable_bytes(parts.get("step", 0)),
            f"{shares.get(tier, 0.0):.1%}",
        )
    console.print(tiers)
    after = sum(made.memory[tier]["tables"] + made.memory[tier]["table_state"] for tier in TIERS)
    console.print(
        f"tables with their state: {readable_bytes(made.before)} dense in one place, {readable_bytes(after)} here"
    )
    times = table("stage", "ms", "share")
    for stage in STAGES:
        if made.seconds[stage] > 0:
            share = made.seconds[stage] / made.step_seconds
            times.add_row(stage.replace("_", " "), f"{made.seconds[stage] * 1e3:.2f}", f"{share:.0%}")
    rate = plan.batch_size / made.step_seconds
    times.add_row("step, with overlap", f"{made.step_seconds * 1e3:.2f}", f"{rate:,.0f} samples/s")
    console.print(times)
    console.print(f"limited by: {made.binds}")


def lookups_by_tier(plan: Plan) -> dict[str, float]:
    """Share of all lookups that each tier serves."""
    found: dict[str, float] = {}
    known = [entry.forecast for entry in plan.tables if entry.forecast is not None]
    total = sum(made.per_sample for made in known)
    for made in known:
        for tier, share in made.lookups.items():
            found[tier] = found.get(tier, 0.0) + share * made.per_sample / max(total, 1e-12)
    return found


def show_hardware(hardware: Hardware, console: Console | None = None) -> None:
    """Print the rates of a machine."""
    console = console or make_console()
    machine = hardware.machine
    console.print(
        styled("hardware", "bold"),
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['gpu'] or 'no GPU'}: measured on {hardware.device} with {hardware.threads} threads in "
        f"{hardware.took_seconds:.0f} s",
    )
    rows = table("random rows, M rows/s", *(f"{size} B" for size in hardware.gather["host"]))
    for name, by_tier in (("read", hardware.gather), ("write", hardware.scatter)):
        for tier, by_size in by_tier.items():
            rows.add_row(f"{name}, {tier}", *(_rate(line.each) for line in by_size.values()))
    console.print(rows)
    steps = table("tables, ns", "dim", "a lookup", "a row", "update: a lookup", "a row")
    for cost in hardware.tables:
        chain = cost.method["method"] == "tensor_train"
        name = f"{cost.method['method']}{cost.method.get('rank', '')} {'' if chain else cost.optimizer}"
        parts = (cost.lookup.per_lookup, cost.lookup.per_row, cost.update.per_lookup, cost.update.per_row)
        steps.add_row(name, str(cost.dim), *(f"{part * 1e9:,.1f}" for part in parts))
    console.print(steps)
    console.print("for tensor trains, a row is one product of the chain", style="dim")
    fastest = max(hardware.layers, key=lambda layer: _flops(layer))
    facts = [
        f"memory in order {hardware.stream / 1e9:,.1f} GB/s",
        f"layers up to {_flops(fastest) / 1e9:,.0f} GFLOP/s",
        f"overlap {hardware.overlap:.0%}",
    ]
    for name, line in hardware.copy.items():
        facts.append(f"{name.replace('_', ' ')} {1 / line.each / 1e9:,.1f} GB/s" if line.each else name)
    if hardware.collectives is not None:
        facts.append(f"{hardware.collectives.world_size} processes over {hardware.collectives.backend}")
    console.print("; ".join(facts))
    busy = hardware.busy_remark()
    for note in (*hardware.notes, *(() if busy is None else (busy,))):
        console.print(styled("note:", "yellow"), note)


def _rate(seconds: float) -> str:
    """Millions a second, with three digits."""
    if not seconds:
        return "-"
    rate = 1e-6 / seconds
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _flops(layer: Layer) -> float:
    """FLOP a second of a layer, forward and backward, at its best batch size."""
    return max(6 * layer.inputs * layer.outputs * int(size) / max(t, 1e-12) for size, t in layer.seconds.items())
