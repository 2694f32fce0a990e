"""Presets: published systems as functions that place the tables of a problem.

| preset | after | tables |
| --- | --- | --- |
| `device` | | all of them, dense, on the device |
| `dlrm` | DLRM's hybrid mode | on the host and looked up there; the MLPs on the device |
| `tt-rec` | TT-Rec (arXiv:2101.11714) | the five largest as tensor trains of rank 32, all on the device |
| `el-rec` | EL-Rec (SC 2022) | those five the same way; of the others, hot rows on the device, the rest on the host |
| `fpd` | the FPD layer | the five largest as Frobenius (8, 4), all on the device |
| `fae` | FAE (arXiv:2103.00686) | hot rows on the device, the rest on the host, and batches that need no others |
| `p2res` | P2RES | hot rows on every device, as many as shorten the exchange; the rest sharded over all hosts |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdall.common.errors import ConfigError, did_you_mean
from holdall.planning.plan import PlannedStrategy, TablePlan, Tail
from holdall.planning.step_cost import Problem
from holdall.planning.two_fold_cut import choose_cut
from holdall.tables import Dense, Frobenius, Method, TensorTrain

NUM_COMPRESSED = 5
"""Number of tables that tt-rec, el-rec and fpd compress: the papers' choice for Criteo."""


@dataclass(frozen=True)
class Choice:
    """Strategy and places of all tables, not yet predicted."""

    strategy: PlannedStrategy
    tables: tuple[TablePlan, ...]


HotRowsFunction = Callable[[Mapping[str, Method], PlannedStrategy, Tail], dict[str, int]]
"""Function from compressed tables, strategy and place of the tails to hot rows by table, as many as fit the device."""


def device(problem: Problem, hot_rows: HotRowsFunction) -> Choice:
    return Choice("plain", _place(problem, {}, {}, "device"))


def dlrm(problem: Problem, hot_rows: HotRowsFunction) -> Choice:
    return Choice("host", _place(problem, {}, dict.fromkeys(problem.tables, 0), "host"))


def tt_rec(problem: Problem, hot_rows: HotRowsFunction) -> Choice:
    return Choice("plain", _place(problem, _largest_as(problem, TensorTrain(rank=32)), {}, "device"))


def fpd(problem: Problem, hot_rows: HotRowsFunction) -> Choice:
    return Choice("plain", _place(problem, _largest_as(problem, Frobenius(rank=8, terms=4)), {}, "device"))


def el_rec(problem: Problem, hot_rows: HotRowsFunction) -> Choice:
    compressed = _largest_as(problem, TensorTrain(rank=32))
    tables = _place(problem, compressed, hot_rows(compressed, "split", "host"), "host")
    return Choice("split" if any(table.tiered for table in tables) else "plain", tables)


def fae(problem: Problem, hot_rows: HotRowsFunction) -> Choice:
    return Choice("hot-batches", _place(problem, {}, hot_rows({}, "hot-batches", "host"), "host"))


def p2res(problem: Problem, hot_rows: HotRowsFunction) -> Choice:
    if problem.world_size < 2:
        raise ConfigError("preset 'p2res' shards tables over processes: give --world-size 2 or more, or choose another")
    row = problem.stored_row_bytes
    cut = choose_cut(
        problem.lookups,
        row_bytes=problem.row_bytes,
        batch_size=problem.batch_size,
        world_size=problem.world_size,
        links=problem.hardware.collectives,
        budget=row * sum(hot_rows({}, "two-fold", "sharded").values()),
        stored_bytes=row,
        row_seconds=problem.row_seconds("host"),
        lookup_seconds=problem.hardware.find.per_row,
    )
    return Choice("two-fold", _place(problem, {}, cut.hot_rows, "sharded"))


PRESETS: dict[str, Callable[[Problem, HotRowsFunction], Choice]] = {
    "device": device,
    "dlrm": dlrm,
    "tt-rec": tt_rec,
    "el-rec": el_rec,
    "fpd": fpd,
    "fae": fae,
    "p2res": p2res,
}


def find_preset(name: str) -> Callable[[Problem, HotRowsFunction], Choice]:
    if name not in PRESETS:
        raise ConfigError(f"no preset named '{name}'{did_you_mean(name, ['auto', *PRESETS])}")
    return PRESETS[name]


def _largest_as(problem: Problem, method: Method) -> dict[str, Method]:
    """The largest tables, each with the method, where that makes them smaller."""
    largest = sorted(problem.tables, key=lambda name: -problem.tables[name])[:NUM_COMPRESSED]
    return {
        name: method
        for name in largest
        if method.num_bytes(problem.tables[name], problem.dim) < Dense().num_bytes(problem.tables[name], problem.dim)
    }


def _place(
    problem: Problem, compressed: Mapping[str, Method], hot: Mapping[str, int], tail: Tail
) -> tuple[TablePlan, ...]:
    """Compressed tables, and dense tables with their hot rows on the device and the tail at `tail`."""
    placed = []
    for name, rows in problem.tables.items():
        if name in compressed:
            placed.append(TablePlan(name=name, num_rows=rows, method=compressed[name], hot_rows=0, tail="compressed"))
            continue
        hot_rows = min(hot.get(name, rows), rows)
        placed.append(
            TablePlan(
                name=name, num_rows=rows, method=Dense(), hot_rows=hot_rows, tail="device" if hot_rows == rows else tail
            )
        )
    return tuple(placed)
