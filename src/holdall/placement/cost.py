"""What a step would cost: seconds by stage, from distinct rows a batch, bytes of a row and measured rates.

Stages run one after the other unless something overlaps them: then the longer one hides the part `hardware.overlap` of
the shorter one. Nothing here is fitted to a plan; every number comes from `Hardware` and from the counts of lookups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdall.errors import ConfigError
from holdall.placement.hardware import Cost, Hardware, Interaction, Layer, Line, TableCost, by_size, interpolate
from holdall.placement.lookups import Lookups
from holdall.placement.plan import STAGES, TablePlan
from holdall.placement.work import DenseWork
from holdall.tables import Dense, Frobenius, HotCold, Method, TensorRing, TensorTrain, method_from_json
from holdall.training.optimizers import OptimizerConfig, state_bytes_per_row


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
        return state_bytes_per_row(OptimizerConfig(name=self.optimizer), self.dim)  # type: ignore[arg-type]

    @property
    def moved_bytes(self) -> tuple[int, ...]:
        """Bytes of each tensor's row that moves with a row: its weights, and each kind of optimizer state."""
        state = {"sgd": (), "adagrad": (4 * self.dim,), "rowwise_adagrad": (4,), "adam": (4 * self.dim,) * 2}
        return (self.row_bytes, *state[self.optimizer])

    def batch_lookups(self, name: str) -> float:
        return self.lookups[name].per_sample * self.batch_size

    # --- tables ------------------------------------------------------------------------------------------------------

    def table_costs(self, method: Method, *, host: bool = False) -> tuple[Cost, Cost]:
        """Lookup, and backward with update, of a table of this method and the problem's dim."""
        key = (str(method.to_json()), host)
        if key not in self._costs:
            known = self.hardware.host_tables if host else self.hardware.tables
            self._costs[key] = _table_costs(known, method, self.dim, self.optimizer)
        return self._costs[key]

    def row_seconds(self, tier: str) -> float:
        """What one far row costs a step when it has to be brought from a tier and sent back."""
        return self.fetch_seconds(1.0, tier, base=False) + self.send_back_seconds(1.0, tier, base=False)

    def fetch_seconds(self, rows: float, tier: str, *, base: bool = True) -> float:
        """Gathering rows and their state from a tier, and handing them to the device."""
        copy = self.hardware.copy.get("to_device_pinned", Line())  # a CPU gathers straight into the room
        return self._moved_seconds(self.hardware.gather[tier], copy, rows, base)

    def send_back_seconds(self, rows: float, tier: str, *, base: bool = True) -> float:
        copy = self.hardware.copy.get("to_host_pinned", Line())
        return self._moved_seconds(self.hardware.scatter[tier], copy, rows, base)

    def _moved_seconds(self, lines: Mapping[str, Line], copy: Line, rows: float, base: bool) -> float:
        total = 0.0
        for width in self.moved_bytes:
            line = _line_at(lines, width)
            total += rows * (line.each + copy.each * width) + (line.base + copy.base if base else 0.0)
        return total


def _line_at(lines: Mapping[str, Line], width: int) -> Line:
    """Between measured sizes of a row on a straight line, beyond the largest in proportion."""
    points = sorted((int(size), line) for size, line in lines.items())
    sizes = [size for size, _ in points]
    nearest = min(points, key=lambda point: abs(point[0] - width))[1]
    return Line(nearest.base, interpolate(sizes, [line.each for _, line in points], width))


def _table_costs(known: Sequence[TableCost], method: Method, dim: int, optimizer: str) -> tuple[Cost, Cost]:
    kind = "tensor_train" if isinstance(method, TensorRing) else method.name
    candidates = [cost for cost in known if cost.method["method"] == kind]
    if isinstance(method, Dense):
        candidates = [cost for cost in candidates if cost.optimizer == optimizer]
    elif not candidates:  # not among those that are measured: the dearest that have no chain of products
        candidates = [c for c in known if c.method["method"] in ("frobenius", "robe", "memcom", "mixed_dimension")]
    if not candidates:
        raise ConfigError(
            f"the hardware file has no rate for {method.name} tables with {optimizer}: measure again with "
            f"`holdall hardware`"
        )
    if isinstance(method, TensorTrain | TensorRing):  # counted in products, whatever its rank and dim

        def distance(cost: TableCost) -> float:
            return abs(math.log(cost.method["rank"] / method.rank)) + abs(math.log(cost.dim / dim))

        nearest = min(candidates, key=distance)
        return nearest.lookup, nearest.update
    settings = candidates[0].method
    factor = 1.0
    if isinstance(method, Frobenius):
        factor = _products(method, dim) / _products(method_from_json(settings), dim)
    candidates = [cost for cost in candidates if cost.method == settings]
    return (
        _at_dim(candidates, dim, lambda cost: cost.lookup).scaled(factor),
        _at_dim(candidates, dim, lambda cost: cost.update).scaled(factor),
    )


