"""Cost model of a training step: seconds by stage, from distinct rows per batch, bytes per row and measured rates.

On a CPU, stages run in sequence. Where two overlap, the longer one hides the part `hardware.overlap` of the shorter
one. On a GPU a step is a CUDA graph, and with prefetching four things run concurrently: the host, the computation, the
fetches and the write-backs. The slowest of them sets the step time. Nothing here is fitted to a plan: every number
comes from `Hardware` and from the lookup counts.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdall.common.errors import ConfigError
from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from holdall.planning.collective_cost import Links
from holdall.planning.dense_work import DenseWork
from holdall.planning.layer_cost import interaction_seconds, layer_seconds
from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.machine.hardware import Cost, Hardware, line_at
from holdall.planning.machine.transfer_path import PINNED, PINNED_DURING_STEPS
from holdall.planning.messages import dense_message, two_fold_messages
from holdall.planning.plan import STAGES, TablePlan
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.planning.table_cost import chain_of, parameter_ratio, table_costs
from holdall.tables import Dense, Method, Shared
from holdall.tables.bands import Band, BandedMethod
from holdall.tiers.mapped_file import RESIDENT_BYTES, exceeds_resident

COPIED = "copied"
"""Tier of rows that the host copies to a GPU from files in the page cache; it has no rates of its own."""
FAULT_AROUND = 1 << 16
"""Bytes that Linux maps around a page of a file on a read fault, where they are in the page cache (its default)."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Planning problem: tables, their lookups, the model around them, and the rates of the machine."""

    tables: dict[str, int]
    """Rows by table."""
    lookups: dict[str, LookupCounts]
    dim: int
    batch_size: int
    """Samples of one process."""
    num_dense: int
    optimizer: str
    work: DenseWork
    hardware: Hardware
    precision: str = "float32"
    """Precision of the layers and the interaction; float32 rates are used where another was not measured."""
    world_size: int = 1
    prefetch: int = 0
    methods: Mapping[str, Method] | None = None
    """Methods by table, where a budget decides on them."""
    hot_inputs: Callable[[Mapping[str, int]], float] | None = None
    """Share of the samples all of whose lookups are hot, given hot rows by table; needed for hot batches only."""
    _costs: dict[Any, tuple[Cost, Cost]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def row_bytes(self) -> int:
        return 4 * self.dim

    @property
    def state_bytes(self) -> int:
        """Optimizer state of a dense row."""
        return OPTIMIZER_KINDS[self.optimizer].row_state_bytes(self.dim)

    @property
    def stored_row_bytes(self) -> int:
        """Bytes of a dense row with its optimizer state."""
        return self.row_bytes + self.state_bytes

    @property
    def moved_bytes(self) -> tuple[int, ...]:
        """Bytes of each tensor's row that moves with a row: its weights, and each slot of optimizer state."""
        return (self.row_bytes, *OPTIMIZER_KINDS[self.optimizer].row_slot_bytes(self.dim))

    def batch_lookups(self, name: str) -> float:
        return self.lookups[name].per_sample * self.batch_size

    # --- tables ------------------------------------------------------------------------------------------------------

    def table_costs(self, method: Method, *, host: bool = False, num_rows: int | None = None) -> tuple[Cost, Cost]:
        """Cost of the lookup, and of the backward with update, of a table of this method and number of rows."""
        key = (str(method.to_json()), host)
        if key not in self._costs:
            known = self.hardware.host_tables if host else self.hardware.tables
            self._costs[key] = table_costs(known, method, self.dim, OPTIMIZER_KINDS[self.optimizer].rates)
        lookup, update = self._costs[key]
        if num_rows is None or self.hardware.device != "cpu":
            return lookup, update
        size = parameter_ratio(self.hardware.tables, method, num_rows, self.dim)
        return replace(lookup, base=lookup.base * size), replace(update, base=update.base * size)

    def row_seconds(self, tier: str) -> float:
        """Seconds to fetch one row from a tier and write it back, without fixed costs."""
        return self.fetch_seconds(1.0, tier, base=False) + self.write_back_seconds(1.0, tier, base=False)

    def fetch_seconds(self, rows: float, tier: str, *, base: bool = True) -> float:
        """Seconds to gather rows and their state from a tier, add their initial values and copy them to the device."""
        return self._transfer_seconds("read", rows, tier, base)

    def write_back_seconds(self, rows: float, tier: str, *, base: bool = True) -> float:
        """Seconds to copy rows and their state to the host and scatter them to a tier."""
        return self._transfer_seconds("write", rows, tier, base)

    @property
    def kernel_tier(self) -> str | None:
        """The tier whose rates host rows have where kernels of the device read and write them; None where they do
        not."""
        tier = PINNED_DURING_STEPS if self.prefetch > 0 and PINNED_DURING_STEPS in self.hardware.gather else PINNED
        return tier if tier in self.hardware.gather else None

    def _transfer_seconds(self, way: str, rows: float, tier: str, base: bool) -> float:
        rates = self.hardware.gather if way == "read" else self.hardware.scatter
        if tier == "host" and self.kernel_tier is not None:  # kernels gather and transfer
            lines = [line_at(rates[self.kernel_tier], width) for width in self.moved_bytes]
            return sum(rows * line.each + (line.base if base else 0.0) for line in lines)
        if self.hardware.captured is not None:  # the host of a GPU gathers and copies
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
        """Seconds of a page fault on a row of a file whose page is in the page cache but not mapped."""
        rates = self.hardware.gather if way == "read" else self.hardware.scatter
        cached, mapped = (line_at(rates[tier], self.row_bytes).each for tier in ("cached", "host"))
        return max(0.0, cached - mapped)


# --- stages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Average lookups and rows of one table in a step."""

    lookups: float
    distinct: float
    """Distinct rows."""
    fetched_lookups: float = 0.0
    """Lookups of rows that are fetched."""
    fetched: float = 0.0
    """Distinct rows that are fetched."""
    from_disk: float = 0.0
    """Fetched rows that are read from disk."""
    from_cache: float = 0.0
    """Fetched rows of files that are in the page cache."""
    samples: int = 0
    """Samples that have those lookups."""


def table_load(problem: Problem, table: TablePlan, cached_rows: int = 0, concentration: float = 1.0) -> Load:
    """Load of a table; the first `cached_rows` after the hot rows of a table on disk are in the page cache.

    With `concentration` c, a batch has the lookups of fetched rows of c batches of the data: hot batches have none, and
    the other batches have them all.
    """
    known = problem.lookups[table.name]
    lookups, size = problem.batch_lookups(table.name), problem.batch_size
    distinct = known.distinct(size)
    if not table.tiered:
        return Load(lookups, distinct)
    samples = round(size * concentration)
    fetched = known.distinct(samples, table.hot_rows)
    fetched_lookups = min(lookups, concentration * lookups * (1 - known.share(table.hot_rows)))
    if table.tail != "disk":
        return Load(lookups, distinct, fetched_lookups, fetched, samples=samples)
    uncached = known.distinct(samples, table.hot_rows + cached_rows)
    return Load(lookups, distinct, fetched_lookups, fetched, uncached, fetched - uncached, samples)


def concentration_of(hot_share: float) -> float:
    """Factor of the lookups of fetched rows in other batches when this share of the samples is in hot batches."""
    return 1 / max(1 - hot_share, 1e-3)


def stage_seconds(
    problem: Problem, tables: Sequence[TablePlan], strategy: str, loads: Mapping[str, Load]
) -> dict[str, float]:
    """Seconds of every stage of a step, without overlap."""
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
    launched: set[str] = set()
    for table in tables:
        if not isinstance(table.method, Dense):
            kind = table.method.name if problem.hardware.device != "cpu" and not on_host else table.name
            costs = compressed_seconds(problem, table, on_host, shares_launch=kind in launched)
            launched.add(kind)
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
        found.update(transfer_seconds(problem, tables, loads))
    found["dense"] = dense_seconds(problem)
    found["update"] += problem.hardware.dense_update[OPTIMIZER_KINDS[problem.optimizer].rates].seconds(
        problem.work.num_parameters
    )
    if problem.world_size > 1:
        found["communicate"] = communicate_seconds(problem, tables)
    return found


def num_packs(dense: Sequence[TablePlan], strategy: str) -> int:
    """Number of packs of dense tables, each looked up and updated separately: one for each place of tails, where
    `tiers.place` makes several."""
    return len({table.tail for table in dense}) if STRATEGY_KINDS[strategy].keeps_tail else min(1, len(dense))


def transfer_seconds(problem: Problem, tables: Sequence[TablePlan], loads: Mapping[str, Load]) -> dict[str, float]:
    """Seconds to find, fetch and write back the rows of a step that are not hot.

    Rows of files in the page cache cost as much as host rows, plus the faults of pages that are not mapped.
    """
    tiered = [loads[table.name] for table in tables if table.tiered]
    from_disk, from_cache = (sum(getattr(load, n) for load in tiered) for n in ("from_disk", "from_cache"))
    from_host = sum(load.fetched for load in tiered) - from_disk - from_cache
    found = {"find": find_seconds(problem, tables, loads), "fetch": 0.0, "write_back": 0.0}
    mapped = "host" if problem.hardware.captured is None else COPIED
    for tier, rows in (("host", from_host), (mapped, from_cache), ("disk", from_disk)):
        if rows > 1e-9:
            found["fetch"] += problem.fetch_seconds(rows, tier)
            found["write_back"] += problem.write_back_seconds(rows, tier)
    if from_cache > 1e-9:
        reads, writes = page_faults(problem, tables, loads)
        found["fetch"] += reads * problem.fault_seconds("read")
        found["write_back"] += writes * problem.fault_seconds("write")
    return found


def find_seconds(problem: Problem, tables: Sequence[TablePlan], loads: Mapping[str, Load]) -> float:
    """Seconds to find the rows to fetch in every pack that has any: one pack for each place of tails."""
    total = 0.0
    for tail in dict.fromkeys(table.tail for table in tables if table.tiered):
        of_pack = [loads[table.name] for table in tables if table.tiered and table.tail == tail]
        lookups, fetched = (sum(getattr(load, what) for load in of_pack) for what in ("lookups", "fetched_lookups"))
        by_kernel = tail == "host" and problem.kernel_tier is not None
        if problem.hardware.captured is not None and not by_kernel:  # the host of a GPU finds the rows that it copies
            total += problem.hardware.captured.copied.per_lookup * lookups
        else:
            total += problem.hardware.find.seconds(lookups, fetched)
    return total


def launch_seconds(problem: Problem, tables: Sequence[TablePlan], strategy: str, numbers: float) -> float:
    """Host seconds to launch a step of a GPU whose batch has `numbers` numbers; 0 on a CPU."""
    known = problem.hardware.captured
    if known is None:
        return 0.0
    kind = STRATEGY_KINDS[strategy]
    if kind.looks_up_on_host:
        return known.launch_layers.seconds(len(problem.work.layers))
    moves = kind.keeps_tail and problem.kernel_tier is not None
    by_kernel = moves and any(table.tail == "host" for table in tables)
    return (known.launch_far if by_kernel else known.launch_step).seconds(numbers)


def page_faults(problem: Problem, tables: Sequence[TablePlan], loads: Mapping[str, Load]) -> tuple[float, float]:
    """Read faults and write faults of a step on pages of files.

    A page stays mapped, for all its rows, until the pack unmaps its pages, which it does when they exceed
    `RESIDENT_BYTES`. On a read fault the system maps the pages around it that are in the page cache; on the first write
    to each page it faults once more, to mark the page dirty.
    """
    on_disk = [table for table in tables if table.tail == "disk"]
    num_rows = sum(table.num_rows for table in on_disk)
    fetched = sum(loads[table.name].fetched for table in on_disk)
    if fetched <= 0:
        return 0.0, 0.0
    steps = max(1.0, RESIDENT_BYTES / mmap.PAGESIZE / (2 * fetched))  # between two times of unmapping
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
    problem: Problem, table: TablePlan, on_host: bool = False, *, shares_launch: bool = False
) -> tuple[float, float]:
    """Seconds of lookup and update of a compressed table; of one in bands, of all bands with one fixed cost.

    `shares_launch`: without the fixed cost, which another table of the kind has, as they share kernels on a GPU.
    """
    known, size = problem.lookups[table.name], problem.batch_size
    whole = Band(table.name, 0, table.num_rows, table.method)
    bands = table.method.bands_of(table.num_rows) if isinstance(table.method, BandedMethod) else [whole]
    totals = [0.0, 0.0]
    for band in bands:
        is_last = band.end == table.num_rows
        share = (1.0 if is_last else known.share(band.end)) - (known.share(band.start) if band.start else 0.0)
        distinct = known.distinct(size, band.start, band.end)
        method = band.method
        if isinstance(method, Shared):  # a dense table of few rows
            distinct, method = min(distinct, float(method.rows)), Dense()
        num_rows = band.end - band.start
        costs = problem.table_costs(method, host=on_host and isinstance(method, Dense), num_rows=num_rows)
        chain = chain_of(method, num_rows, problem.dim)
        if chain is not None:
            distinct = chain.products(known.distinct_blocks(size, chain.block, band.start), distinct)
        for place, cost in enumerate(costs):
            totals[place] += cost.seconds(share * problem.batch_lookups(table.name), distinct)
            if shares_launch or not is_last:
                totals[place] -= cost.base
    return totals[0], totals[1]


