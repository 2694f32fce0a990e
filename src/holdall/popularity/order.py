"""Community order of the tail: ids that occur together become neighbours (the local order of EL-Rec).

    order("data", "data-ordered")

Neighbouring ids share the leading digits of a tensor train, so a batch of neighbouring ids needs fewer prefix products
(`kernels/tensor_train.py`). The most popular ids keep their rank; of the others, those that occur together
(`cooccurrence.py`) form communities (`communities.py`), which come one after the other: the one with the most lookups
first, the most frequent id first within each, and at the end the ids that are in none, by frequency.

Only ids change: each row has the same values under other ids, and the bijection is stored in the folder.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import ConfigError, DataError
from holdall.common.files import sha256
from holdall.common.output_folder import output_folder
from holdall.data.dataset import DataSet
from holdall.data.id_map import IdMap, id_dtype, load_id_map
from holdall.data.passes import Progress
from holdall.data.prepare import progress_bar
from holdall.data.schema import DATA_SET, SCHEMA_FILE, Schema
from holdall.popularity import communities
from holdall.popularity.bijection import Bijection, load_orders
from holdall.popularity.communities import Communities, find_communities
from holdall.popularity.cooccurrence import count_pairs, features_of, tables_of
from holdall.popularity.order_config import OrderConfig as OrderConfig
from holdall.popularity.renumber import RenumberedFolder

Array = npt.NDArray[Any]

DEFAULTS = OrderConfig()


def order(
    data: str | Path,
    out: str | Path,
    config: OrderConfig = DEFAULTS,
    *,
    like: str | Path | None = None,
    progress: Progress | None = None,
) -> Schema:
    """Write the data set `data` to the folder `out` with the tails of its tables in community order.

    `like` is a folder that was ordered before: its order is used again, and must be of the same ids. The time grows
    with the lookups of tail ids (`partners` pairs each) and with the edges of the graph; memory is bounded
    by `config.memory`.
    """
    data, out = Path(data), Path(out)
    refuse_ordered(data)
    if like is None:
        communities.import_igraph()
    inputs = [data, *([] if like is None else [Path(like)])]
    with (
        progress_bar(progress) as report,
        output_folder(out, DATA_SET, overwrite=config.overwrite, inputs=inputs) as folder,
    ):
        if like is None:
            orders, record = find_orders(data, config, report)
        else:
            orders, record = load_orders(Path(like)), dict(Schema.load(Path(like)).order or {})
        record = {**record, "source": sha256(data / SCHEMA_FILE)}
        return RenumberedFolder(data, orders).write(folder, record, report)


def refuse_ordered(data: Path) -> None:
    """Refuse a data set that was ordered already: a second order would lose the ranks that the first one kept."""
    if Schema.load(data).order is not None:
        raise DataError(
            f"{data} is in community order already: to order it in another way, order the folder it was made from"
        )


def find_orders(data: Path, config: OrderConfig, progress: Progress) -> tuple[dict[str, Bijection], dict[str, Any]]:
    """New order of every table that gets one, and its record for `schema.json`; one table at a time."""
    schema = Schema.load(data)
    tables = tables_of(schema)
    if "train" not in schema.splits:
        raise DataError(f"{data} has no training split, so ids that occur together cannot be found")
    rows = DataSet(data, "train")
    orders: dict[str, Bijection] = {}
    records: dict[str, dict[str, Any]] = {}
    left: dict[str, str] = {}
    for done, table in enumerate(tables, start=1):
        feature = features_of(schema, table)[0]
        if feature.num_rows < config.min_rows:
            left[table] = f"{feature.num_rows:,} rows, fewer than min_rows"
        else:
            found = order_table(rows, table, load_id_map(data, feature.name, schema), config)
            if isinstance(found, str):
                left[table] = found
            else:
                orders[table], records[table] = found
        progress("order", done, len(tables))
    if not orders:
        reasons = "; ".join(f"{table}: {reason}" for table, reason in list(left.items())[:3])
        raise ConfigError(
            f"no table of {data} has a tail to put in order ({reasons}): change min_rows, hot or window, or use the "
            f"data set as it is"
        )
    parameters = {name: value for name, value in asdict(config).items() if name != "overwrite"}
    return orders, {"parameters": parameters, "tables": records, "left": left}


def order_table(
    rows: DataSet, table: str, id_map: IdMap, config: OrderConfig
) -> tuple[Bijection, dict[str, Any]] | str:
    """New order of one table and its record, or the reason why it keeps the old one."""
    counts = id_map.counts
    if not counts.sum():
        return "no lookups in the training split"
    first = num_hot(counts, config)
    if id_map.num_rows - first < 2:
        return f"all {id_map.num_rows:,} ids are hot"
    edges = count_pairs(
        rows,
        table,
        first,
        window=config.window,
        partners=config.partners,
        max_edges=config.max_edges,
        seed=config.seed,
    )
    size = max(2, round(id_map.num_rows ** (1 / 3)))  # ids that share a prefix of a tensor train with three cores
    found = find_communities(edges, size=size, seed=config.seed)
    if not found.levels:
        return f"no communities among {id_map.num_rows - first:,} ids (modularity {found.modularity:.3f})"
    old = community_order(counts, first, found)
    taken = float(counts[found.ids].sum() / counts.sum())
    facts = {
        "rows": id_map.num_rows,
        "communities": found.num_groups,
        "modularity": found.modularity,
        "grouped_ids": len(found.ids),
        "grouped_lookups": taken,
        "edges": len(edges),
        "pairs": edges.num_pairs,
        "linked_below": edges.stop,
    }
    return Bijection(table, old.astype(id_dtype(len(old))), first, id_map.fingerprint()), facts


def num_hot(counts: Array, config: OrderConfig) -> int:
    """Number of ids that keep their rank."""
    if config.hot_by == "rows":
        return math.ceil(config.hot * len(counts))
    if config.hot == 0:
        return 0
    return int(np.searchsorted(np.cumsum(counts), config.hot * counts.sum())) + 1


def community_order(counts: Array, first: int, found: Communities) -> Array:
    """[num_rows] old ids in their new order. `counts` [num_rows] are not increasing."""
    places = [by_lookups(level, found.ids, counts) for level in reversed(found.levels)]
    grouped = found.ids[np.lexsort([found.ids, *places])]  # the last key counts most
    ungrouped = np.ones(len(counts), dtype=bool)
    ungrouped[:first] = False
    ungrouped[found.ids] = False
    return np.concatenate([np.arange(first), grouped, np.flatnonzero(ungrouped)])


def by_lookups(group: Array, ids: Array, counts: Array) -> Array:
    """[V] place of each id's group when groups are sorted by their lookups, the most first; ties by their first id."""
    total = np.bincount(group, weights=counts[ids])
    first = np.full(len(total), np.iinfo(np.int64).max)
    np.minimum.at(first, group, ids)
    place = np.empty(len(total), dtype=np.int64)
    place[np.lexsort((first, -total))] = np.arange(len(total))
    return place[group]


def show(schema: Schema) -> None:
    """Print a table of what `order` did."""
    from holdall.common.console import make_console
    from holdall.common.console import table as plain_table

    record = schema.order or {}
    shown = plain_table("table", "rows", "ordered from", "communities", "their lookups")
    for table in tables_of(schema):
        facts = record.get("tables", {}).get(table)
        if facts is None:
            kept = record.get("left", {}).get(table, "the order does not have it")
            shown.add_row(table, f"{features_of(schema, table)[0].num_rows:,}", "as it was", kept)
        else:
            numbers = (facts["rows"], facts["ordered_from"], facts["communities"])
            shown.add_row(table, *(f"{number:,}" for number in numbers), f"{facts['grouped_lookups']:.1%}")
    make_console().print(shown)
