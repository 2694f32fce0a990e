"""What a step would cost: seconds by stage, from distinct rows a batch, bytes of a row and measured rates.

On a CPU, stages run one after the other unless something overlaps them: then the longer one hides the part
`hardware.overlap` of the shorter one. On a GPU a step is a graph, and the host, what computes and what moves rows
either way are four that work at the same time, if they may: the slowest sets the pace. Nothing here is fitted to a
plan; every number comes from `Hardware` and from the counts of lookups.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdall.common.errors import ConfigError
from holdall.optim.records import RECORDS
from holdall.planning.collective_cost import Links
from holdall.planning.layer_cost import interaction_seconds, layer_seconds
from holdall.planning.lookup_counts import Lookups
from holdall.planning.machine.hardware import Cost, Hardware, line_at
from holdall.planning.machine.transfer_path import PINNED, PINNED_DURING_STEPS
from holdall.planning.messages import dense_message, two_fold_messages
from holdall.planning.plan import STAGES, TablePlan
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.planning.table_cost import chain_of, parameter_ratio, table_costs
from holdall.planning.workload import DenseWork
from holdall.tables import Dense, HotCold, Method
from holdall.tiers.host_rows import RESIDENT_BYTES, exceeds_resident

COPIED = "copied"
"""Stands for a tier whose rows the host copies to a GPU from files in the system's memory."""
FAULT_AROUND = 1 << 16
"""Bytes of a file around a page that is read which Linux maps with it, where they are in its memory (its default)."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be placed: tables, who looks them up how often, the model around them, and the machine."""

    tables: dict[str, int]
    """Rows by table."""
    lookups: dict[str, Lookups]
    dim: int
    batch_size: int
    """Of one process."""
    num_dense: int
    optimizer: str
    work: DenseWork
    hardware: Hardware
    precision: str = "float32"
    """Of the layers and the interaction; float32 rates stand for others that were not measured."""
    world_size: int = 1
    prefetch: int = 0
    hot_inputs: Callable[[Mapping[str, int]], float] | None = None
    """Share of the samples all of whose lookups are hot, given hot rows by table; only hot batches ask."""
    _costs: dict[Any, tuple[Cost, Cost]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def row_bytes(self) -> int:
        return 4 * self.dim

    @property
    def state_bytes(self) -> int:
        """Optimizer state of a dense row."""
        return RECORDS[self.optimizer].row_state_bytes(self.dim)

    @property
    def moved_bytes(self) -> tuple[int, ...]:
        """Bytes of each tensor's row that moves with a row: its weights, and each slot of optimizer state."""
        return (self.row_bytes, *RECORDS[self.optimizer].row_slot_bytes(self.dim))

    def batch_lookups(self, name: str) -> float:
        return self.lookups[name].per_sample * self.batch_size

    # --- tables ------------------------------------------------------------------------------------------------------

    def table_costs(self, method: Method, *, host: bool = False, num_rows: int | None = None) -> tuple[Cost, Cost]:
        """Lookup, and backward with update, of a table of this method, the problem's dim and so many rows."""
        key = (str(method.to_json()), host)
        if key not in self._costs:
            known = self.hardware.host_tables if host else self.hardware.tables
            self._costs[key] = table_costs(known, method, self.dim, self.optimizer)
        lookup, update = self._costs[key]
        if num_rows is None or self.hardware.device != "cpu":
            return lookup, update
        size = parameter_ratio(self.hardware.tables, method, num_rows, self.dim)
        return replace(lookup, base=lookup.base * size), replace(update, base=update.base * size)

    def row_seconds(self, tier: str) -> float:
        """What one far row costs a step when it has to be brought from a tier and sent back."""
        return self.fetch_seconds(1.0, tier, base=False) + self.send_back_seconds(1.0, tier, base=False)

    def fetch_seconds(self, rows: float, tier: str, *, base: bool = True) -> float:
        """Gathering rows and their state from a tier, handing them to the device and giving them their beginnings."""
        return self._moved_seconds("read", rows, tier, base)

    def send_back_seconds(self, rows: float, tier: str, *, base: bool = True) -> float:
        return self._moved_seconds("write", rows, tier, base)

    @property
    def reached_as(self) -> str | None:
        """The tier that stands for rows of the host where kernels of the device reach them; None where none do."""
        tier = PINNED_DURING_STEPS if self.prefetch > 0 and PINNED_DURING_STEPS in self.hardware.gather else PINNED
        return tier if tier in self.hardware.gather else None

    def _moved_seconds(self, way: str, rows: float, tier: str, base: bool) -> float:
        rates = self.hardware.gather if way == "read" else self.hardware.scatter
        if tier == "host" and self.reached_as is not None:  # kernels do all of it
            lines = [line_at(rates[self.reached_as], width) for width in self.moved_bytes]
            return sum(rows * line.each + (line.base if base else 0.0) for line in lines)
        if self.hardware.captured is not None:  # the host of a GPU does
            copied = self.hardware.captured.copied
            slower = sum(
                line_at(rates[tier], width).each - line_at(rates["host"], width).each
                for width in self.moved_bytes
                if tier in rates
            )
            return rows * (copied.per_row / 2 + max(0.0, slower)) + (copied.base / 2 if base else 0.0)
        lines = [line_at(rates[tier], width) for width in self.moved_bytes]
        begin = self.hardware.begin.get(way, Cost())
        total = sum(rows * line.each + (line.base if base else 0.0) for line in lines)
        return total + begin.seconds(rows * self.dim, rows) - (0.0 if base else begin.base)

    def fault_seconds(self, way: str) -> float:
        """What it costs a row that the page of a file it lies on is in the system's memory, but not mapped."""
        rates = self.hardware.gather if way == "read" else self.hardware.scatter
        cached, mapped = (line_at(rates[tier], self.row_bytes).each for tier in ("cached", "host"))
        return max(0.0, cached - mapped)


# --- stages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """What a step asks of one table, on average."""

    lookups: float
    distinct: float
    """Different rows."""
    far_lookups: float = 0.0
    far: float = 0.0
    """Different rows that are fetched."""
    from_disk: float = 0.0
    """Those of them that are read from disk."""
    from_cache: float = 0.0
    """Those of them that lie on disk, but are still in the system's memory."""
    samples: int = 0
    """Samples that have those far lookups."""


def table_load(problem: Problem, table: TablePlan, cached_rows: int = 0, crowding: float = 1.0) -> Load:
    """`cached_rows` of a table on disk, after its hot ones, stay in the host's memory.

    With `crowding` c, far lookups come c times as close together as in the data: a batch has those of c batches.
    """
    known = problem.lookups[table.name]
    lookups, size = problem.batch_lookups(table.name), problem.batch_size
    distinct = known.distinct(size)
    if not table.tiered:
        return Load(lookups, distinct)
    crowded = round(size * crowding)
    far = known.distinct(crowded, table.hot_rows)
    far_lookups = min(lookups, crowding * lookups * (1 - known.share(table.hot_rows)))
    if table.tail != "disk":
        return Load(lookups, distinct, far_lookups, far, samples=crowded)
    uncached = known.distinct(crowded, table.hot_rows + cached_rows)
    return Load(lookups, distinct, far_lookups, far, uncached, far - uncached, crowded)


def stage_seconds(
    problem: Problem, tables: Sequence[TablePlan], strategy: str, loads: Mapping[str, Load]
) -> dict[str, float]:
    """Seconds of every stage of a step, each on its own."""
    dense = [table for table in tables if isinstance(table.method, Dense)]
    on_host = STRATEGY_KINDS[strategy].looks_up_on_host
    found = dict.fromkeys(STAGES, 0.0)
    numbers = sum(load.lookups for load in loads.values()) + problem.batch_size * (problem.num_dense + 1)
    found["read"] = problem.hardware.read.seconds(numbers)
    found["launch"] = launch_seconds(problem, tables, strategy, numbers)
    if dense:
        lookup, update = problem.table_costs(Dense(), host=on_host)
        lookups, distinct = (sum(getattr(loads[t.name], what) for t in dense) for what in ("lookups", "distinct"))
        more = num_packs(dense, strategy) - 1
        found["lookup"] += lookup.seconds(lookups, distinct) + more * lookup.base
        found["update"] += update.seconds(lookups, distinct) + more * update.base
    together: set[str] = set()
    for table in tables:
        if not isinstance(table.method, Dense):
            kind = table.method.name if problem.hardware.device != "cpu" and not on_host else table.name
            costs = compressed_seconds(problem, table, on_host, joins=kind in together)
            together.add(kind)
            for stage, seconds in zip(("lookup", "update"), costs, strict=True):
                found[stage] += seconds
    if num_packs(dense, strategy) + (len(dense) < len(tables)) > 1:
        numbers = problem.dim * sum(load.lookups for load in loads.values())
        found["lookup"] += problem.hardware.stack["forward"].seconds(numbers)
        found["update"] += problem.hardware.stack["backward"].seconds(numbers)
    if on_host and problem.hardware.device != "cpu":
        size = 4 * problem.dim * sum(load.lookups for load in loads.values())
        found["fetch"] = problem.hardware.copy["to_device_pinned"].seconds(size)
        found["write_back"] = problem.hardware.copy["to_host_pinned"].seconds(size)
    elif STRATEGY_KINDS[strategy].has_hot_rows:
        found.update(far_seconds(problem, tables, loads))
    found["dense"] = dense_seconds(problem)
    found["update"] += problem.hardware.dense_update[problem.optimizer].seconds(problem.work.num_parameters)
    if problem.world_size > 1:
        found["communicate"] = communicate_seconds(problem, tables)
    return found


def num_packs(dense: Sequence[TablePlan], strategy: str) -> int:
    """How many storages dense tables lie in, each looked up and updated by itself: one a place, where they have several
    (`tiers.place`)."""
    return len({table.tail for table in dense}) if STRATEGY_KINDS[strategy].keeps_tail else min(1, len(dense))


def far_seconds(problem: Problem, tables: Sequence[TablePlan], loads: Mapping[str, Load]) -> dict[str, float]:
    """Finding, fetching and sending back the rows of a step that are not hot.

    Rows of files in the system's memory take as long as others there, and the faults of the pages that are not mapped.
    """
    tiered = [loads[table.name] for table in tables if table.tiered]
    from_disk, from_cache = (sum(getattr(load, n) for load in tiered) for n in ("from_disk", "from_cache"))
    from_host = sum(load.far for load in tiered) - from_disk - from_cache
    found = {"find": find_seconds(problem, tables, loads), "fetch": 0.0, "write_back": 0.0}
    mapped = "host" if problem.hardware.captured is None else COPIED
    for tier, rows in (("host", from_host), (mapped, from_cache), ("disk", from_disk)):
        if rows > 1e-9:
            found["fetch"] += problem.fetch_seconds(rows, tier)
            found["write_back"] += problem.send_back_seconds(rows, tier)
    if from_cache > 1e-9:
        reads, writes = page_faults(problem, tables, loads)
        found["fetch"] += reads * problem.fault_seconds("read")
        found["write_back"] += writes * problem.fault_seconds("write")
    return found


def find_seconds(problem: Problem, tables: Sequence[TablePlan], loads: Mapping[str, Load]) -> float:
    """Telling far rows from hot ones, in every pack that has any: one a kind of tail."""
    total = 0.0
    for tail in dict.fromkeys(table.tail for table in tables if table.tiered):
        of_pack = [loads[table.name] for table in tables if table.tiered and table.tail == tail]
        lookups, far = (sum(getattr(load, what) for load in of_pack) for what in ("lookups", "far_lookups"))
        reached = tail == "host" and problem.reached_as is not None
        if problem.hardware.captured is not None and not reached:  # the host of a GPU finds the rows that it copies
            total += problem.hardware.captured.copied.per_lookup * lookups
        else:
            total += problem.hardware.find.seconds(lookups, far)
    return total


def launch_seconds(problem: Problem, tables: Sequence[TablePlan], strategy: str, numbers: float) -> float:
    """What the host does for a step of a GPU whose batch has so many numbers, beyond tables and rows of its own."""
    known = problem.hardware.captured
    if known is None:
        return 0.0
    kind = STRATEGY_KINDS[strategy]
    if kind.looks_up_on_host:
        return known.launch_layers.seconds(len(problem.work.layers))
    moves = kind.keeps_tail and problem.reached_as is not None
    reached = moves and any(table.tail == "host" for table in tables)
    return (known.launch_far if reached else known.launch_step).seconds(numbers)


def page_faults(problem: Problem, tables: Sequence[TablePlan], loads: Mapping[str, Load]) -> tuple[float, float]:
    """Pages of files that a step maps to read, and to write, them.

    A page stays mapped, for all its rows, until the pack lets go of what it has mapped (`RESIDENT_BYTES`), if there is
    more than that. A system maps pages around one that is read, if it has them in memory, and marks each that is
    written.
    """
    on_disk = [table for table in tables if table.tail == "disk"]
    num_rows = sum(table.num_rows for table in on_disk)
    far = sum(loads[table.name].far for table in on_disk)
    if far <= 0:
        return 0.0, 0.0
    steps = max(1.0, RESIDENT_BYTES / mmap.PAGESIZE / (2 * far))  # between two times of letting go
    found = [0.0, 0.0]
    for table in on_disk:
        known, samples = problem.lookups[table.name], round(loads[table.name].samples * steps)
        for width in problem.moved_bytes:
            if not exceeds_resident(num_rows * width):
                continue
            for place, size in enumerate((FAULT_AROUND, mmap.PAGESIZE)):
                found[place] += known.distinct_blocks(samples, max(1, size // width), table.hot_rows) / steps
    return found[0], found[1]


def compressed_seconds(
    problem: Problem, table: TablePlan, on_host: bool = False, *, joins: bool = False
) -> tuple[float, float]:
    """Lookup and update of a table that is not dense; of a `HotCold` one, of both its parts.

    `joins`: of what others pay for already, as on a GPU tables of one kind share their kernels.
    """
    known, size = problem.lookups[table.name], problem.batch_size
    method, lookups = table.method, problem.batch_lookups(table.name)
    parts: list[tuple[Method, float, float]] = [(method, lookups, known.distinct(size))]
    hot = 0
    if isinstance(method, HotCold):
        hot = method.split(table.num_rows)[0]
        share = known.share(hot)
        parts = [
            (Dense(), lookups * share, known.distinct(size, 0, hot)),
            (method.cold, lookups * (1 - share), known.distinct(size, hot)),
        ]
    totals = [0.0, 0.0]
    for part, of_part, distinct in parts:
        num_rows = table.num_rows - (hot if part is not method else 0)
        costs = problem.table_costs(part, host=on_host and isinstance(part, Dense), num_rows=num_rows)
        chain = chain_of(part, num_rows, problem.dim)
        if chain is not None:
            distinct = chain.products(known.distinct_blocks(size, chain.block, hot), distinct)
        for place, cost in enumerate(costs):
            totals[place] += cost.seconds(of_part, distinct)
            if joins or (part is not method and isinstance(part, Dense)):
                totals[place] -= cost.base  # which is that of a pack, or of the kind
    return totals[0], totals[1]


def compressed_row_seconds(problem: Problem, name: str, method: Method) -> float:
    """Seconds by which a row of a compressed table that a step looks up costs more than one that is stored, or 0."""
    known = problem.lookups[name]
    distinct = known.distinct(problem.batch_size)
    each = problem.batch_lookups(name) / distinct if distinct else 1.0
    chain = chain_of(method, problem.tables[name], problem.dim)
    made, stored = problem.table_costs(method), problem.table_costs(Dense())
    seconds = sum(cost.per_lookup * each + cost.per_row * (1.0 if chain is None else chain.row) for cost in made)
    return max(0.0, seconds - sum(cost.per_lookup * each + cost.per_row for cost in stored))


def dense_seconds(problem: Problem) -> float:
    """The layers and the interaction, forward and backward."""
    size, hardware = problem.batch_size, problem.hardware
    layers = [one for one in hardware.layers if one.precision == problem.precision] or hardware.layers
    interactions = [one for one in hardware.interactions if one.precision == problem.precision]
    total = 4 * hardware.call  # the loss and its gradient
    for layer in problem.work.layers:
        total += layer_seconds(layers, layer.inputs, layer.outputs, size * layer.per_sample)
    if problem.work.interaction is not None:
        vectors, dim, times = problem.work.interaction
        total += interaction_seconds(interactions or hardware.interactions, vectors, dim, size * times)
    return total


def communicate_seconds(problem: Problem, tables: Sequence[TablePlan]) -> float:
    """What processes tell each other in a step: hot rows on all of them and the others sharded, and the dense part."""
    collectives = problem.hardware.collectives
    if collectives is None:
        raise ConfigError(
            f"the hardware file has no rates of processes talking to each other, which a world size of "
            f"{problem.world_size} needs: measure with "
            f"`torchrun --nproc-per-node {problem.world_size} -m holdall hardware`"
        )
    hot = {table.name: table.hot_rows for table in tables if isinstance(table.method, Dense)}
    known = {name: problem.lookups[name] for name in hot}
    size, world_size = problem.batch_size, problem.world_size
    messages = [dense_message(dense_bytes(problem, tables), world_size)]
    if known:
        messages += two_fold_messages(known, hot, row_bytes=problem.row_bytes, batch_size=size, world_size=world_size)
    return sum(Links(collectives).by_kind(messages, world_size).values())


def dense_bytes(problem: Problem, tables: Sequence[TablePlan]) -> int:
    """Gradients that are summed whole: of the dense part, and of compressed tables (those kept by row send less)."""
    compressed = [table for table in tables if not isinstance(table.method, Dense)]
    return problem.work.parameter_bytes + sum(t.method.num_bytes(t.num_rows, problem.dim) for t in compressed)


def step_seconds(problem: Problem, stages: Mapping[str, float], strategy: str, *, copied: bool = False) -> float:
    """A step with what overlaps: batches are read ahead, and far rows come ahead if they may.

    `copied`: on a GPU, the host copies some far rows, so its threads have all that moves rows to do.
    """
    near = stages["lookup"] + stages["dense"] + stages["update"] + stages["communicate"]
    far = stages["find"] + stages["fetch"] + stages["write_back"]
    if problem.hardware.captured is not None:
        return _step_of_gpu(problem, stages, strategy, near, far, copied)
    overlap = problem.hardware.overlap

    def together(one: float, other: float) -> float:
        return max(one, other) + (1 - overlap) * min(one, other)

    if problem.prefetch > 0:
        return together(near, far + stages["read"])
    return together(near + far, stages["read"])


def _step_of_gpu(
    problem: Problem, stages: Mapping[str, float], strategy: str, near: float, far: float, copied: bool
) -> float:
    """The slowest of those that work at the same time: the host, what computes, and what moves rows either way."""
    launch = stages["launch"]
    kind = STRATEGY_KINDS[strategy]
    if kind.looks_up_on_host:  # the host looks up, waits and updates; layers are launched while they run
        return near - stages["dense"] + max(stages["dense"], launch) + far
    if not kind.has_hot_rows:
        return max(near, launch)
    if problem.prefetch == 0 or not kind.keeps_tail:
        return near + far + launch
    if copied:
        return max(near, launch + far)
    return max(near + stages["find"], stages["fetch"], stages["write_back"], launch)
