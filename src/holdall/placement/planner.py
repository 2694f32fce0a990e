"""Choose method, hot rows and place of every table such that the predicted step is shortest within the memory.

    made = plan("data", PlanConfig(device_memory="4GB"))
    made.save("plan.json")

A far row costs a step the same time whichever it is, so hot rows are those that batches look up most often, over all
tables together; where some tails are on disk, their rows cost more and weigh more. What is left to choose is a handful
of shapes (all on the device; split; looked up on the host): each is predicted, and the fastest that fits is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from holdall.errors import ConfigError
from holdall.placement.cost import Problem, compressed_seconds
from holdall.placement.forecast import (
    compressed_bytes,
    crowding_of,
    find_bytes,
    forecast,
    staging_bytes,
    staging_rows,
)
from holdall.placement.hardware import Hardware
from holdall.placement.inputs import PlanConfig, config_of, find_hardware, find_limits, find_lookups, make_problem
from holdall.placement.lookups import Lookups, choose_hot
from holdall.placement.plan import TIERS, Plan, StrategyName, TablePlan, Tail
from holdall.placement.presets import Choice, find_preset
from holdall.popularity.profile import Profile, fingerprint
from holdall.schema import Schema
from holdall.sizes import parse_budget, readable_bytes
from holdall.tables import Dense, Method
from holdall.tables.budget import auto_method

SMALL = 1000
"""Tables that take less than this part of the room for hot rows are hot as a whole, up to a tenth of it."""


def plan(
    data: str | Path,
    config: PlanConfig | None = None,
    *,
    hardware: Hardware | str | Path | None = None,
    profile: Profile | str | Path | None = None,
) -> Plan:
    """Plan a prepared data set.

    `hardware` is measured rates or their file (this machine's own when None, which must have been measured); `profile`
    saves counting the lookups of the training split.
    """
    config = config or PlanConfig()
    rates = find_hardware(hardware)
    schema = Schema.load(Path(data))
    lookups = find_lookups(schema, data, profile)
    made = plan_tables(schema, lookups, config, rates, name=Path(data).name, folder=Path(data))
    warning = rates.check_machine()
    return made if warning is None else replace(made, notes=(*made.notes, warning))


def predict(
    edited: Plan,
    data: str | Path,
    *,
    hardware: Hardware | str | Path | None = None,
    profile: Profile | str | Path | None = None,
) -> Plan:
    """The same choices, such as those of a plan edited by hand, with what they will take; refused where too much."""
    schema = Schema.load(Path(data))
    edited.check(schema)
    config = config_of(edited)
    lookups = find_lookups(schema, data, profile)
    problem = make_problem(schema, lookups, config, find_hardware(hardware), folder=Path(data))
    return predict_problem(edited, problem, find_limits(config, problem.hardware, Path(data)))


def predict_problem(edited: Plan, problem: Problem, limits: Mapping[str, int]) -> Plan:
    """`predict` from what is known already."""
    made = forecast(replace(edited, device=problem.hardware.device), problem, limits["host"])
    _refuse_too_large(made, limits)
    return made


def plan_tables(
    schema: Schema,
    lookups: Mapping[str, Lookups],
    config: PlanConfig,
    hardware: Hardware,
    *,
    name: str = "data",
    folder: Path | None = None,
) -> Plan:
    """Plan from what is known about a data set; `folder` is where it lies, if anywhere."""
    problem = make_problem(schema, lookups, config, hardware, folder)
    return plan_problem(problem, config, find_limits(config, hardware, folder), name, fingerprint(schema))


def plan_problem(problem: Problem, config: PlanConfig, limits: Mapping[str, int], name: str, fingerprint: str) -> Plan:
    """Plan from what is known already; `limits` is bytes by tier."""
    return Planner(problem, config, limits, name, fingerprint).run()


# --- choosing --------------------------------------------------------------------------------------------------------


class Planner:
    """One planning: its problem, what it may use, and the plans it weighs."""

    def __init__(self, problem: Problem, config: PlanConfig, limits: Mapping[str, int], name: str, fingerprint: str):
        self.problem, self.config, self.limits = problem, config, dict(limits)
        self.name, self.fingerprint = name, fingerprint
        self.row = problem.row_bytes + problem.state_bytes
        self.notes: list[str] = []

    def run(self) -> Plan:
        self._refuse_a_device_too_small()
        if self.config.preset != "auto":
            chosen = find_preset(self.config.preset)(self.problem, self.hot_rows)
            made = self.made(chosen)
            _refuse_too_large(made, self.limits)
            return made
        candidates = [made for choice in self.choices() if self.fits(made := self.made(choice))]
        if not candidates:
            chosen = self.compressed_to_fit()
            made = self.made(chosen)
            _refuse_too_large(made, self.limits)
            return made
        return min(candidates, key=_seconds)

    def choices(self) -> list[Choice]:
        """The shapes of a plan that keeps every row exact, and the one that compresses where that was allowed."""
        presets = ["p2res"] if self.problem.world_size > 1 else ["device", "dlrm"]
        found = [find_preset(name)(self.problem, self.hot_rows) for name in presets]
        if self.problem.world_size == 1:
            tails = self.tails()
            found.append(self.split(tails, {}))
            if "disk" in tails.values():
                found.append(self.split(tails, {}, cached=True))
            if self.config.allow_compression is not None:
                found.append(self.split(tails, self.compressed_where_faster(found[-1])))
        return found

    def made(self, choice: Choice) -> Plan:
        """A choice as a plan, with its forecast."""
        config = self.config
        made = Plan(
            data=self.name,
            fingerprint=self.fingerprint,
            model=config.model_settings(),
            dim=self.problem.dim,
            batch_size=config.batch_size,
            optimizer=config.optimizer,
            precision=config.precision,
            strategy=choice.strategy,
            prefetch=config.prefetch,
            world_size=config.world_size,
            device=self.problem.hardware.device,
            caps=config.caps(),
            preset=config.preset,
            tables=choice.tables,
            notes=tuple(self.notes),
        )
        return forecast(made, self.problem, self.limits["host"])

    def fits(self, made: Plan) -> bool:
        return not shortages(made, self.limits)

    # --- far rows ----------------------------------------------------------------------------------------------------

    def tails(self) -> dict[str, Tail]:
        """Where rows live when not all fit the device: all on the host, or all on disk when that is too small.

        Rows on disk that are looked up often stay in the host's memory by themselves, whichever table they are of: that
        is worth more than whole tables there.
        """
        room = self.limits["host"] - staging_rows_bytes(self.problem)
        tail: Tail = "host" if sum(self.problem.tables.values()) * self.row <= room else "disk"
        return dict.fromkeys(self.problem.tables, tail)

    def split(self, tails: Mapping[str, Tail], compressed: Mapping[str, Method], *, cached: bool = False) -> Choice:
        """Hot rows on the device, the rest where `tails` says; `cached`, as if memory kept what disks hold."""
        dense = {name: tails[name] for name in tails if name not in compressed}
        hot = self._hot_rows(dense, compressed, "split", cached=cached)
        tables = []
        for name, rows in self.problem.tables.items():
            if name in compressed:
                tables.append(_compressed(name, rows, compressed[name]))
                continue
            tail: Tail = "device" if hot[name] == rows else tails[name]
            tables.append(TablePlan(name=name, num_rows=rows, method=Dense(), hot_rows=hot[name], tail=tail))
        strategy: StrategyName = "split" if any(table.tiered for table in tables) else "plain"
        return Choice(strategy, tuple(tables))

    def hot_rows(self, compressed: Mapping[str, Method], strategy: StrategyName, tail: Tail) -> dict[str, int]:
        """Hot rows by table, as many as the device has room for."""
        return self._hot_rows({n: tail for n in self.problem.tables if n not in compressed}, compressed, strategy)

    def _hot_rows(
        self,
        tails: Mapping[str, Tail],
        compressed: Mapping[str, Method],
        strategy: StrategyName,
        *,
        cached: bool = False,
    ) -> dict[str, int]:
        """Rows by seconds saved, within what the device has left after all that must be there.

        The room for far rows depends on the hot ones and the reverse: a few turns settle it, the last one on the safe
        side.
        """
        tiers = {"disk": "cached" if cached else "disk"}
        worth = {name: self.problem.row_seconds(tiers.get(tail, "host")) for name, tail in tails.items()}
        hot = self._settled(tails, compressed, worth, 1.0)
        if strategy != "hot-batches" or self.problem.hot_inputs is None:
            return hot
        whole = {name: self.problem.tables[name] for name in compressed}
        return self._settled(tails, compressed, worth, crowding_of(self.problem.hot_inputs({**whole, **hot})))

    def _settled(
        self,
        tails: Mapping[str, Tail],
        compressed: Mapping[str, Method],
        worth: Mapping[str, float],
        crowding: float,
    ) -> dict[str, int]:
        """The most hot rows that leave room for the far ones, when those come `crowding` times as close."""
        hot = dict.fromkeys(tails, 0)
        best: dict[str, int] | None = None
        for _ in range(6):
            hot = self._hottest(worth, self.room(hot, tails, compressed, crowding))
            if sum(hot.values()) * self.row <= self.room(hot, tails, compressed, crowding):
                best = max(best or hot, hot, key=lambda rows: sum(rows.values()))
        return hot if best is None else best

    def _hottest(self, worth: Mapping[str, float], room: int) -> dict[str, int]:
        """Small tables whole, then rows by seconds saved, then the rest of what can be made whole."""
        tables, small, left = self.problem.tables, {}, room
        for name in sorted(worth, key=lambda name: tables[name]):
            needed = tables[name] * self.row
            if needed * SMALL > room or left - needed < room * 9 // 10:
                break
            small[name] = tables[name]
            left -= needed
        known = {name: self.problem.lookups[name] for name in worth if name not in small}
        chosen = choose_hot(known, worth, self.row, left, self.problem.batch_size) if known else {}
        return self._completed({name: small.get(name, chosen.get(name, 0)) for name in worth}, room)

    def room(
        self, hot: Mapping[str, int], tails: Mapping[str, Tail], compressed: Mapping[str, Method], crowding: float
    ) -> int:
        """Bytes of the device for hot rows, when these are hot."""
        tables = [
            TablePlan(name=name, num_rows=self.problem.tables[name], method=Dense(), hot_rows=hot[name], tail=tail)
            for name, tail in tails.items()
            if hot[name] < self.problem.tables[name]
        ]
        staging = staging_rows(self.problem, tables, crowding) if tables else 0
        placed = [_compressed(name, self.problem.tables[name], method) for name, method in compressed.items()]
        return self.limits["device"] - _device_bytes(self.problem, self.config.prefetch, placed, staging)

    def _completed(self, hot: Mapping[str, int], room: int) -> dict[str, int]:
        """With the rows that nobody looked up, of small tables first: a table that is whole needs no second place."""
        left, found = room - sum(hot.values()) * self.row, dict(hot)
        for name in sorted(found, key=lambda name: self.problem.tables[name] - found[name]):
            missing = self.problem.tables[name] - found[name]
            if missing * self.row > left:
                break
            left -= missing * self.row
            found[name] += missing
        return found

    # --- compression -------------------------------------------------------------------------------------------------

    def compressed_where_faster(self, exact: Choice) -> dict[str, Method]:
        """Tables whose far rows cost more time than computing rows would; each at the share that was allowed."""
        assert self.config.allow_compression is not None
        found = {}
        dense = self.problem.table_costs(Dense())
        for table in exact.tables:
            if not table.tiered:
                continue
            size = 4 * table.num_rows * self.problem.dim
            method = auto_method(table.num_rows, self.problem.dim, parse_budget(self.config.allow_compression, size))
            if method is None:
                continue
            known = self.problem.lookups[table.name]
            far = known.distinct(self.problem.batch_size, table.hot_rows)
            saved = far * self.problem.row_seconds("disk" if table.tail == "disk" else "host")
            lookups, distinct = self.problem.batch_lookups(table.name), known.distinct(self.problem.batch_size)
            saved += sum(cost.per_lookup * lookups + cost.per_row * distinct for cost in dense)
            if sum(compressed_seconds(self.problem, _compressed(table.name, table.num_rows, method))) < saved:
                found[table.name] = method
        return found

    def compressed_to_fit(self) -> Choice:
        """The largest tables compressed, one by one, until the others fit host or disk; exactness is given up."""
        rows = self.problem.tables
        compressed: dict[str, Method] = {}
        most = max(self.limits["host"] - staging_rows_bytes(self.problem), self.limits["disk"])
        for name in sorted(rows, key=lambda name: -rows[name]):
            if sum(rows[other] for other in rows if other not in compressed) * self.row <= most:
                break
            share = parse_budget(self.config.allow_compression or "1/20", 4 * rows[name] * self.problem.dim)
            method = auto_method(rows[name], self.problem.dim, share)
            if method is not None:
                compressed[name] = method
        if compressed:
            self.notes.append(
                f"{len(compressed)} tables do not fit the host and the disk, so they are compressed and no longer "
                f"exact: {', '.join(compressed)}"
            )
        left = sum(rows[name] for name in rows if name not in compressed) * self.row
        fits_host = left <= self.limits["host"] - staging_rows_bytes(self.problem)
        return self.split(dict.fromkeys(rows, "host" if fits_host else "disk"), compressed)

    def _refuse_a_device_too_small(self) -> None:
        fixed = _device_bytes(self.problem, self.config.prefetch, (), 0)
        if fixed > self.limits["device"]:
            raise ConfigError(
                f"--device-memory {readable_bytes(self.limits['device'])} is less than the {readable_bytes(fixed)} "
                f"that the model without its tables and a step of {self.problem.batch_size:,} samples take: give "
                f"{readable_bytes(fixed - self.limits['device'])} more, or lower --batch-size"
            )


def _compressed(name: str, rows: int, method: Method) -> TablePlan:
    return TablePlan(name=name, num_rows=rows, method=method, hot_rows=0, tail="compressed")


def staging_rows_bytes(problem: Problem) -> int:
    """What fetched rows take on the host at most: every lookup of a step a row of its own."""
    lookups = sum(problem.batch_lookups(name) for name in problem.tables)
    return round(lookups) * (problem.row_bytes + problem.state_bytes)


def _device_bytes(problem: Problem, prefetch: int, compressed: Sequence[TablePlan], staging: int) -> int:
    """What the device holds beside dense rows: as `forecast.memory` counts it."""
    total = staging_bytes(problem, staging, prefetch) + problem.work.parameter_bytes + problem.work.state_bytes
    total += problem.work.step_bytes(problem.batch_size) + (find_bytes(problem) if staging else 0)
    return total + sum(
        compressed_bytes(table.method, table.num_rows, problem.dim, problem.optimizer).total for table in compressed
    )


def _seconds(made: Plan) -> float:
    assert made.forecast is not None
    return made.forecast.step_seconds


def needs(made: Plan) -> dict[str, int]:
    """Bytes that a plan takes by tier. Where the device is the CPU and nobody parted them, host and device are one."""
    assert made.forecast is not None
    found = {tier: made.forecast.total(tier) for tier in TIERS}
    if made.device == "cpu" and made.caps.host is None and made.caps.device is None:
        found["host"] += found.pop("device")
    return found


def shortages(made: Plan, limits: Mapping[str, int]) -> dict[str, int]:
    """Bytes by which a plan is too large, by tier."""
    return {tier: size - limits[tier] for tier, size in needs(made).items() if size > limits[tier]}


def _refuse_too_large(made: Plan, limits: Mapping[str, int]) -> None:
    """Raise when a plan does not fit: by how much, and what would make it fit."""
    short, needed = shortages(made, limits), needs(made)
    if not short:
        return
    assert made.forecast is not None
    told = ", ".join(
        f"{readable_bytes(size)} more on the {tier} than the {readable_bytes(limits[tier])} it may use"
        for tier, size in short.items()
    )
    cures = [f"--{tier}-memory {_at_least(needed[tier])}" for tier in short]
    if made.preset != "auto":
        cures.append("--preset auto, which moves rows away")
    else:
        cures.append("--allow-compression 1/100")
    if made.forecast.memory["device"]["step"] > min(short.values()):
        cures.append("a smaller --batch-size")
    raise ConfigError(f"plan '{made.preset}' does not fit: it takes {told}; give {', or '.join(cures)}")


def _at_least(size: int) -> str:
    """A size as a flag takes it, rounded up."""
    for unit, power in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= 10 * power:
            return f"{-(-size // power)}{unit}"
    return f"{size}B"