def compressed_row_seconds(problem: Problem, name: str, method: Method) -> float:
    """Seconds by which a looked-up row of a compressed table costs more than a dense row, or 0."""
    known = problem.lookups[name]
    distinct = known.distinct(problem.batch_size)
    each = problem.batch_lookups(name) / distinct if distinct else 1.0
    chain = chain_of(method, problem.tables[name], problem.dim)
    made, stored = problem.table_costs(method), problem.table_costs(Dense())
    seconds = sum(cost.per_lookup * each + cost.per_row * (1.0 if chain is None else chain.row) for cost in made)
    return max(0.0, seconds - sum(cost.per_lookup * each + cost.per_row for cost in stored))


def dense_seconds(problem: Problem) -> float:
    """Seconds of the layers and the interaction, forward and backward."""
    size, hardware = problem.batch_size, problem.hardware
    layers = [one for one in hardware.layers if one.precision == problem.precision] or hardware.layers
    interactions = [one for one in hardware.interactions if one.precision == problem.precision]
    total = 4 * hardware.call  # the loss and its gradient
    for layer in problem.work.layers:
        total += layer_seconds(layers, layer.inputs, layer.outputs, size * layer.per_sample)
    if problem.work.pair_dim:
        total += layer_seconds(layers, problem.work.pair_dim, size, size)
    if problem.work.interaction is not None:
        vectors, dim, times = problem.work.interaction
        total += interaction_seconds(interactions or hardware.interactions, vectors, dim, size * times)
    return total


