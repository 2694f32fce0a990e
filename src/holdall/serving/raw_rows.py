"""Raw rows in the forms that people have them, as one Arrow table with the columns that a model reads.

A value means what it means to `holdall prepare`: null and "" are missing, integers stand for their decimal text, floats
in a feature for the integer that they are, and booleans for `true` and `false` (1 and 0 in a dense column). Neither
pandas nor polars is imported: their frames are read through the Arrow PyCapsule protocol. Rows are counted from 0 in
errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdall.common.errors import DataError, did_you_mean
from holdall.data.encode import is_text, raw_columns, split_texts
from holdall.data.layout import MAX_VALUE_BYTES
from holdall.data.read_parquet import SUFFIXES, flat_batch, flat_schema, flat_table
from holdall.data.rows import FLOAT32_MAX, NOT_WHOLE, WHOLE_FLOATS, inputs_of, shown
from holdall.data.schema import Feature, Schema
from holdall.data.stored_layout import stored_layout
from holdall.data.transforms import input_features

ROWS_PER_BLOCK = 1 << 16
"""Rows of a file that are in memory at a time."""
FORMS = "a list of dicts, a dict of columns, a pandas, polars or Arrow table, or a file"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_BOOLEANS = {True: "true", False: "false"}


@dataclass(frozen=True)
class RowFormat:
    """Columns of the rows that a model scores, and how their values are read."""

    schema: Schema
    reads: frozenset[str]
    """Names of the features that the model reads; the others may be absent."""
    separators: Mapping[str, str] = field(default_factory=dict)
    """By bag or sequence, what separates its values in a text; without one, it must be a list."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """By name, the column of a raw file where it has another name."""
    integers: frozenset[str] = frozenset()
    """Features whose values are whole numbers, also where a text writes them as floats."""
    max_value_bytes: int = MAX_VALUE_BYTES
    """Bytes of the longest value of a feature."""
    given: frozenset[str] | None = None
    """Columns that rows have; None: all of them."""

    @classmethod
    def of(cls, schema: Schema, reads: Collection[str]) -> RowFormat:
        """Format of the rows of a data set, with what its schema tells about the raw files."""
        stored = stored_layout(schema)
        if stored is None:
            return cls(schema, frozenset(reads))
        _, layout = stored
        separators = {feature.name: feature.separator for feature in layout.features if feature.separator is not None}
        integers = frozenset(feature.name for feature in inputs_of(layout).values() if feature.integer)
        return cls(schema, frozenset(reads), separators, raw_columns(layout), integers, layout.max_value_bytes)

    @property
    def features(self) -> list[Feature]:
        """Columns of values that rows must have, those of a cross in its place."""
        found = input_features(feature for feature in self.schema.features if feature.name in self.reads)
        return [feature for feature in found if self.given is None or feature.name in self.given]

    @property
    def names(self) -> list[str]:
        """Columns that rows must have: dense ones, then features."""
        return [column.name for column in self.schema.dense] + [feature.name for feature in self.features]

    def table(self, rows: Any) -> pa.Table:
        """The rows with the columns of `names`: text, lists of it, or numbers."""
        if isinstance(rows, str | Path):
            return pa.concat_tables(list(self.blocks(rows)))
        if isinstance(rows, pa.RecordBatch):
            rows = pa.Table.from_batches([rows])
        if isinstance(rows, Mapping):
            return self._from_columns(rows)
        if hasattr(rows, "__arrow_c_stream__") and not isinstance(rows, pa.Table):
            rows = pa.table(rows)
        if isinstance(rows, pa.Table):
            return self._select(flat_table(rows))
        if isinstance(rows, Iterable):
            return self._from_dicts(list(rows))
        raise DataError(f"rows cannot be a {type(rows).__name__}: give {FORMS}")

    def values(self, feature: str, values: Any) -> pa.Array:
        """Values of one feature as text, whatever number of them a row has."""
        if isinstance(values, list | tuple):
            return _converted(values, f"feature '{feature}'", one_text_of, pa.large_string())
        return _array(feature, values)

    def only(self, names: Collection[str]) -> RowFormat:
        """Format of rows with these columns alone."""
        schema = replace(self.schema, dense=tuple(column for column in self.schema.dense if column.name in names))
        return replace(self, schema=schema, given=frozenset(names))

    def blocks(self, path: str | Path) -> Iterator[pa.Table]:
        """The rows of a file, a block at a time; at least one block, which may be empty.

        Text files are read as those that `prepare` read, and need polars as it does.
        """
        path = Path(path)
        return self._of_parquet(path) if path.suffix.lower() in SUFFIXES else self._of_text(path)

    def _of_parquet(self, path: Path) -> Iterator[pa.Table]:
        try:
            with pq.ParquetFile(path) as file:
                found = flat_schema(file.schema_arrow).names
                columns = {name: self.columns.get(name, name) for name in self.names}
                columns = {name: column if column in found else name for name, column in columns.items()}
                for column in columns.values():
                    _check_name(column, found, f"{path} has")
                batches = file.iter_batches(batch_size=ROWS_PER_BLOCK, columns=list(dict.fromkeys(columns.values())))
                empty = pa.RecordBatch.from_pylist([], flat_schema(file.schema_arrow))
                for batch in map(flat_batch, batches) if file.metadata.num_rows else [empty]:
                    yield self._split_texts(pa.table({name: batch[column] for name, column in columns.items()}))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as Parquet ({error}): copy or download it again") from error

    def _of_text(self, path: Path) -> Iterator[pa.Table]:
        from holdall.data.formats.open_to_score import open_to_score  # needs polars

        read = tuple(feature for feature in self.schema.features if feature.name in self.reads)
        raw = open_to_score([path], path, replace(self.schema, features=read))
        names = {f"dense{i}": column.name for i, column in enumerate(raw.layout.dense)}
        names |= {name: feature.name for name, feature in inputs_of(raw.layout).items()}
        for file in raw.files:
            for rows in raw.read(file):
                if rows.refused:
                    wrong = rows.refused[0]
                    raise DataError(f"{file}, line {wrong.line}: {wrong.reason}")
                yield rows.frame.select(list(names)).to_arrow().rename_columns(names)

    def _select(self, table: pa.Table) -> pa.Table:
        columns = {name: self._key(name, table.column_names) for name in self.names}
        for column in columns.values():
            _check_name(column, table.column_names, "the rows have")
        return self._split_texts(pa.table({name: table[column] for name, column in columns.items()}))

    def _key(self, name: str, found: Collection[str]) -> str:
        """Name of a column in rows that have these: its own, or that of the raw files."""
        return self.columns[name] if name not in found and self.columns.get(name) in found else name

    def _split_texts(self, table: pa.Table) -> pa.Table:
        """The table with lists in the place of texts with separators."""
        for place, name in enumerate(table.column_names):
            if name in self.separators and is_text(table.field(place).type):
                table = table.set_column(place, name, split_texts(table.column(place), self.separators[name]))
        return table

    # --- rows and columns of Python values -----------------------------------------------------------------------

    def _from_dicts(self, rows: list[Any]) -> pa.Table:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(f"row {number} is a {type(row).__name__} instead of a dict: give {FORMS}")
        made = {}
        for name in self.names:
            raw = self.columns.get(name, name)
            values = (row[name] if name in row else _nested(row, raw) for row in rows)
            made[name] = _converted(values, *self._reader(name))
        return pa.table(made)

    def _from_columns(self, columns: Mapping[str, Any]) -> pa.Table:
        made: dict[str, pa.Array | pa.ChunkedArray] = {}
        for name in self.names:
            key = self._key(name, columns)
            _check_name(key, list(columns), "the rows have")
            values = columns[key]
            if isinstance(values, list | tuple):
                made[name] = _converted(values, *self._reader(name))
            elif isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
                raise DataError(f"column '{name}' is one value, not a column: give one row as a list of one dict")
            else:
                made[name] = _array(name, values)
        lengths = {name: len(column) for name, column in made.items()}
        if len(set(lengths.values())) > 1:
            few, many = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
            raise DataError(
                f"column '{few}' has {lengths[few]:,} rows and column '{many}' {lengths[many]:,}: columns must be "
                f"equally long"
            )
        return self._split_texts(pa.table(made))

    def _reader(self, name: str) -> tuple[str, Callable[[Any], Any], pa.DataType]:
        """What a column is called in errors, the function that reads one value of it, and the type of the column."""
        if any(name == column.name for column in self.schema.dense):
            return f"dense column '{name}'", number_of, pa.float64()
        feature = next(feature for feature in self.features if feature.name == name)
        if feature.bucket is not None:
            return f"feature '{name}'", number_of, pa.float64()
        if feature.one_hot:
            return f"feature '{name}'", one_text_of, pa.large_string()
        separator = self.separators.get(name)
        return f"feature '{name}'", lambda value: texts_of(value, separator), pa.large_list(pa.large_string())


def _nested(row: Mapping[str, Any], column: str) -> Any:
    """Value of a raw column, which may be that of a nested dict: `user.city`."""
    if column in row:
        return row[column]
    name, _, rest = column.partition(".")
    inner = row.get(name) if rest else None
    return _nested(inner, rest) if isinstance(inner, Mapping) else _ABSENT


def _check_name(name: str, names: Sequence[str], where: str) -> None:
    """Raise unless a column is there, once."""
    if name not in names:
        raise DataError(f"{where} no column '{name}'{did_you_mean(name, names)}")
    if names.count(name) > 1:
        raise DataError(f"{where} {names.count(name)} columns named '{name}': rename all but one")


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT: Any = _Absent()


def _converted(values: Iterable[Any], called: str, read: Callable[[Any], Any], kind: pa.DataType) -> pa.Array:
    """A column of the values as `read` gives them; an error names the row."""
    found: list[Any] = []
    try:
        found.extend(map(read, values))
        return pa.array(found, kind)
    except ValueRefusedError as wrong:
        raise DataError(f"row {len(found)}: {called} {wrong}") from None
    except UnicodeEncodeError:
        raise DataError(f"row {_not_utf8(found)}: {called} is text that is not valid Unicode: correct it") from None


def _not_utf8(texts: list[Any]) -> int:
    for row, value in enumerate(texts):
        try:
            "".join(value).encode()
        except UnicodeEncodeError:
            return row
    raise AssertionError


class ValueRefusedError(Exception):
    """What is wrong with a value, without its place."""


def number_of(value: Any) -> float | None:
    """A value of a dense column, None where it is missing."""
    if value is None:
        return None
    if isinstance(value, str):
        if not value:
            return None
        if not _NUMBER.fullmatch(value):
            _refuse_number(value)
    elif not isinstance(value, Real | Decimal | np.bool_):
        _refuse_number(value)
    try:
        number = float(value)
    except OverflowError:
        _refuse_number(value)
    if not abs(number) <= FLOAT32_MAX:
        _refuse_number(value)
    return number


def text_of(value: Any) -> str:
    """A value of a categorical feature, "" where it is missing."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return _BOOLEANS[bool(value)]
    if isinstance(value, Integral):
        number = int(value)
        if not -(2**63) <= number < 2**64:
            raise ValueRefusedError("is an integer of more than 64 bits: give it as text")
        return str(number)
    if value is _ABSENT:
        raise ValueRefusedError("is missing: give null where it has no value")
    if isinstance(value, Real):
        raise ValueRefusedError(f"is the number {value}, and needs text or an integer: 1.0 and 1 are two values")
    raise ValueRefusedError(f"is {shown(value)}, and needs one text, integer or boolean")


