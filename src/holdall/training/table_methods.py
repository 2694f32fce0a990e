"""Methods of the tables of a run: chosen once, when it starts, and kept in its `run.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdall.common.errors import ConfigError, DataError
from holdall.data.dataset import DataSet
from holdall.distributed.processes import Processes
from holdall.embedding.bags import EmbeddingBags, module_name
from holdall.planning.inputs import table_usage
from holdall.planning.table_settings import TableUsage
from holdall.tables import Dense, Method, method_from_json
from holdall.tables.describe import describe_method
from holdall.training.config import TrainConfig
from holdall.training.tracking import RUN_FILE, RunRecord, read_run

LISTED_TABLES = 4
"""Tables that are listed when a run starts, largest first."""

Methods = Mapping[str, Method]


def choose_methods(
    config: TrainConfig, data: DataSet, run: Path, *, resume: bool, processes: Processes
) -> Methods | None:
    """Method of each table of a run, by table; None when all are dense in float32. The same on all ranks.

    A budget is divided by the counts of the data folder. A run to resume keeps its methods.
    """
    if config.placement.plan is not None:
        return config.table_methods(data.schema)

    def choose() -> dict[str, Any] | None:
        if resume and (run / RUN_FILE).exists():
            stored = stored_methods(run, read_run(run))
            methods = config.table_methods(data.schema) if stored is None else stored
        else:
            methods = config.table_methods(data.schema, _usage(config, data, processes))
        return methods_to_json(methods)

    document = processes.on_rank_zero(choose)
    return None if document is None else {name: method_from_json(method) for name, method in document.items()}


def _usage(config: TrainConfig, data: DataSet, processes: Processes) -> TableUsage | None:
    if not config.tables.uses_counts:
        return None
    return table_usage(
        data,
        config.model.model_config(),
        config.optimizer_config().kind,
        codes_train=processes.world_size == 1,
    )


def methods_to_json(methods: Methods | None) -> dict[str, Any] | None:
    return None if methods is None else {name: method.to_json() for name, method in methods.items()}


def stored_methods(run: Path, document: RunRecord) -> Methods | None:
    """The methods that `run.json` has; None if it has none: its settings, or its plan, then give them."""
    tables = document.get("tables")
    if tables is None:
        return None
    try:
        return {name: method_from_json(method) for name, method in tables.items()}
    except ConfigError as error:
        raise DataError(f"{run / RUN_FILE} has a table by no known method ({error}): restore it from a copy") from error


def table_sizes(bags: EmbeddingBags, methods: Methods | None, processes: Processes) -> dict[str, dict[str, Any]]:
    """Rows, words for the method, and bytes of each table, stored and dense in float32. A collective call."""
    names = list(dict.fromkeys(bags.features.values()))
    own = _own_table_sizes(bags, [name for name in names if module_name(name) in bags.tables], methods)
    everywhere = {name: size for sizes in processes.gather(own) for name, size in sizes.items()}
    return {name: everywhere[name] for name in names if name in everywhere}


def _own_table_sizes(bags: EmbeddingBags, names: list[str], methods: Methods | None) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        table = bags.table(name)
        found[name] = {
            "rows": table.num_rows,
            "stored_as": describe_method((methods or {}).get(name, Dense()), table.num_rows),
            "bytes": sum(tensor.nbytes for tensor in (*table.parameters(), *table.buffers())),
            "dense_bytes": 4 * table.num_rows * table.dim,
        }
    return found


def describe_tables(methods: Methods | None, num_rows: Mapping[str, int]) -> str | None:
    """The methods of the largest tables that are not dense, in one line; None when all are dense."""
    found = {name: method for name, method in (methods or {}).items() if method != Dense()}
    largest = sorted(found, key=lambda name: -num_rows[name])
    lines = [f"{name} in {describe_method(found[name], num_rows[name])}" for name in largest[:LISTED_TABLES]]
    more = [f"{len(largest) - LISTED_TABLES} more"] if len(largest) > LISTED_TABLES else []
    return f"tables: {'; '.join([*lines, *more])}" if lines else None