def communicate_seconds(problem: Problem, tables: Sequence[TablePlan]) -> float:
    """Seconds of the exchange of a two-fold step: hot rows on every process, the others sharded, and the dense part."""
    collectives = problem.hardware.collectives
    if collectives is None:
        raise ConfigError(
            f"the hardware file has no rates of collectives, which a world size of "
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
    """Bytes of the gradients that are all-reduced whole: of the dense part and of compressed tables (an upper bound for
    those that update by row)."""
    compressed = [table for table in tables if not isinstance(table.method, Dense)]
    return problem.work.parameter_bytes + sum(t.method.num_bytes(t.num_rows, problem.dim) for t in compressed)


def step_seconds(problem: Problem, stages: Mapping[str, float], strategy: str, *, copied: bool = False) -> float:
    """Seconds of a step with overlap: batches are read ahead, and with prefetching rows are fetched ahead.

    `copied`: on a GPU, the host copies some fetched rows, so its threads find, fetch and write back.
    """
    compute = stages["lookup"] + stages["dense"] + stages["update"] + stages["communicate"]
    transfer = stages["find"] + stages["fetch"] + stages["write_back"]
    if problem.hardware.captured is not None:
        return _gpu_step_seconds(problem, stages, strategy, compute, transfer, copied)
    overlap = problem.hardware.overlap

    def overlapped(one: float, other: float) -> float:
        return max(one, other) + (1 - overlap) * min(one, other)

    if problem.prefetch > 0:
        return overlapped(compute, transfer + stages["read"])
    return overlapped(compute + transfer, stages["read"])


def _gpu_step_seconds(
    problem: Problem, stages: Mapping[str, float], strategy: str, compute: float, transfer: float, copied: bool
) -> float:
    """Seconds of the slowest of what runs concurrently on a GPU: the host, the computation, fetches and write-backs."""
    launch = stages["launch"]
    kind = STRATEGY_KINDS[strategy]
    if kind.looks_up_on_host:  # the host looks up, waits and updates; layers are launched while they run
        return compute - stages["dense"] + max(stages["dense"], launch) + transfer
    if not kind.has_hot_rows:
        return max(compute, launch)
    if problem.prefetch == 0 or not kind.keeps_tail:
        return compute + transfer + launch
    if copied:
        return max(compute, launch + transfer)
    return max(compute + stages["find"], stages["fetch"], stages["write_back"], launch)
