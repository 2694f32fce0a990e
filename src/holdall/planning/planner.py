"""Choose method, hot rows and place of every table such that the predicted step is shortest within the memory.

    made = plan("data", PlanConfig(device_memory="4GB"))
    made.save("plan.json")

A far row costs a step the same time whichever it is, so hot rows are those that batches look up most often, over all
tables together; where some tails are on disk, their rows cost more and weigh more. Of the tails that memory cannot hold
all of, those stay in it whose rows a step fetches most of for their bytes. What is left to choose is a handful of
shapes (all on the device; split, with tails in memory, on disk or some of each; looked up on the host): each is
predicted, and the fastest that fits is taken. How many there are does not depend on the number of tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from holdall.common.errors import ConfigError
from holdall.common.sizes import readable_bytes
from holdall.data.schema import Schema
from holdall.planning.config import PlanConfig, config_of
from holdall.planning.forecast import compressed_bytes, forecast
from holdall.planning.hot_row_selector import HotRowSelector, compressed_table, device_bytes
from holdall.planning.inputs import find_hardware, find_limits, find_lookups, make_problem
from holdall.planning.lookup_counts import Lookups
from holdall.planning.machine.hardware import Hardware
from holdall.planning.memory_check import at_least, refuse_too_large, shortages
from holdall.planning.plan import Plan, PlannedStrategy, TablePlan, Tail
from holdall.planning.presets import Choice, find_preset
from holdall.planning.step_cost import Problem, compressed_seconds
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.popularity.profile import Profile, fingerprint
from holdall.tables import Dense, Method
from holdall.tables.budget import auto_method

SHARES = (1.0, 0.5)
"""Parts of the host's memory tried for tails when not all fit: the rest keeps popular rows of those on disk."""
ROUNDS = 2
"""Which tails are worth memory depends on the hot rows and the reverse: how often one is chosen after the other."""


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
    refuse_too_large(made, limits, edited=True)
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
        self.one_memory = problem.hardware.device == "cpu" and config.caps().host is None
        """Whether the host's memory is the device's, and nobody parted them."""
        self.hot = HotRowSelector(problem, limits, problem.prefetch, one_memory=self.one_memory)

    def run(self) -> Plan:
        self._refuse_a_device_too_small()
        if self.config.preset != "auto":
            made = self.made(find_preset(self.config.preset)(self.problem, self.hot_rows))
            refuse_too_large(made, self.limits)
            return made
        choices = self.choices()
        fitting = [made for choice in choices if self.fits(made := self.made(choice))]
        if self.config.allow_compression is not None and self.problem.world_size == 1:
            fitting += self.compressed_where_faster(fitting, choices[-1])
        return min(fitting, key=_seconds) if fitting else self.compressed_to_fit()

    def choices(self) -> list[Choice]:
        """The shapes of a plan that keeps every row exact."""
        if self.problem.world_size > 1:
            return [find_preset("p2res")(self.problem, self.hot_rows)]
        found = [find_preset(name)(self.problem, self.hot_rows) for name in ("device", "dlrm")]
        return [*found, *self.splits({})]

    def made(self, choice: Choice) -> Plan:
        """A choice as a plan, with its forecast."""
        config = self.config
        made = Plan(
            data=self.name,
            fingerprint=self.fingerprint,
            model=config.model.model_settings(),
            dim=self.problem.dim,
            batch_size=config.batch_size,
            optimizer=config.optimizer,
            precision=config.precision,
            strategy=choice.strategy,
            prefetch=self.problem.prefetch if STRATEGY_KINDS[choice.strategy].has_hot_rows else 0,
            world_size=config.world_size,
            device=self.problem.hardware.device,
            caps=config.caps(),
            preset=config.preset,
            tables=choice.tables,
            notes=tuple(self._about_processes()),
        )
        return forecast(made, self.problem, self.limits["host"])

    def _about_processes(self) -> list[str]:
        """What a plan for several processes covers."""
        measured = self.problem.hardware.collectives
        if self.problem.world_size == 1 or measured is None:
            return []
        return [
            f"bytes and times are those of one of {self.problem.world_size} processes, and what they send is predicted "
            f"from rates measured between {measured.world_size} over {measured.backend}; of the strategies for several "
            f"processes only two-fold is planned: torchrun --nproc-per-node {self.problem.world_size} -m holdall train "
            f"... --plan follows it"
        ]

    def fits(self, made: Plan) -> bool:
        return not shortages(made, self.limits)

    # --- far rows ----------------------------------------------------------------------------------------------------

    def splits(self, compressed: Mapping[str, Method]) -> list[Choice]:
        """Hot rows on the device and the others in memory; or, where that is too small, on disk, or some in each."""
        in_memory = self.split(dict.fromkeys(self.problem.tables, "host"), compressed)
        found = [in_memory, _together(in_memory, "host")]
        if compressed:
            found.append(self.whole(compressed))
        if self.fits(self.made(in_memory)):
            return found
        everything: dict[str, Tail] = dict.fromkeys(self.problem.tables, "disk")
        for cached in (False, True):
            on_disk = self.split(everything, compressed, cached=cached)
            found += [on_disk, _together(on_disk, "disk")]
            for share in SHARES:
                found += self.mixes(on_disk, compressed, share, cached=cached)
        return list(dict.fromkeys(found))  # several ways may lead to one choice

    def whole(self, compressed: Mapping[str, Method]) -> Choice:
        """All on the device: what is not compressed as a whole, and exact rows of what is in the room that is left."""
        exact = self.hot.beside_whole(compressed)
        tables = self.problem.tables
        return Choice("plain", tuple(self._stored(name, compressed, exact.get(name, tables[name])) for name in tables))

    def mixes(self, start: Choice, compressed: Mapping[str, Method], share: float, *, cached: bool) -> list[Choice]:
        """Tails in memory by the seconds that saves for their bytes, within a share of it, the others on disk.

        Where the disk has no room for the others, the largest go to memory first instead: that fills it best.
        """
        found, latest = [], start
        before: dict[str, Tail] = {}
        for _ in range(ROUNDS):
            tiered = {t.name: t for t in latest.tables if isinstance(t.method, Dense)}
            sizes = {name: table.num_rows * self.row for name, table in tiered.items()}
            worth = {name: self._fetched(table) / sizes[name] for name, table in tiered.items()}
            room = share * self._memory_for_tails(latest)
            kept = _filled(sorted(sizes, key=lambda name: -worth[name]), sizes, room)
            left = sum(size for name, size in sizes.items() if name not in kept and tiered[name].tiered)
            if left > self.limits["disk"]:
                kept = _filled(sorted(sizes, key=lambda name: -sizes[name]), sizes, room)
            tails: dict[str, Tail] = {name: "host" if name in kept else "disk" for name in self.problem.tables}
            if tails == before:
                break
            before, latest = tails, self.split(tails, compressed, cached=cached)
            found.append(latest)
        return found

    def _fetched(self, table: TablePlan) -> float:
        """Different rows of a table that a batch looks up outside its hot part: 0 for one that is hot as a whole."""
        return self.problem.lookups[table.name].distinct(self.problem.batch_size, table.hot_rows)

    def _memory_for_tails(self, like: Choice) -> int:
        """Bytes of the host for tails, beside what a plan like this one needs there anyway."""
        made = self.made(like).forecast
        assert made is not None
        fixed = made.memory["host"]["table_buffers"] + made.memory["host"]["staging"]
        if self.one_memory:
            fixed += made.total("device") - made.memory["device"]["tables"] - made.memory["device"]["table_state"]
        return max(0, self.limits["host"] - fixed)

    def split(self, tails: Mapping[str, Tail], compressed: Mapping[str, Method], *, cached: bool = False) -> Choice:
        """Hot rows on the device, the rest where `tails` says; `cached`, as if memory kept what disks hold."""
        dense = {name: tails[name] for name in tails if name not in compressed}
        hot = self.hot.choose(dense, compressed, "split", cached=cached)
        tables = [self._stored(name, compressed, hot[name], tails[name]) for name in self.problem.tables]
        strategy: PlannedStrategy = "split" if any(table.tiered for table in tables) else "plain"
        return Choice(strategy, tuple(tables))

    def hot_rows(self, compressed: Mapping[str, Method], strategy: PlannedStrategy, tail: Tail) -> dict[str, int]:
        """Hot rows by table, as many as the device has room for; none of compressed tables."""
        tails = {name: tail for name in self.problem.tables if name not in compressed}
        return self.hot.choose(tails, compressed, strategy, exact_parts=False)

    # --- compression -------------------------------------------------------------------------------------------------

    def compressed_where_faster(self, exact: Sequence[Plan], otherwise: Choice) -> list[Plan]:
        """Plans like the fastest exact one, or like `otherwise`, in which tables whose far rows cost more time than
        computing rows would are compressed, each to the share that was allowed."""
        assert self.config.allow_compression is not None
        split = [made for made in exact if made.kind.has_hot_rows]
        like = min(split, key=_seconds).tables if split else otherwise.tables
        found: dict[str, Method] = {}
        dense = self.problem.table_costs(Dense())
        for table in like:
            method = self._smaller(table.name) if table.tiered else None
            if method is None:
                continue
            known = self.problem.lookups[table.name]
            saved = self._fetched(table) * self.problem.row_seconds("disk" if table.tail == "disk" else "host")
            lookups, distinct = self.problem.batch_lookups(table.name), known.distinct(self.problem.batch_size)
            saved += sum(cost.per_lookup * lookups + cost.per_row * distinct for cost in dense)
            if sum(compressed_seconds(self.problem, compressed_table(table.name, table.num_rows, method))) < saved:
                found[table.name] = method
        if not found:
            return []
        return [made for choice in self.splits(found) if self.fits(made := self.made(choice))]

    def compressed_to_fit(self) -> Plan:
        """The largest tables compressed, ever more of them, until the others fit; exactness is given up."""
        rows = self.problem.tables
        smaller = {
            name: method for name in sorted(rows, key=lambda name: -rows[name]) if (method := self._smaller(name))
        }
        best, count, step = None, 1, 1
        sizes = [rows[name] * self.row for name in smaller]
        while sum(rows.values()) * self.row - sum(sizes[:count]) > sum(self.limits.values()) and count < len(sizes):
            count += 1  # fewer are sure not to be enough
        while smaller and (best is None or shortages(best, self.limits)):
            compressed = dict(list(smaller.items())[:count])
            made = [self.made(choice) for choice in self.splits(compressed)]
            best = min(made, key=lambda plan: (sum(shortages(plan, self.limits).values()), _seconds(plan)))
            if count == len(smaller):
                break
            count, step = min(len(smaller), count + step), 2 * step  # few tries, whatever the number of tables
        if best is None:  # nothing can be made smaller
            best = self.made(self.splits({})[-1])
        refuse_too_large(best, self.limits)
        inexact = [table.name for table in best.tables if table.tail == "compressed"]
        note = (
            f"not all tables fit device, host and disk, so {len(inexact)} are compressed and no longer exact: "
            f"{', '.join(inexact)}"
        )
        return replace(best, notes=(note, *best.notes))

    def _stored(self, name: str, compressed: Mapping[str, Method], hot_rows: int, tail: Tail = "device") -> TablePlan:
        """A table whose first rows are hot, and the others compressed or at `tail`."""
        rows = self.problem.tables[name]
        if name in compressed and hot_rows < rows:
            return self._with_exact_rows(name, compressed[name], hot_rows)
        place: Tail = "device" if hot_rows == rows else tail
        return TablePlan(name=name, num_rows=rows, method=Dense(), hot_rows=hot_rows, tail=place)

    def _with_exact_rows(self, name: str, method: Method, hot_rows: int) -> TablePlan:
        """A compressed table and its exact rows, unless the other rows alone would take more than all of them did."""
        rows, problem = self.problem.tables[name], self.problem
        whole, parted = compressed_table(name, rows, method), compressed_table(name, rows, method, hot_rows)
        most, taken = (compressed_bytes(t.method, rows, problem.dim, problem.optimizer).total for t in (whole, parted))
        return parted if taken <= most + hot_rows * self.row else whole

    def _smaller(self, name: str) -> Method | None:
        """How a table is stored in the share of its bytes that was allowed, 1/20 if none was; None where it cannot."""
        size = 4 * self.problem.tables[name] * self.problem.dim
        share = self.config.compression_share() or 1 / 20
        return auto_method(self.problem.tables[name], self.problem.dim, int(size * share))

    def _refuse_a_device_too_small(self) -> None:
        fixed = device_bytes(self.problem, self.problem.prefetch, (), {})
        if fixed > self.limits["device"]:
            raise ConfigError(
                f"--device-memory {readable_bytes(self.limits['device'])} is less than the {readable_bytes(fixed)} "
                f"that the model without its tables and a step of {self.problem.batch_size:,} samples take: give more "
                f"than {at_least(fixed)}, or lower --batch-size"
            )


def _together(choice: Choice, tail: Tail) -> Choice:
    """The same with tables that are hot as a whole beside the others, as if they had a tail there.

    One storage is looked up and updated faster than two, and they take a place in both tiers.
    """
    if not STRATEGY_KINDS[choice.strategy].has_hot_rows:
        return choice
    return replace(choice, tables=tuple(replace(t, tail=tail) if t.tail == "device" else t for t in choice.tables))


def _filled(order: Sequence[str], sizes: Mapping[str, int], room: float) -> set[str]:
    """What goes into a room when everything is tried in this order."""
    kept: set[str] = set()
    for name in order:
        if sizes[name] <= room:
            kept.add(name)
            room -= sizes[name]
    return kept


def _seconds(made: Plan) -> float:
    assert made.forecast is not None
    return made.forecast.step_seconds