def one_text_of(value: Any) -> str:
    """`text_of`, but a float stands for the whole number that it is, and NaN is missing."""
    if not isinstance(value, Real) or isinstance(value, Integral | bool | np.bool_):
        return text_of(value)
    number, bits = float(value), 32 if isinstance(value, np.float32) else 64
    if math.isnan(number):
        return ""
    if not number.is_integer() or abs(number) >= WHOLE_FLOATS[bits]:
        raise ValueRefusedError(f"is {value}, {NOT_WHOLE}")
    return str(int(number))


def texts_of(value: Any, separator: str | None) -> list[str]:
    """The values of a bag or sequence, without missing ones."""
    if value is None:
        return []
    if isinstance(value, str):
        if not value:
            return []
        if separator is None:
            raise ValueRefusedError(f"is the text {shown(value)}, and needs a list of its values")
        return [piece for piece in value.split(separator) if piece]
    if value is _ABSENT:
        raise ValueRefusedError("is missing: give an empty list or null where it has no value")
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueRefusedError(f"is {shown(value)}, and needs a list of its values")
    return [text for text in map(text_of, value) if text]


def _refuse_number(value: Any) -> NoReturn:
    if value is _ABSENT:
        raise ValueRefusedError("is missing: give null where it has no value")
    hint = " (a missing one is null)" if isinstance(value, float) and math.isnan(value) else ""
    raise ValueRefusedError(f"is {shown(value)}, which is not a finite number of float32{hint}")


def _array(name: str, values: Any) -> pa.Array | pa.ChunkedArray:
    """A column of another library as an Arrow array."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    try:
        return pa.chunked_array(values) if hasattr(values, "__arrow_c_stream__") else pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"column '{name}' is not a column of one type ({error})") from error
