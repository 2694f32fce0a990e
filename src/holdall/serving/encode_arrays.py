"""Encoder of Arrow columns of one value a row: ids from the bytes of their texts, without a Python object a value.

The values of all features become one array of texts, integers and booleans as Arrow writes them, and their words are
looked up in the table of hot values; only those that it does not have become Python texts. Ids, dense values and
numbers of unseen values are those that `ValueEncoder` gives for the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds

from holdall.common.errors import DataError
from holdall.data.batch import Batch
from holdall.data.id_map import id_dtype
from holdall.data.rows import FLOAT32_MAX
from holdall.data.transforms import has_transform
from holdall.serving.arrow_buffers import bounds_of, bytes_of, is_valid, numbers_of
from holdall.serving.encode_values import TABLE_FROM, ValueEncoder
from holdall.serving.hot_table import PADDING, HotTable, words_of
from holdall.serving.id_lookup import IdLookup
from holdall.serving.raw_rows import RowFormat

Arrays = Mapping[str, Sequence[pa.Array]]
"""Columns by name, each of one or more Arrow arrays, one after the other."""
Array = npt.NDArray[Any]


class ArrayEncoder:
    """Encoder of many rows of Arrow columns; the answer is None for rows that `ValueEncoder` has to read."""

    def __init__(
        self, form: RowFormat, lookups: Mapping[str, IdLookup], values: ValueEncoder, hot_table: HotTable
    ) -> None:
        self._dense = [column.name for column in form.schema.dense]
        self._num_features = len(form.schema.features)
        read = [(place, feature) for place, feature in enumerate(form.schema.features) if feature.name in lookups]
        self._places = [place for place, _ in read]
        self._names = [feature.name for _, feature in read]
        self._lookups = [lookups[name] for name in self._names]
        self._takes = bool(read) and form.schema.one_hot and not any(has_transform(feature) for _, feature in read)
        self._values, self._hot_table = values, hot_table
        self._max_bytes = form.max_value_bytes // 4
        self._dtype = id_dtype(max((lookup.num_rows for lookup in self._lookups), default=1))

    def encode(self, columns: Arrays) -> Batch | None:
        """A batch with labels 0; None for few values, transforms, bags, and what is not plainly right."""
        if not self._takes:
            return None
        num_rows = sum(map(len, columns[self._names[0]]))
        if num_rows * len(self._names) < TABLE_FROM:
            return None
        try:
            dense = self._numbers(columns, num_rows)
            ids = None if dense is None else self._ids(columns, num_rows)
        except (pa.ArrowException, DataError):
            return None
        return None if dense is None or ids is None else self._values.batch(dense, ids)

    def _numbers(self, columns: Arrays, num_rows: int) -> npt.NDArray[np.float32] | None:
        """[R, N] float32, transformed."""
        parts = [part for name in self._dense for part in columns[name]]
        if any(_is_text(part.type) for part in parts):
            return None
        if not parts:
            return self._values.transformed(np.empty((0, num_rows)))
        whole = _joined(parts, pa.float64())
        raw = numbers_of(whole)
        is_right = np.abs(raw) <= FLOAT32_MAX
        if whole.null_count:
            is_null = ~is_valid(whole)
            raw, is_right = np.where(is_null, np.nan, raw), is_right | is_null
        return self._values.transformed(raw.reshape(-1, num_rows)) if is_right.all() else None

    def _ids(self, columns: Arrays, num_rows: int) -> Array | None:
        """Ids [F, R]."""
        parts = [part for name in self._names for part in columns[name]]
        types = {part.type for part in parts}
        if any(kinds.is_floating(kind) for kind in types):
            return None
        kind = pa.large_string() if pa.large_string() in types else pa.string()
        texts = _joined(parts, kind)
        bounds = bounds_of(texts).astype(np.int64)
        sizes = np.diff(bounds)
        if texts.null_count:
            sizes[~is_valid(texts)] = 0
        data = np.append(bytes_of(texts)[bounds[0] : bounds[-1]], PADDING)
        words = words_of(data, bounds[:-1] - bounds[0], sizes)
        found = self._hot_table.find(words, self._lookups, [num_rows] * len(self._lookups))
        missed = np.flatnonzero(found < 0)
        if len(missed):
            if sizes[missed].max() > self._max_bytes:
                return None
            features = [self._places[place] for place in (missed // num_rows).tolist()]
            asked = [text or "" for text in texts.take(pa.array(missed)).to_pylist()]
            found[missed] = self._values.found(list(zip(features, asked, strict=True)))
        ids = np.zeros((self._num_features, num_rows), dtype=self._dtype)
        ids[self._places] = found.reshape(-1, num_rows)
        return ids


def _is_text(kind: pa.DataType) -> bool:
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_dictionary(kind))


def _joined(parts: list[pa.Array], kind: pa.DataType) -> pa.Array:
    """All parts, one after the other, as texts or floats of 64 bits; those of one type are converted at once."""
    first = parts[0].type
    if not kinds.is_dictionary(first) and all(part.type == first for part in parts):
        return _as(pa.concat_arrays(parts), kind)
    return pa.concat_arrays([_as(part, kind) for part in parts])


def _as(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """The values as texts or floats of 64 bits, rounded as Python rounds them."""
    if kinds.is_dictionary(values.type):
        values = values.dictionary_decode()
    return values if values.type == kind else values.cast(kind, safe=False)
