"""Values that are withdrawn from a bundle: they score as unseen from then on, and nothing of them is left in it."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from holdall.common.checked_files import FileHash
from holdall.common.errors import DataError, did_you_mean
from holdall.data.id_map import id_map_path, load_id_map
from holdall.data.schema import Schema
from holdall.data.transforms import described, has_transform
from holdall.embedding.bags import module_name
from holdall.models import Model
from holdall.serving.bundle import Bundle
from holdall.serving.bundle_model import BAGS
from holdall.serving.changed_rows import OverwrittenRows, Rows
from holdall.serving.id_lookup import index_path, write_index
from holdall.serving.mapped_tensors import AnyTensor
from holdall.tables import Table
from holdall.tables.bands import BandsTable
from holdall.tables.codes import CodesTable
from holdall.tables.dense import DenseTable
from holdall.tables.fixed_grid import FixedGridTable
from holdall.tables.mixed_dimension import MixedDimensionTable
from holdall.tables.quantized import LearnedRoundingTable, QuantizedTable

COLUMNS = ["feature", "value"]
_STORED: dict[type[Table], tuple[str, ...]] = {
    DenseTable: ("weight",),
    FixedGridTable: ("codes",),
    QuantizedTable: ("codes", "grid"),
    LearnedRoundingTable: ("stored", "log_step"),
    CodesTable: ("codes",),
}
"""Tensors with a row for every id, of the tables that have some."""


@dataclass(frozen=True)
class Withdrawal:
    """Values to withdraw, as ids of a bundle."""

    ids: dict[str, Rows]
    """By table, ascending; without those that were withdrawn before."""
    num_unknown: int
    """Values that no id map has: there is nothing to withdraw."""


def read_values(path: Path) -> dict[str, list[str]]:
    """Values by feature, from a CSV file with the columns `feature` and `value`."""
    found: dict[str, list[str]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            if next(rows, None) != COLUMNS:
                raise DataError(f"{path} must begin with the line feature,value: add it")
            for row in rows:
                if len(row) != 2 or not row[1]:
                    raise DataError(
                        f"{path} line {rows.line_num} must be a feature and a value, not {row[:3]}: correct it"
                    )
                found.setdefault(row[0], []).append(row[1])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV with the columns feature and value ({error})") from error
    return found


def find_withdrawal(bundle: Bundle, values: Mapping[str, list[str]]) -> Withdrawal:
    """Ids of values of a bundle."""
    known = {feature.name for feature in bundle.model_config.reads(bundle.schema).features}
    for feature in values:
        if feature not in known:
            raise DataError(f"the model reads no feature '{feature}'{did_you_mean(feature, known)}")
        refuse_transformed(bundle.schema, feature)
    lookups = bundle.id_lookups()
    ids: dict[str, Rows] = {}
    num_unknown = 0
    for feature, texts in values.items():
        found = lookups[feature].apply(pa.array(texts, pa.large_string())).astype(np.int64)
        is_known = found != lookups[feature].unseen
        num_unknown += int((~is_known).sum())
        if is_known.any():
            ids = joined(ids, {bundle.schema.feature(feature).table or feature: found[is_known]})
    return Withdrawal(ids, num_unknown)


def refuse_transformed(schema: Schema, feature: str) -> None:
    """Raise if rows of a feature stand for more than one raw value, or others hold its values."""
    if has_transform(schema.feature(feature)):
        raise DataError(
            f"feature '{feature}' is a {described(schema.feature(feature))}, so no raw value has a row of its own: "
            f"remove the rows of that value from the data, and train again"
        )
    for other in schema.features:
        if any(part.name == feature for part in other.cross) and other.hash is None:
            raise DataError(
                f"values of '{feature}' are in the id map of the cross '{other.name}', too: remove the rows of that "
                f"value from the data, and train again"
            )


def joined(one: Mapping[str, Rows], other: Mapping[str, Rows]) -> dict[str, Rows]:
    """Ids by table of both."""
    none = np.empty(0, dtype=np.int64)
    return {table: np.union1d(one.get(table, none), other.get(table, none)) for table in {**one, **other}}


def all_withdrawn(bundle: Bundle) -> dict[str, Rows]:
    """Ids of a bundle, by table, whose values were withdrawn: those that its id maps leave out, and those of deltas."""
    found = {
        bundle.schema.feature(feature).table or feature: lookup.withdrawn
        for feature, lookup in bundle.id_lookups().items()
    }
    return {table: ids for table, ids in found.items() if len(ids)}


def write_id_maps(bundle: Bundle, folder: Path, withdrawn: Mapping[str, Rows]) -> dict[str, FileHash]:
    """Write the id maps of some tables, from the folder of a bundle, without the values of these ids.

    Returns the names and hashes of what was written: maps, and their indexes where the bundle has some.
    """
    schema = Schema.load(bundle.path)
    files = {}
    for table, feature in _map_files(schema).items():
        if table in withdrawn:
            path = id_map_path(folder, feature)
            path.parent.mkdir(exist_ok=True)
            id_map = load_id_map(bundle.path, feature, schema).without(withdrawn[table])
            id_map.save(path)
            written = [path]
            if index_path(path).relative_to(folder).as_posix() in bundle.record.files:
                write_index(index_path(path), id_map)
                written.append(index_path(path))
            files.update({file.relative_to(folder).as_posix(): FileHash.of(file) for file in written})
    return files


def _map_files(schema: Schema) -> dict[str, str]:
    """By table, the feature whose id map it has: the first."""
    found: dict[str, str] = {}
    for feature in schema.features:
        found.setdefault(feature.table or feature.name, feature.name)
    return found


def with_id_maps(schema: Schema, files: Mapping[str, FileHash]) -> Schema:
    """The schema of a bundle whose id maps are other files. Its `ids` stay: ids mean what they meant."""
    if schema.files is None:
        return schema
    return replace(schema, files={name: files.get(name, file) for name, file in schema.files.items()})


def overwrite_withdrawn(
    model: Model, tensors: dict[str, AnyTensor], withdrawn: Mapping[str, Rows], schema: Schema
) -> list[str]:
    """Put the content of the unseen row in the place of withdrawn rows, or zeros if it is in another band.

    Returns the tables that have no rows of their own, where ids share all numbers: nothing is overwritten there.
    """
    unseen = {feature.table or feature.name: feature.unseen for feature in schema.features}
    without_rows = []
    for name, ids in withdrawn.items():
        parts = list(_parts(model.bags.table(name), f"{BAGS}tables.{module_name(name)}.", 0))
        for part, prefix, start in parts:
            inside = ids[(ids >= start) & (ids < start + part.num_rows)] - start
            stored = next((names for kind, names in _STORED.items() if isinstance(part, kind)), ())
            if len(inside) and not stored:
                without_rows.append(name)
            source = unseen[name] - start
            for leaf in stored if len(inside) else ():
                tensor = tensors[f"{prefix}{leaf}"]
                tensors[f"{prefix}{leaf}"] = OverwrittenRows(
                    tensor, inside, source if 0 <= source < part.num_rows else None
                )
    return list(dict.fromkeys(without_rows))


def _parts(table: Table, prefix: str, start: int) -> Iterator[tuple[Table, str, int]]:
    """A table, its bands, or its narrow rows, each with the prefix of its tensors and its first row."""
    if isinstance(table, MixedDimensionTable):
        yield from _parts(table.narrow, f"{prefix}narrow.", start)
        return
    if not isinstance(table, BandsTable):
        yield table, prefix, start
        return
    for band, part in zip(table.bands, table.parts, strict=True):
        yield from _parts(part, f"{prefix}{band.name}.", start + band.start)
