"""Encoder of new raw rows as a Batch, for scoring them, with the id maps and transforms of a prepared data set.

Columns are named as in `schema.json`. Needs neither polars nor the raw files. `prepare` does
not use it: `data.passes` encodes the rows of a data set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdall.common.errors import DataError, did_you_mean
from holdall.data.batch import Batch
from holdall.data.columns import Columns, Ragged, offsets_of
from holdall.data.dense import transform
from holdall.data.id_map import as_text, id_dtype, is_nameable, is_whole_float, load_id_maps, whole_texts
from holdall.data.layout import MAX_VALUE_BYTES, Layout
from holdall.data.read_parquet import flat_table, is_number, is_utf8
from holdall.data.rows import BOOLEANS, FLOAT32_MAX, NO_WEIGHT, NOT_WHOLE, inputs_of, shown
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.data.stored_layout import stored_layout
from holdall.data.transforms import feature_texts, has_transform

LABEL_CURE = "correct it, or leave the column out"
Array = npt.NDArray[Any]
Table: TypeAlias = "pa.Table | Mapping[str, Sequence[Any]]"
"""Columns by name: numbers for dense columns, text for features, lists of text for bags and sequences."""


class Ids(Protocol):
    """Id map as an encoder needs it: an `IdMap`, or one whose values stay on disk."""

    @property
    def longest(self) -> int:
        """Bytes of the longest value."""

    def apply(self, values: pa.Array, *, distinct: bool = False) -> Array:
        """[R] ids of R texts, none of which occurs twice if they are `distinct`."""


class Encoder:
    """Id maps and transforms of one prepared data set, loaded once.

    Memory: about 40 bytes per row of the maps, once each has been used.
    """

    def __init__(
        self,
        folder: str | Path | Schema,
        *,
        max_value_bytes: int = MAX_VALUE_BYTES,
        maps: Mapping[str, Ids] | None = None,
    ):
        """Rows with a value of more than `max_value_bytes`, and longer than all values of its map, are refused.

        Features that are not in `maps` are not read: rows need not have them, and in a batch they are id 0, or empty.
        Without `maps` those of the folder are loaded; with them its schema is enough.
        """
        self.max_value_bytes = max_value_bytes
        self.schema = folder if isinstance(folder, Schema) else Schema.load(Path(folder))
        if maps is None:
            assert not isinstance(folder, Schema)
            maps = load_id_maps(folder)
        self.maps = maps
        stored = stored_layout(self.schema)
        self.positive = stored[1].positive if stored else None
        """Rule that makes labels of the raw label column."""
        features = stored[1].features if stored else ()
        of_crosses = [part.name for feature in features for part in feature.cross if part.integer]
        self.integers = frozenset([*of_crosses, *(feature.name for feature in features if feature.integer)])
        """Features whose values are whole numbers."""
        self.columns = raw_columns(stored[1]) if stored else {}
        """By name, the column of the raw data where it has another name."""
        self.separators = {f.name: f.separator for f in features if f.separator is not None}
        """By bag or sequence, what separates its values in a text."""
        self.num_unseen = dict.fromkeys(self.maps, 0)
        """Lookups so far that became a feature's unseen row."""

    def encode(self, table: Table, *, as_mapped: bool = False) -> Batch:
        """The rows of `table`. A missing value is null or ""; without the label column, labels are 0.

        With `as_mapped` features have the texts of their id maps, also those of transforms, in columns of their own.
        """
        table = flat_table(as_table(table))
        dense = np.empty((table.num_rows, self.schema.num_dense), dtype=np.float32)
        for index, column in enumerate(self.schema.dense):
            dense[:, index] = transform(numbers(self._find(table, column.name), column), column)
        singles, bags = [], []
        for feature in self.schema.features:
            if feature.name not in self.maps:
                zeros = np.zeros(table.num_rows, dtype=np.int32)
                if feature.one_hot:
                    singles.append(zeros)
                else:
                    bags.append(Ragged(zeros[:0], offsets_of(zeros)))
                continue
            plain = as_mapped or not has_transform(feature)
            if feature.one_hot and not plain:
                singles.append(self._mapped_ids(feature, self._transformed(table, feature)))
            elif feature.one_hot:
                singles.append(self._ids(feature, self._find(table, feature.name), np.arange(table.num_rows)))
            else:
                values = self._find(table, feature.name)
                texts, lengths = pieces(split_texts(values, self.separators.get(feature.name)), feature)
                rows = np.repeat(np.arange(table.num_rows), lengths)
                ids = self._ids(feature, texts, rows) if plain else self._raw_ids(feature, texts, rows)
                bags.append(Ragged(ids, offsets_of(lengths)))
        ids = np.stack(singles, axis=1) if singles else np.zeros((table.num_rows, 0), dtype=np.int32)
        weight = self.weights(table)
        weight = None if weight is None else weight.astype(np.float32)
        columns = Columns(label=self.labels(table), dense=dense, ids=ids, bags=tuple(bags), weight=weight)
        return columns.batch([feature.one_hot for feature in self.schema.features])

    def _find(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        """A column by its name, or by that of the raw data."""
        raw = self.columns.get(name, name)
        return find(table, raw if name not in table.column_names and raw in table.column_names else name)

    def ids(self, feature: str, values: pa.Array | pa.ChunkedArray) -> Array:
        """[n] ids of values [n] of one feature, whatever number of them a row has; of a cross, those of its id map."""
        found, rows = self.schema.feature(feature), np.arange(len(values))
        if has_transform(found) and not found.cross:
            return self._raw_ids(found, values, rows)
        return self._ids(found, values, rows)

    def _transformed(self, table: pa.Table, feature: Feature) -> pa.LargeStringArray:
        """[R] texts of a feature with one value a row, as its id map has them."""
        rows = np.arange(table.num_rows)

        def texts(name: str) -> pa.LargeStringArray:
            return self._texts(name, self._find(table, name), rows)

        return feature_texts(feature, lambda name: numbers(self._find(table, name), DenseColumn(name=name)), texts)

    def _mapped_ids(self, feature: Feature, texts: pa.LargeStringArray) -> Array:
        """[n] ids of texts [n] that a transform made."""
        ids = self.maps[feature.name].apply(texts)
        self.num_unseen[feature.name] += int(np.count_nonzero(ids == feature.unseen))
        return ids

    def _raw_ids(self, feature: Feature, values: pa.Array | pa.ChunkedArray, rows: Array) -> Array:
        """[n] ids of raw values [n], in these rows [n], of a feature with a transform that is no cross."""

        def found(_: str) -> Array:
            column = values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values])
            return numbers(column, DenseColumn(name=feature.name))

        return self._mapped_ids(feature, feature_texts(feature, found, lambda name: self._texts(name, values, rows)))

    def _ids(self, feature: Feature, values: pa.Array | pa.ChunkedArray, rows: Array) -> Array:
        """[L] ids of values [L], which belong to these rows [L]."""
        if pa.types.is_dictionary(values.type):
            chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
            ends = np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64)
            parts = zip(chunks, np.split(rows, ends)[:-1], strict=True)
            ids = np.concatenate([np.zeros(0, np.int32), *(self._coded_ids(feature, *part) for part in parts)])
        else:
            ids = self._text_ids(feature, values, rows)
        self.num_unseen[feature.name] += int(np.count_nonzero(ids == feature.unseen))
        return ids

    def _coded_ids(self, feature: Feature, values: pa.DictionaryArray, rows: Array) -> Array:
        """`_ids` of a dictionary array: each of its values that occurs is looked up once."""
        dictionary = values.dictionary
        if pa.types.is_string_view(dictionary.type):  # Arrow takes none of these
            dictionary = dictionary.cast(pa.large_string())
        indices = values.indices
        if indices.null_count:
            indices = indices.cast(pa.int64()).fill_null(len(dictionary))
        codes = np.asarray(indices)
        is_used = np.zeros(len(dictionary) + 1, dtype=bool)
        is_used[codes] = True
        used = np.flatnonzero(is_used)
        distinct = pa.concat_arrays([dictionary, pa.nulls(1, dictionary.type)]).take(pa.array(used))
        ids = np.zeros(len(is_used), dtype=id_dtype(feature.num_rows))
        try:
            ids[used] = self._text_ids(feature, distinct, used, distinct=True)
        except DataError:
            self._text_ids(feature, dictionary.take(values.indices), rows)  # names the row
            raise
        return ids[codes]

    def _text_ids(
        self, feature: Feature, values: pa.Array | pa.ChunkedArray, rows: Array, *, distinct: bool = False
    ) -> Array:
        id_map = self.maps[feature.name]
        return id_map.apply(self._texts(feature.name, values, rows, id_map), distinct=distinct)

    def _texts(
        self,
        name: str,
        values: pa.Array | pa.ChunkedArray,
        rows: Array,
        id_map: Ids | None = None,
    ) -> pa.LargeStringArray:
        """Checked texts [n] of raw values [n] in these rows [n]."""
        if is_whole_float(values.type) or (name in self.integers and is_text(values.type)):
            values, wrong = whole_texts(given := values)
            if len(wrong):
                value, row = given[int(wrong[0])].as_py(), rows[wrong[0]]
                raise DataError(f"feature '{name}' is {shown(value)} in row {row}, {NOT_WHOLE}")
        try:
            texts = as_text(values)
        except (pa.ArrowException, DataError) as error:
            raise DataError(f"feature '{name}' needs text, not {values.type} ({error})") from error
        if not is_utf8(texts):
            row = rows[_not_utf8(texts)]
            raise DataError(f"feature '{name}' is text that is not UTF-8 in row {row}: correct it")
        lengths = np.asarray(pc.binary_length(texts))
        if lengths.max(initial=0) > self.max_value_bytes:
            limit = max(self.max_value_bytes, id_map.longest if id_map is not None else 0)
            if len(long := np.flatnonzero(lengths > limit)):
                raise DataError(
                    f"feature '{name}' has a value of {lengths[long[0]]:,} bytes in row {rows[long[0]]}, but "
                    f"{limit:,} are the most: shorten it, or set max_value_bytes"
                )
        return texts

    def labels(self, table: pa.Table) -> Array:
        """[R] labels 0 and 1 of raw rows; 0 without the label column."""
        if self.schema.label not in table.column_names:
            return np.zeros(table.num_rows, dtype=np.uint8)
        given = table[self.schema.label]
        if self.positive is not None and self.positive.compares_text:
            texts = as_text(given).to_numpy(zero_copy_only=False)
            if len(missing := np.flatnonzero(texts == "")):
                raise DataError(f"the label '{self.schema.label}' is missing in row {missing[0]}: {LABEL_CURE}")
            return self.positive(texts).astype(np.uint8)
        if self.positive is None and is_text(given.type):
            texts = pa.array([str(BOOLEANS.get(text, text)) for text in given.to_pylist()])
            given = pa.chunked_array([texts])
        label = numbers(given, DenseColumn(name=self.schema.label))
        if self.positive is not None:
            if len(missing := np.flatnonzero(np.isnan(label))):
                raise DataError(f"the label '{self.schema.label}' is missing in row {missing[0]}: {LABEL_CURE}")
            return self.positive(label).astype(np.uint8)
        wrong = np.flatnonzero((label != 0) & (label != 1))
        if len(wrong):
            raise DataError(
                f"the label '{self.schema.label}' is {label[wrong[0]]} in row {wrong[0]} instead of 0 or 1: "
                f"{LABEL_CURE}"
            )
        return label.astype(np.uint8)

    def weights(self, table: pa.Table) -> Array | None:
        """[R] float64 weights of raw rows, over the mean of the training rows; None where they have none."""
        column = self.schema.weight
        if column is None or column.name not in table.column_names:
            return None
        found = numbers(table[column.name], DenseColumn(name=column.name))
        if len(wrong := np.flatnonzero(~(found >= 0))):
            raise DataError(f"the weight '{column.name}' is {found[wrong[0]]} in row {wrong[0]}, {NO_WEIGHT}")
        return found / column.mean


