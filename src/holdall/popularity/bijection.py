"""A renumbering of a table's ids, and the file `order/<table>.arrow` that keeps it (docs/formats.md).

Row number = new id, value = old id. It belongs to one id map, whose fingerprint it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdall.common.errors import DataError
from holdall.common.files import sha256
from holdall.data.arrow_files import read_batch, write_batch
from holdall.data.id_map import IdMap, id_dtype
from holdall.data.schema import Schema

Array = npt.NDArray[Any]

ORDER_FOLDER = "order"
IDS_KEY, FIRST_KEY = b"holdall.ids", b"holdall.ordered_from"


@dataclass(frozen=True)
class Bijection:
    """New ids for the old ones of a table."""

    table: str
    old: Array
    """[num_rows] old id of each new id: every id once, and the first `first` ids unchanged."""
    first: int
    """First id that may have changed."""
    fingerprint: str
    """Fingerprint of the id map that the old ids belong to."""

    def __post_init__(self) -> None:
        self._check()

    @cached_property
    def new(self) -> Array:
        """[num_rows] the new id of each old one."""
        new = np.empty_like(self.old)
        new[self.old] = np.arange(len(self.old), dtype=self.old.dtype)
        return new

    def renumber(self, id_map: IdMap) -> IdMap:
        """The same values under their new ids."""
        return IdMap(id_map.values.take(pa.array(self.old)), id_map.counts[self.old], int(self.new[id_map.unseen]))

    def save(self, folder: Path) -> Path:
        path = order_path(folder, self.table)
        batch = pa.RecordBatch.from_pydict({"old": pa.array(self.old, type=id_type(len(self.old)))})
        metadata = {IDS_KEY: self.fingerprint, FIRST_KEY: str(self.first)}
        write_batch(path, batch.replace_schema_metadata(metadata))
        return path

    @classmethod
    def load(cls, path: Path, table: str) -> Bijection:
        try:
            batch = read_batch(path)
            metadata = batch.schema.metadata or {}
            column = batch["old"]
            first, fingerprint = int(metadata[FIRST_KEY]), metadata[IDS_KEY].decode()
        except FileNotFoundError:
            raise DataError(f"the order {path} is missing: order the data set again") from None
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read as an order of ids ({error}): order the data set again") from error
        if column.null_count or column.type not in (pa.int32(), pa.int64()):
            raise DataError(f"{path} has {column.type} with {column.null_count} nulls in place of ids: order it again")
        return cls(table, column.to_numpy(), first, fingerprint)

    def _check(self) -> None:
        """Refuse what is not one old id for every new one, naming the table and an id."""
        old, num_rows = self.old, len(self.old)
        cure = "order the data set again"
        wrong = np.flatnonzero((old < 0) | (old >= num_rows))
        if len(wrong):
            raise DataError(
                f"the order of '{self.table}' is not a bijection: new id {wrong[0]} has old id {old[wrong[0]]}, but "
                f"there are {num_rows} ids: {cure}"
            )
        times = np.bincount(old, minlength=num_rows)
        if (times != 1).any():
            twice, never = int(np.argmax(times)), int(np.argmin(times))
            places = np.flatnonzero(old == twice)
            raise DataError(
                f"the order of '{self.table}' is not a bijection: old id {twice} has the new ids {places[0]} and "
                f"{places[1]}, and old id {never} has none: {cure}"
            )
        moved = np.flatnonzero(old[: self.first] != np.arange(min(self.first, num_rows)))
        if len(moved):
            raise DataError(
                f"the order of '{self.table}' moves id {moved[0]}, but says that the first {self.first} ids keep their "
                f"place: {cure}"
            )


def id_type(num_rows: int) -> pa.DataType:
    return pa.from_numpy_dtype(id_dtype(num_rows))


def order_path(folder: Path, table: str) -> Path:
    return folder / ORDER_FOLDER / f"{quote(table, safe='')}.arrow"


def load_orders(folder: Path) -> dict[str, Bijection]:
    """The orders of all tables of an ordered data set, each checked against the hash in `schema.json`."""
    record = Schema.load(folder).order
    if record is None:
        raise DataError(f"{folder} has no order to use again: `holdall order` makes one")
    orders = {}
    for table, entry in record["tables"].items():
        path = order_path(folder, table)
        orders[table] = Bijection.load(path, table)
        if sha256(path) != entry["sha256"]:
            raise DataError(f"{path} was changed: its SHA-256 is not the one in schema.json; order the data set again")
    return orders