def _at_dim(costs: Sequence[TableCost], dim: int, which: Callable[[TableCost], Cost]) -> Cost:
    """Between measured dims on a straight line; beyond them, in proportion to the dim."""
    ordered = sorted(costs, key=lambda cost: cost.dim)
    if dim >= ordered[-1].dim:
        return which(ordered[-1]).scaled(dim / ordered[-1].dim)
    if dim <= ordered[0].dim:
        return which(ordered[0])
    above = next(place for place, cost in enumerate(ordered) if cost.dim >= dim)
    low, high = ordered[above - 1], ordered[above]
    return which(low).between(which(high), (dim - low.dim) / (high.dim - low.dim))


def _products(method: Method, dim: int) -> float:
    """Multiplications of a row, by which settings of the Frobenius method are compared."""
    return method.rank * (2 * method.terms + dim) if isinstance(method, Frobenius) else float(dim)


@dataclass(frozen=True)
class Chain:
    """Products of a tensor train: those of a prefix, which ids with the same leading digits share, and of a row."""

    block: int
    """Consecutive ids that share a prefix."""
    prefix: float
    row: float

    def products(self, prefixes: float, rows: float) -> float:
        return prefixes * self.prefix + rows * self.row


def chain_of(method: Method, num_rows: int, dim: int) -> Chain | None:
    """The chain of a tensor train or ring; None for other methods."""
    if not isinstance(method, TensorTrain | TensorRing):
        return None
    shapes = method.core_shapes(num_rows, dim)
    made, prefix = float(shapes[0][1] * shapes[0][2]), 0.0
    for _, rank, size, following in shapes[1:-1]:
        prefix += made * rank * size * following
        made *= size
    last = shapes[-1]
    return Chain(last[0], prefix, made * last[1] * last[2] * last[3])


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
        return Load(lookups, distinct, far_lookups, far)
    uncached = known.distinct(crowded, table.hot_rows + cached_rows)
    return Load(lookups, distinct, far_lookups, far, uncached, far - uncached)


def stage_seconds(
    problem: Problem, tables: Sequence[TablePlan], strategy: str, loads: Mapping[str, Load]
) -> dict[str, float]:
    """Seconds of every stage of a step, each on its own."""
    dense = [table for table in tables if isinstance(table.method, Dense)]
    on_host = strategy == "host"
    found = dict.fromkeys(STAGES, 0.0)
    numbers = sum(load.lookups for load in loads.values()) + problem.batch_size * (problem.num_dense + 1)
    found["read"] = problem.hardware.read.seconds(numbers)
    if problem.hardware.device != "cpu":
        found["read"] += problem.hardware.copy["to_device"].seconds(4 * numbers)
    if dense:
        lookup, update = problem.table_costs(Dense(), host=on_host)
        lookups, distinct = (sum(getattr(loads[t.name], what) for t in dense) for what in ("lookups", "distinct"))
        found["lookup"] += lookup.seconds(lookups, distinct)
        found["update"] += update.seconds(lookups, distinct)
    for table in tables:
        if not isinstance(table.method, Dense):
            for stage, seconds in zip(("lookup", "update"), compressed_seconds(problem, table, on_host), strict=True):
                found[stage] += seconds
    if 0 < len(dense) < len(tables):
        numbers = problem.dim * sum(load.lookups for load in loads.values())
        found["lookup"] += problem.hardware.stack["forward"].seconds(numbers)
        found["update"] += problem.hardware.stack["backward"].seconds(numbers)
    if on_host and problem.hardware.device != "cpu":
        size = 4 * problem.dim * sum(load.lookups for load in loads.values())
        found["fetch"] = problem.hardware.copy["to_device"].seconds(size)
        found["send_back"] = problem.hardware.copy["to_host"].seconds(size)
    elif strategy in ("split", "hot-batches", "two-fold"):
        found.update(far_seconds(problem, loads))
    found["dense"] = dense_seconds(problem)
    found["update"] += problem.hardware.dense_update[problem.optimizer].seconds(problem.work.num_parameters)
    if problem.world_size > 1:
        found["communicate"] = communicate_seconds(problem, tables, loads)
    return found


