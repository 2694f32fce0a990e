"""Encoder of raw rows of any form: columns and files through Arrow, a few rows of Python values without it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from holdall.common.errors import DataError
from holdall.data.batch import Batch, Ids
from holdall.data.columns import offsets_of
from holdall.data.encode import Encoder
from holdall.serving.encode_arrays import ArrayEncoder, Arrays
from holdall.serving.encode_values import ValueEncoder
from holdall.serving.hot_table import HotTable
from holdall.serving.id_lookup import IdLookup
from holdall.serving.raw_rows import RowFormat

MAX_USERS_PARTS = 16
"""Sets of columns of users whose encoders are kept."""


class EncodedBatch(Batch):
    """Batch whose ids are rows of their tables, as they come from id maps: they are not checked again."""


class RowEncoder:
    """Encoder of the rows of one format; `num_unseen` counts lookups that became a feature's unseen row."""

    def __init__(
        self,
        form: RowFormat,
        lookups: Mapping[str, IdLookup],
        num_unseen: dict[str, int] | None = None,
        hot_table: HotTable | None = None,
    ):
        self.form, self.lookups = form, lookups
        self.hot_table = hot_table or HotTable(lookups.values())
        self.columns = Encoder(form.schema, max_value_bytes=form.max_value_bytes, maps=lookups)
        self.num_unseen = self.columns.num_unseen if num_unseen is None else num_unseen
        self.columns.num_unseen = self.num_unseen
        self.values = ValueEncoder(form, lookups, self.num_unseen, self.hot_table)
        self.arrays = ArrayEncoder(form, lookups, self.values, self.hot_table)
        self.fast = True
        """Whether rows of Python values may be encoded without Arrow."""
        self._parts: dict[frozenset[str], tuple[RowEncoder, RowEncoder]] = {}

    def encode(self, rows: Any) -> EncodedBatch:
        """Rows in any of the forms of `RowFormat.table`."""
        if self.fast and type(rows) in (list, dict):
            plain = self.values.encode(rows)
            if plain is not None:
                return _encoded(plain)
        return _encoded(self.columns.encode(self.form.table(rows)))

    def encode_arrays(self, columns: Arrays) -> EncodedBatch | None:
        """Arrow columns, to the ids that their Python values have in `encode`; None if that has to read them."""
        plain = self.arrays.encode(columns) if self.fast else None
        return None if plain is None else _encoded(plain)

    def blocks(self, path: str | Path) -> Iterator[EncodedBatch]:
        """The rows of a file, a block at a time."""
        return (_encoded(self.columns.encode(block)) for block in self.form.blocks(path))

    def only(self, names: Collection[str]) -> RowEncoder:
        """Encoder of rows with these columns alone; other features are id 0 or empty."""
        lookups = {name: lookup for name, lookup in self.lookups.items() if name in names}
        made = RowEncoder(self.form.only(names), lookups, self.num_unseen, self.hot_table)
        made.fast = self.fast
        return made

    def encode_items(self, user: Mapping[str, Any], items: Any) -> EncodedBatch:
        """Rows that have the values of `user`, which are encoded once, and those of one item each.

        If the user has all dense columns, `dense` is one row, expanded.
        """
        names = frozenset(user).intersection(self.form.names)
        if names not in self._parts:
            if len(self._parts) >= MAX_USERS_PARTS:
                self._parts.clear()
            rest = [name for name in self.form.names if name not in names]
            if not rest:
                raise DataError("the user has every column: give those that differ by item in the items")
            self._parts[names] = self.only(names), self.only(rest)
        of_user, of_items = self._parts[names]
        try:
            if any(feature.cross for feature in self.form.schema.features):  # which may have values of both
                return self._with_crosses(of_user.form.table([dict(user)]), of_items.form.table(items))
            one = of_user.encode([dict(user)])
        except DataError as error:
            raise DataError(f"the user's values: {error}") from None
        return self._joined(one, of_items.encode(items), names)

    def _with_crosses(self, user: pa.Table, items: pa.Table) -> EncodedBatch:
        """Rows of a user's columns, one row, and those of the items, joined before they are encoded."""
        first = pa.array(np.zeros(items.num_rows, dtype=np.int64))
        for name in user.column_names:
            items = items.append_column(name, user[name].take(first))
        return _encoded(self.columns.encode(items))

    def _joined(self, user: Batch, items: Batch, names: frozenset[str]) -> EncodedBatch:
        count, schema = len(items), self.form.schema
        own = [column.name in names for column in schema.dense]
        if all(own):
            dense = user.dense.expand(count, -1)
        else:
            dense = torch.empty(count, len(own))
            dense[:, torch.tensor(own)] = user.dense
            dense[:, ~torch.tensor(own)] = items.dense
        parts: list[tuple[Any, Any]] = []
        for position, feature in enumerate(schema.features):
            batch = user if feature.name in names else items
            values, offsets, _ = batch.ids.bag(position)
            lengths = np.ones(len(batch), dtype=np.int64) if offsets is None else offsets.diff().numpy()
            found = values.numpy()
            parts.append((np.tile(found, count), np.tile(lengths, count)) if batch is user else (found, lengths))
        values = torch.from_numpy(np.concatenate([found for found, _ in parts]))
        if items.ids.offsets is None:
            ids = Ids(values.view(len(parts), count), None, len(parts))
        else:
            offsets = torch.from_numpy(offsets_of(np.concatenate([lengths for _, lengths in parts])))
            ids = Ids(values, offsets, len(parts))
        return EncodedBatch(dense, ids, torch.zeros(count))


def _encoded(batch: Batch) -> EncodedBatch:
    return EncodedBatch(batch.dense, batch.ids, batch.label)