def encode_rows(folder: str | Path, table: Table, *, max_value_bytes: int = MAX_VALUE_BYTES) -> Batch:
    """Encode raw rows with the maps of a prepared data set; use an `Encoder` to do it more than once."""
    return Encoder(folder, max_value_bytes=max_value_bytes).encode(table)


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is text, or a dictionary of it."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def split_texts(values: pa.ChunkedArray, separator: str | None) -> pa.ChunkedArray:
    """Lists of the pieces of texts; empty pieces are missing values, which are left out later."""
    if separator is None or not is_text(values.type):
        return values
    kind = pa.large_list(pa.large_string())
    parts = [pc.split_pattern(as_text(chunk), separator).cast(kind) for chunk in values.chunks]
    return pa.chunked_array(parts, kind)


def raw_columns(layout: Layout) -> dict[str, str]:
    """Columns of the raw data by the names that they have in the schema."""
    found = {dense.name: dense.column for dense in layout.dense}
    return found | {feature.name: feature.column for feature in inputs_of(layout).values()}


def as_table(table: Table) -> pa.Table:
    if isinstance(table, pa.Table):
        return table
    try:
        return pa.table(dict(table))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"the rows are not columns of equal length and one type each ({error})") from error


def find(table: pa.Table, name: str) -> pa.ChunkedArray:
    if name not in table.column_names:
        raise DataError(f"the rows have no column '{name}'{did_you_mean(name, table.column_names)}")
    return table[name]