def far_seconds(problem: Problem, loads: Mapping[str, Load]) -> dict[str, float]:
    """Finding, fetching and sending back the rows of a step that are not hot."""
    lookups = sum(load.lookups for load in loads.values())
    far_lookups = sum(load.far_lookups for load in loads.values())
    from_disk, from_cache = (sum(getattr(load, n) for load in loads.values()) for n in ("from_disk", "from_cache"))
    from_host = sum(load.far for load in loads.values()) - from_disk - from_cache
    found = {"find": problem.hardware.find.seconds(lookups, far_lookups), "fetch": 0.0, "send_back": 0.0}
    for tier, rows in (("host", from_host), ("cached", from_cache), ("disk", from_disk)):
        if rows > 1e-9:
            found["fetch"] += problem.fetch_seconds(rows, tier)
            found["send_back"] += problem.send_back_seconds(rows, tier)
    return found


def compressed_seconds(problem: Problem, table: TablePlan, on_host: bool = False) -> tuple[float, float]:
    """Lookup and update of a table that is not dense; of a `HotCold` one, of both its parts."""
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
        costs = problem.table_costs(part, host=on_host and isinstance(part, Dense))
        chain = chain_of(part, table.num_rows - (hot if part is not method else 0), problem.dim)
        if chain is not None:
            distinct = chain.products(known.distinct_blocks(size, chain.block, hot), distinct)
        for place, cost in enumerate(costs):
            totals[place] += cost.seconds(of_part, distinct)
    return totals[0], totals[1]


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


def layer_seconds(layers: Sequence[Layer], inputs: int, outputs: int, samples: float) -> float:
    """A layer of any size; beyond the measured ones in proportion to its weights."""
    known = {(one.inputs, one.outputs): by_size(one.seconds, samples) for one in layers}
    return _on_grid(known, (inputs, outputs), (1.0, 1.0))


def interaction_seconds(interactions: Sequence[Interaction], vectors: int, dim: int, samples: float) -> float:
    """An interaction of any shape; beyond the measured ones in proportion to its products."""
    known = {(one.vectors, one.dim): by_size(one.seconds, samples) for one in interactions}
    return _on_grid(known, (vectors, dim), (2.0, 1.0))


def _on_grid(known: Mapping[tuple[int, int], float], at: tuple[int, int], growth: tuple[float, float]) -> float:
    """Seconds at a place of a measured grid, interpolated in the logarithms of both sides and of the seconds.

    Beyond the grid they grow with the given power of what is beyond.
    """
    corners: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    beyond = 1.0
    for axis, value in enumerate(at):
        ticks = sorted({place[axis] for place in known})
        inside = min(max(value, ticks[0]), ticks[-1])
        above = next(place for place, tick in enumerate(ticks) if tick >= inside)
        low, high = ticks[max(0, above - 1)], ticks[above]
        part = 1.0 if low == high else math.log(inside / low) / math.log(high / low)
        beyond *= max(1.0, value / ticks[-1]) ** growth[axis]
        corners = [
            ((*corner, tick), weight * share)
            for corner, weight in corners
            for tick, share in ((low, 1 - part), (high, part))
            if share > 0
        ]
    logs = [weight * math.log(max(known[corner], 1e-12)) for corner, weight in corners]  # type: ignore[index]
    return math.exp(sum(logs)) * beyond


def communicate_seconds(problem: Problem, tables: Sequence[TablePlan], loads: Mapping[str, Load]) -> float:
    """All-reduce of dense and hot gradients, all-to-all of far rows and their gradients."""
    collectives = problem.hardware.collectives
    if collectives is None:
        raise ConfigError(
            f"the hardware file has no rates of processes talking to each other, which a world size of "
            f"{problem.world_size} needs: measure with "
            f"`torchrun --nproc-per-node {problem.world_size} -m holdall hardware`"
        )
    everyone = problem.batch_size * problem.world_size
    hot = sum(problem.lookups[t.name].distinct(everyone, 0, t.hot_rows) for t in tables if isinstance(t.method, Dense))
    reduced = problem.work.parameter_bytes + hot * problem.row_bytes
    far = sum(load.far for load in loads.values()) * (problem.world_size - 1) / problem.world_size
    exchanged = far * problem.row_bytes
    return collectives.seconds("all_reduce", reduced) + 2 * collectives.seconds("all_to_all", exchanged)


def step_seconds(problem: Problem, stages: Mapping[str, float], strategy: str) -> float:
    """A step with what overlaps: batches are read ahead; far rows come during the lookup of hot ones, or earlier."""
    overlap = problem.hardware.overlap

    def together(one: float, other: float) -> float:
        return max(one, other) + (1 - overlap) * min(one, other)

    near = stages["lookup"] + stages["dense"] + stages["update"] + stages["communicate"]
    far = stages["find"] + stages["fetch"] + stages["send_back"]
    if problem.prefetch > 0:
        return together(near, far + stages["read"])
    if strategy in ("split", "hot-batches"):
        near += stages["find"] + stages["send_back"] - stages["lookup"] + together(stages["fetch"], stages["lookup"])
    else:
        near += far
    return together(near, stages["read"])
