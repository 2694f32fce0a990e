"""Attributes of items by id, for turning a row into the same row with another item.

`items.arrow` is stored beside the splits of an implicit data set (docs/formats.md). Row number = id of the item
feature; one column for each feature that depends on the item alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdall.common.errors import DataError
from holdall.data.arrow_files import read_batch, whole_numbers, write_batch
from holdall.data.batch import Batch
from holdall.data.columns import Columns, Ragged, offsets_of
from holdall.data.folder_files import check_other_file
from holdall.data.schema import Schema

Array = npt.NDArray[Any]
ITEMS_FILE = "items.arrow"
ITEM_KEY = b"holdall.item"
AGAIN = "prepare the data set again"


@dataclass(frozen=True)
class ItemTable:
    """The attributes of every item."""

    schema: Schema
    item: str
    """Name of the item feature."""
    attributes: Mapping[str, Array | Ragged]
    """By feature: [num_rows] ids, or a list of ids an item."""

    @classmethod
    def load(cls, folder: str | Path, schema: Schema) -> ItemTable:
        path = Path(folder) / ITEMS_FILE
        check_other_file(Path(folder), path, schema)
        try:
            batch = read_batch(path)
        except FileNotFoundError:
            raise DataError(
                f"{folder} has no {ITEMS_FILE}, so items cannot be exchanged: it is written for implicit data sets "
                f"(holdall prepare --format movielens, taobao or yelp)"
            ) from None
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read ({error}): prepare the data set again") from error
        item = (batch.schema.metadata or {}).get(ITEM_KEY, b"").decode("utf-8", "backslashreplace")
        known = [feature.name for feature in schema.features]
        if item not in known or item not in batch.schema.names or not set(batch.schema.names) <= set(known):
            raise DataError(
                f"{path} has the columns {batch.schema.names} for the item '{item}', which are not features of this "
                f"data set: prepare it again"
            )
        feature = schema.feature(item)
        if len(batch) != feature.num_rows:
            raise DataError(f"{path} has {len(batch)} items instead of {feature.num_rows}: prepare the data set again")
        attributes: dict[str, Array | Ragged] = {}
        for name in batch.schema.names:
            column, below = batch[name], schema.feature(name).num_rows
            if schema.feature(name).one_hot:
                attributes[name] = whole_numbers(column, name, path, below)
            elif not pa.types.is_list(column.type) or column.null_count:
                raise DataError(f"{path} has {column.type} in the place of lists of ids in column '{name}': {AGAIN}")
            else:
                values = whole_numbers(column.values, name, path, below)
                attributes[name] = Ragged(values, column.offsets.to_numpy())
        attributes.pop(item)
        return cls(schema, item, attributes)

    def save(self, folder: Path) -> None:
        columns: dict[str, pa.Array] = {self.item: pa.array(np.arange(self.schema.feature(self.item).num_rows))}
        for name, values in self.attributes.items():
            if isinstance(values, Ragged):
                offsets = pa.array(offsets_of(values.lengths).astype(np.int32))
                columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values.flat))
            else:
                columns[name] = pa.array(values)
        batch = pa.RecordBatch.from_pydict(columns).replace_schema_metadata({ITEM_KEY: self.item.encode()})
        write_batch(folder / ITEMS_FILE, batch)

    def candidates(self, columns: Columns, negatives: Array) -> Batch:
        """Each of R rows, followed by itself with each of its n other items [R, n] and label 0: R * (1 + n) rows."""
        num = negatives.shape[1]
        made = columns.take(np.repeat(np.arange(len(columns)), 1 + num))
        replaced = np.tile(np.arange(1 + num) > 0, len(columns))
        singles = [feature.name for feature in self.schema.features if feature.one_hot]
        lists = [feature.name for feature in self.schema.features if not feature.one_hot]
        ids, bags = made.ids, list(made.bags)
        items = ids[:, singles.index(self.item)]
        items[replaced] = negatives.ravel()
        for name, values in self.attributes.items():
            if isinstance(values, Ragged):
                bags[lists.index(name)] = choose(bags[lists.index(name)], values.take(items), replaced)
            else:
                place = singles.index(name)
                ids[:, place] = np.where(replaced, values[items], ids[:, place])
        label = np.where(replaced, 0, made.label).astype(np.uint8)
        one_hot = [feature.one_hot for feature in self.schema.features]
        return Columns(label=label, dense=made.dense, ids=ids, bags=tuple(bags)).batch(one_hot)


def choose(first: Ragged, second: Ragged, take_second: Array) -> Ragged:
    """Row by row the list of one or of the other."""
    both = Ragged.concatenate([first, second])
    return both.take(np.arange(len(first)) + np.where(take_second, len(first), 0))


def feature_columns(schema: Schema, names: Sequence[str]) -> list[int]:
    """Places of one-hot features among the columns of `Columns.ids`."""
    singles = [feature.name for feature in schema.features if feature.one_hot]
    for name in names:
        if not schema.feature(name).one_hot:
            raise DataError(f"feature '{name}' has several ids per row, where one is needed")
    return [singles.index(name) for name in names]