def numbers(values: pa.ChunkedArray, column: DenseColumn) -> Array:
    """[R] float64, NaN where missing; each value is the number that `prepare` reads."""
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not is_number(kind) and not pa.types.is_string_view(kind):
        raise DataError(f"column '{column.name}' is of type {values.type}: numbers are needed here")
    if pa.types.is_decimal(kind):
        values = values.cast(pa.large_string())  # rounded once: Arrow's own cast may be one step off
    if not pa.types.is_integer(kind) and not pa.types.is_floating(kind) and not pa.types.is_boolean(kind):
        values = values.cast(pa.large_string())
        values = pc.if_else(pc.equal(values, ""), None, values)
    try:
        found = values.cast(pa.float64(), safe=not pa.types.is_integer(kind))
    except pa.ArrowException as error:
        row, value = _no_number(values)
        raise DataError(f"column '{column.name}' is {shown(value)} in row {row}, which is not a number") from error
    given = np.asarray(found.is_valid())
    raw = found.to_numpy()
    wrong = np.flatnonzero(given & ~(np.abs(raw) <= FLOAT32_MAX))
    if len(wrong):
        raise DataError(
            f"column '{column.name}' is {raw[wrong[0]]} in row {wrong[0]}, which is not a finite number of float32: "
            f"correct it, or give null where it is missing"
        )
    return raw


