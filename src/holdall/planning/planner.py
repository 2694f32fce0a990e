"""Planner: method, hot rows and place of every table, with the shortest predicted step within the memory limits.

    made = plan("data", PlanConfig(device_memory="4GB"))
    made.save("plan.json")

Every host row costs a step the same time, so the hot rows are those that batches look up most often, over all tables.
Rows on disk cost more time and weigh more. Where host memory cannot hold all tails, it holds those with the most
fetched rows per byte. What remains is a handful of candidates (all on the device; split, with tails in host memory, on
disk or some in each; looked up on the host). Each is predicted, and the fastest that fits is chosen. The number of
candidates does not depend on the number of tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from holdall.common.errors import ConfigError
from holdall.common.sizes import readable_bytes
from holdall.data.identity import data_fingerprint
from holdall.data.schema import Schema
from holdall.planning.config import PlanConfig, config_of
from holdall.planning.forecast import forecast
from holdall.planning.hot_row_selector import HotRowSelector, compressed_table, device_bytes
from holdall.planning.inputs import find_hardware, find_limits, find_lookups, make_problem
from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.machine.hardware import Hardware
from holdall.planning.memory_check import at_least, refuse_too_large, shortages
from holdall.planning.memory_cost import compressed_bytes
from holdall.planning.plan import Plan, PlannedStrategy, TablePlan, Tail
from holdall.planning.presets import Choice, find_preset
from holdall.planning.step_cost import Problem, compressed_seconds
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.popularity.profile import Profile
from holdall.tables import Dense, Method
from holdall.tables.budget import auto_method

SHARES = (1.0, 0.5)
"""Shares of the host memory tried for tails when not all fit: the rest caches popular rows of tails on disk."""
ROUNDS = 2
"""Rounds of choosing the tails in host memory from the hot rows, and the hot rows from those tails."""


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
    """A plan, such as one edited by hand, with a new forecast; a ConfigError where it does not fit."""
    schema = Schema.load(Path(data))
    edited.check(schema)
    config = config_of(edited)
    lookups = find_lookups(schema, data, profile)
    problem = make_problem(schema, lookups, config, find_hardware(hardware), folder=Path(data))
    return predict_problem(edited, problem, find_limits(config, problem.hardware, Path(data)))


def predict_problem(edited: Plan, problem: Problem, limits: Mapping[str, int]) -> Plan:
    """`predict` for a problem that is already made."""
    made = forecast(replace(edited, device=problem.hardware.device), problem, limits["host"])
    refuse_too_large(made, limits, edited=True)
    return made


def plan_tables(
    schema: Schema,
    lookups: Mapping[str, LookupCounts],
    config: PlanConfig,
    hardware: Hardware,
    *,
    name: str = "data",
    folder: Path | None = None,
) -> Plan:
    """Plan from the schema and the lookups of a data set; `folder` is its folder, if it has one."""
    problem = make_problem(schema, lookups, config, hardware, folder)
    return plan_problem(problem, config, find_limits(config, hardware, folder), name, data_fingerprint(schema))


def plan_problem(problem: Problem, config: PlanConfig, limits: Mapping[str, int], name: str, fingerprint: str) -> Plan:
    """Plan for a problem that is already made; `limits` are bytes by tier."""
    return Planner(problem, config, limits, name, fingerprint).run()


# --- candidates ------------------------------------------------------------------------------------------------------


class Planner:
    """Search for the fastest plan of a problem within memory limits."""

    def __init__(self, problem: Problem, config: PlanConfig, limits: Mapping[str, int], name: str, fingerprint: str):
        self.problem, self.config, self.limits = problem, config, dict(limits)
        self.name, self.fingerprint = name, fingerprint
        self.row = problem.stored_row_bytes
        self.one_memory = problem.hardware.device == "cpu" and config.caps().host is None
        """Whether host and device share one memory, without a cap on the host's part."""
        self.selector = HotRowSelector(problem, limits, problem.prefetch, one_memory=self.one_memory)

    def run(self) -> Plan:
        self._refuse_small_device()
        if self.problem.methods is not None:
            return self.within_budget(self.problem.methods)
        if self.config.preset != "auto":
            made = self.predicted(find_preset(self.config.preset)(self.problem, self.hot_rows))
            refuse_too_large(made, self.limits)
            return made
        choices = self.choices()
        fitting = [made for choice in choices if self.fits(made := self.predicted(choice))]
        if self.config.allow_compression is not None and self.problem.world_size == 1:
            fitting += self.compressed_where_faster(fitting, choices[-1])
        return min(fitting, key=_seconds) if fitting else self.compressed_to_fit()

    def within_budget(self, methods: Mapping[str, Method]) -> Plan:
        """The plan of a budget: tables by the given methods, all on the device."""
        tables = tuple(
            TablePlan(name=name, num_rows=rows, method=method, hot_rows=rows, tail="device")
            if isinstance(method := methods[name], Dense)
            else compressed_table(name, rows, method)
            for name, rows in self.problem.tables.items()
        )
        made = self.predicted(Choice("plain", tables))
        refuse_too_large(made, self.limits, has_budget=True)
        return made

    def choices(self) -> list[Choice]:
        """Candidates that keep every row exact."""
        if self.problem.world_size > 1:
            return [find_preset("p2res")(self.problem, self.hot_rows)]
        found = [find_preset(name)(self.problem, self.hot_rows) for name in ("device", "dlrm")]
        return [*found, *self.splits({})]

    def predicted(self, choice: Choice) -> Plan:
        """The plan of a choice, with its forecast."""
        config = self.config
        made = Plan(
            data=self.name,
            fingerprint=self.fingerprint,
            model=config.model.model_settings(),
            dim=self.problem.dim,
            batch_size=config.batch_size,
            optimizer=config.optimizer_kind().name,
            precision=config.precision,
            strategy=choice.strategy,
            prefetch=self.problem.prefetch if STRATEGY_KINDS[choice.strategy].has_hot_rows else 0,
            world_size=config.world_size,
            device=self.problem.hardware.device,
            caps=config.caps(),
            preset=config.preset,
            tables=choice.tables,
            notes=tuple(self._process_notes()),
        )
        return forecast(made, self.problem, self.limits["host"])

    def _process_notes(self) -> list[str]:
        """Notes on what a plan for several processes covers."""
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

    # --- tails in host memory and on disk ----------------------------------------------------------------------------

    def splits(self, compressed: Mapping[str, Method]) -> list[Choice]:
        """Candidates with hot rows on the device and tails in host memory; where those do not fit, on disk or in
        both."""
        in_memory = self.split(dict.fromkeys(self.problem.tables, "host"), compressed)
        found = [in_memory, _in_one_pack(in_memory, "host")]
        if compressed:
            found.append(self.whole(compressed))
        if self.fits(self.predicted(in_memory)):
            return found
        everything: dict[str, Tail] = dict.fromkeys(self.problem.tables, "disk")
        for cached in (False, True):
            on_disk = self.split(everything, compressed, cached=cached)
            found += [on_disk, _in_one_pack(on_disk, "disk")]
            for share in SHARES:
                found += self.mixes(on_disk, compressed, share, cached=cached)
        return list(dict.fromkeys(found))  # some are equal

    def whole(self, compressed: Mapping[str, Method]) -> Choice:
        """All on the device: other tables whole, and exact rows of the compressed ones in the bytes that are left."""
        exact = self.selector.choose_exact_rows(compressed)
        tables = self.problem.tables
        return Choice("plain", tuple(self._stored(name, compressed, exact.get(name, tables[name])) for name in tables))

    def mixes(self, start: Choice, compressed: Mapping[str, Method], share: float, *, cached: bool) -> list[Choice]:
        """Candidates with some tails in a share of the host memory, by fetched rows per byte, and the others on disk.

        Where the others do not fit the disk, the largest go to host memory first: that fills it best.
        """
        found, latest = [], start
        before: dict[str, Tail] = {}
        for _ in range(ROUNDS):
            tiered = {t.name: t for t in latest.tables if isinstance(t.method, Dense)}
            sizes = {name: table.num_rows * self.row for name, table in tiered.items()}
            worth = {name: self._fetched(table) / sizes[name] for name, table in tiered.items()}
            budget = share * self._memory_for_tails(latest)
            kept = _fill(sorted(sizes, key=lambda name: -worth[name]), sizes, budget)
            left = sum(size for name, size in sizes.items() if name not in kept and tiered[name].tiered)
            if left > self.limits["disk"]:
                kept = _fill(sorted(sizes, key=lambda name: -sizes[name]), sizes, budget)
            tails: dict[str, Tail] = {name: "host" if name in kept else "disk" for name in self.problem.tables}
            if tails == before:
                break
            before, latest = tails, self.split(tails, compressed, cached=cached)
            found.append(latest)
        return found

    def _fetched(self, table: TablePlan) -> float:
        """Distinct rows of a table that a batch looks up outside the hot rows: 0 for a table that is hot whole."""
        return self.problem.lookups[table.name].distinct(self.problem.batch_size, table.hot_rows)

    def _memory_for_tails(self, like: Choice) -> int:
        """Host bytes for tails, beside the other host bytes of such a plan."""
        made = self.predicted(like).forecast
        assert made is not None
        fixed = made.memory["host"]["table_buffers"] + made.memory["host"]["staging"]
        if self.one_memory:
            fixed += made.total("device") - made.memory["device"]["tables"] - made.memory["device"]["table_state"]
        return max(0, self.limits["host"] - fixed)

    def split(self, tails: Mapping[str, Tail], compressed: Mapping[str, Method], *, cached: bool = False) -> Choice:
        """Hot rows on the device, the other rows at `tails`; with `cached`, those on disk are in the page cache."""
        dense = {name: tails[name] for name in tails if name not in compressed}
        hot = self.selector.choose(dense, compressed, "split", cached=cached)
        tables = [self._stored(name, compressed, hot[name], tails[name]) for name in self.problem.tables]
        strategy: PlannedStrategy = "split" if any(table.tiered for table in tables) else "plain"
        return Choice(strategy, tuple(tables))

    def hot_rows(self, compressed: Mapping[str, Method], strategy: PlannedStrategy, tail: Tail) -> dict[str, int]:
        """Hot rows by table, as many as fit the device; none of compressed tables."""
        tails = {name: tail for name in self.problem.tables if name not in compressed}
        return self.selector.choose(tails, compressed, strategy, exact_parts=False)

    # --- compression -------------------------------------------------------------------------------------------------

    def compressed_where_faster(self, exact: Sequence[Plan], otherwise: Choice) -> list[Plan]:
        """Plans like the fastest exact one, or like `otherwise`, in which tables are compressed to the allowed share
        where computing their rows takes less time than fetching them."""
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
        return [made for choice in self.splits(found) if self.fits(made := self.predicted(choice))]

    def compressed_to_fit(self) -> Plan:
        """A plan that compresses the largest tables, as many as it takes until all fit; it is not exact."""
        rows = self.problem.tables
        smaller = {
            name: method for name in sorted(rows, key=lambda name: -rows[name]) if (method := self._smaller(name))
        }
        best, count, step = None, 1, 1
        sizes = [rows[name] * self.row for name in smaller]
        while sum(rows.values()) * self.row - sum(sizes[:count]) > sum(self.limits.values()) and count < len(sizes):
            count += 1  # fewer cannot be enough
        while smaller and (best is None or shortages(best, self.limits)):
            compressed = dict(list(smaller.items())[:count])
            made = [self.predicted(choice) for choice in self.splits(compressed)]
            best = min(made, key=lambda plan: (sum(shortages(plan, self.limits).values()), _seconds(plan)))
            if count == len(smaller):
                break
            count, step = min(len(smaller), count + step), 2 * step  # few tries for any number of tables
        if best is None:  # nothing can be made smaller
            best = self.predicted(self.splits({})[-1])
        refuse_too_large(best, self.limits)
        inexact = [table.name for table in best.tables if table.tail == "compressed"]
        note = (
            f"not all tables fit device, host and disk, so {len(inexact)} are compressed and no longer exact: "
            f"{', '.join(inexact)}"
        )
        return replace(best, notes=(note, *best.notes))

    def _stored(self, name: str, compressed: Mapping[str, Method], hot_rows: int, tail: Tail = "device") -> TablePlan:
        """A table whose first rows are hot and whose other rows are compressed or at `tail`."""
        rows = self.problem.tables[name]
        if name in compressed and hot_rows < rows:
            return self._with_exact_rows(name, compressed[name], hot_rows)
        place: Tail = "device" if hot_rows == rows else tail
        return TablePlan(name=name, num_rows=rows, method=Dense(), hot_rows=hot_rows, tail=place)

    def _with_exact_rows(self, name: str, method: Method, hot_rows: int) -> TablePlan:
        """A compressed table with its exact rows, unless the others then take more bytes than all rows compressed."""
        rows, problem = self.problem.tables[name], self.problem
        whole, split = compressed_table(name, rows, method), compressed_table(name, rows, method, hot_rows)
        most, taken = (compressed_bytes(t.method, rows, problem.dim, problem.optimizer).total for t in (whole, split))
        return split if taken <= most + hot_rows * self.row else whole

    def _smaller(self, name: str) -> Method | None:
        """The method that stores a table in the allowed share of its bytes, 1/20 by default; None where there is
        none."""
        size = 4 * self.problem.tables[name] * self.problem.dim
        share = self.config.compression_share() or 1 / 20
        return auto_method(self.problem.tables[name], self.problem.dim, int(size * share))

    def _refuse_small_device(self) -> None:
        fixed = device_bytes(self.problem, self.problem.prefetch, (), {})
        if fixed > self.limits["device"]:
            raise ConfigError(
                f"--device-memory {readable_bytes(self.limits['device'])} is less than the {readable_bytes(fixed)} "
                f"that the model without its tables and a step of {self.problem.batch_size:,} samples take: give more "
                f"than {at_least(fixed)}, or lower --batch-size"
            )


def _in_one_pack(choice: Choice, tail: Tail) -> Choice:
    """The same choice with tables that are hot whole in the pack of the others, as if they had a tail there.

    One pack is looked up and updated faster than two, but such tables take bytes in both tiers.
    """
    if not STRATEGY_KINDS[choice.strategy].has_hot_rows:
        return choice
    return replace(choice, tables=tuple(replace(t, tail=tail) if t.tail == "device" else t for t in choice.tables))


def _fill(order: Sequence[str], sizes: Mapping[str, int], budget: float) -> set[str]:
    """Names that fit a budget of bytes, tried in this order."""
    kept: set[str] = set()
    for name in order:
        if sizes[name] <= budget:
            kept.add(name)
            budget -= sizes[name]
    return kept


def _seconds(made: Plan) -> float:
    assert made.forecast is not None
    return made.forecast.step_seconds