def _no_number(texts: pa.ChunkedArray) -> tuple[int, str]:
    """Place and content of the first text that is not a number, found by halving."""
    first, last = 0, len(texts)
    while last - first > 1:
        middle = (first + last) // 2
        try:
            texts[first:middle].cast(pa.float64())
            first = middle
        except pa.ArrowException:
            last = middle
    return first, texts[first].as_py()


def _not_utf8(texts: pa.LargeStringArray) -> int:
    """Place of the first text that is not UTF-8."""
    for place, raw in enumerate(texts.cast(pa.large_binary()).to_pylist()):
        try:
            raw.decode()
        except UnicodeDecodeError:
            return place
    raise AssertionError


def is_list(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of its five types of lists."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in (*tests, pa.types.is_list_view, pa.types.is_large_list_view))


def pieces(values: pa.ChunkedArray, feature: Feature) -> tuple[pa.Array, Array]:
    """Texts of all lists [L] and their number in each row [R], without empty ones, at most `max_length` a row."""
    kind = values.type
    if not pa.types.is_null(kind) and (not is_list(kind) or not is_nameable(kind.value_type)):
        wanted = "a list of texts, integers or booleans"
        raise DataError(f"{feature.kind} '{feature.name}' needs {wanted} a row, not {kind}")
    try:
        lists = values.cast(pa.large_list(pa.large_string())).combine_chunks()
    except pa.ArrowException as error:
        raise DataError(f"{feature.kind} '{feature.name}' has values that are no text ({error})") from error
    lengths = np.asarray(lists.value_lengths().fill_null(0), dtype=np.int64)
    texts = lists.flatten()
    rows = np.repeat(np.arange(len(lists)), lengths)
    keep = np.flatnonzero(np.asarray(pc.not_equal(texts.fill_null(""), "")))
    rows = rows[keep]
    lengths = np.bincount(rows, minlength=len(lists))
    if feature.max_length is not None:
        place = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # within its row, from 0
        if feature.kind == "sequence":  # counted from the end
            place = np.repeat(lengths, lengths) - 1 - place
        keep = keep[place < feature.max_length]
        lengths = np.minimum(lengths, feature.max_length)
    return texts.take(pa.array(keep)), lengths
