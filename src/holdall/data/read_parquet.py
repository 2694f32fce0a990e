"""Rows of a Parquet file."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdall.common.errors import DataError
from holdall.data.id_map import is_nameable, is_whole_float
from holdall.data.layout import Layout, RawPart, is_number_input
from holdall.data.rows import Refused, Rows, check_columns, check_values, import_polars, inputs_of

if TYPE_CHECKING:
    import polars as pl

SUFFIXES = (".parquet", ".pq")
ROWS_PER_BLOCK = 1 << 16


def read_parquet(path: Path, layout: Layout) -> Generator[Rows]:
    """The rows of one file, a block at a time; only the used columns are read."""
    try:
        with pq.ParquetFile(path) as file:
            schema = flat_schema(file.schema_arrow)
            layout = layout.for_columns(schema.names)
            check_columns(schema.names, layout, str(path))
            check_types(schema, layout, path)
            num_rows, size = file.metadata.num_rows, path.stat().st_size
            if not num_rows:
                raise DataError(f"{path} holds no rows: leave it out")
            first_row = 0
            for batch in file.iter_batches(batch_size=ROWS_PER_BLOCK, columns=list(layout.used_columns)):
                yield checked(
                    flat_batch(batch), layout, first_row, position=size * (first_row + len(batch)) // num_rows
                )
                first_row += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}): copy or download it again") from error


def flat_schema(schema: pa.Schema) -> pa.Schema:
    """The schema with the fields of structs in their place, named `user.city`."""
    while any(pa.types.is_struct(field.type) for field in schema):
        schema = pa.schema([part for field in schema for part in field.flatten()])
    return schema


def flat_table(table: pa.Table) -> pa.Table:
    """The table with the fields of structs in their place; a field of a missing struct is missing."""
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return table


def flat_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """`flat_table` of a batch."""
    if not any(pa.types.is_struct(kind) for kind in batch.schema.types):
        return batch
    table = flat_table(pa.Table.from_batches([batch])).combine_chunks()
    return pa.record_batch([column.chunk(0) for column in table.columns], names=table.column_names)


def checked(batch: pa.RecordBatch, layout: Layout, first_row: int, position: int) -> Rows:
    """The rows of one batch, the first of which is row `first_row` of the file."""
    pl = import_polars()
    bad = not_utf8(batch)
    if not bad:
        return typed(pl.from_arrow(for_polars(batch)), layout, first_row, position)
    keep = np.delete(np.arange(len(batch)), list(bad))
    rows = typed(pl.from_arrow(for_polars(batch.take(pa.array(keep)))), layout, 0, position)
    refused = [Refused(first_row + row + 1, *reason) for row, reason in bad.items()]
    refused += [replace(row, line=first_row + int(keep[row.line - 1]) + 1) for row in rows.refused]
    refused.sort(key=lambda row: row.line)
    return replace(rows, numbers=first_row + keep[rows.numbers], refused=refused, num_rows=len(batch))


def typed(raw: pl.DataFrame, layout: Layout, first_row: int, position: int) -> Rows:
    frame, reasons = check_values(raw, layout)
    numbers = np.arange(first_row, first_row + raw.height)
    if not reasons:
        return Rows(frame, numbers, [], raw.height, position)
    refused = [Refused(first_row + row + 1, reason, repr(raw.row(row, named=True))) for row, reason in reasons.items()]
    return Rows(frame, np.delete(numbers, list(reasons)), refused, raw.height, position)


def not_utf8(batch: pa.RecordBatch) -> dict[int, tuple[str, str]]:
    """Rows with text that is not UTF-8, which Parquet readers do not check: the reason, and the value."""
    bad: dict[int, tuple[str, str]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if is_utf8(column):
            continue
        for row, value in enumerate(as_bytes(column).to_pylist()):
            for text in value if isinstance(value, list) else [value]:
                try:
                    (text or b"").decode()
                except UnicodeDecodeError as error:
                    place = f"byte {text[error.start]:#04x} (number {error.start + 1} of the value)"
                    bad.setdefault(row, (f"column '{name}' holds text that is not UTF-8: {place}", repr({name: value})))
    return bad


def is_utf8(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        return False
    return True


def as_bytes(column: pa.Array) -> pa.Array:
    """A column of text, or of lists of it, as bytes; Arrow itself refuses a dictionary of such text."""
    return column.cast(pa.large_list(pa.large_binary()) if is_listed(column.type) else pa.large_binary())


def for_polars(batch: pa.RecordBatch) -> pa.Table:
    """The batch with decimals of more than 38 digits, which polars does not have, as float64."""
    columns = [column.cast(pa.float64()) if pa.types.is_decimal256(column.type) else column for column in batch.columns]
    return pa.table(columns, names=batch.schema.names)


def is_listed(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def check_types(schema: pa.Schema, layout: Layout, path: Path) -> None:
    """Refuse columns whose type does not match the layout, before any row is read."""
    label: tuple[str, ...] = () if layout.label is None else (layout.label,)
    if layout.label is not None and layout.positive is not None and layout.positive.compares_text:
        label, kind = (), schema.field(layout.label).type
        if not is_nameable(kind):
            raise refuse(schema, layout.label, path, f"the rule {layout.positive} needs text, integers or booleans")
    weight = () if layout.weight is None else (layout.weight,)
    inputs = inputs_of(layout).values()
    numbers = [feature.column for feature in inputs if is_number_input(feature)]
    for column in (*label, *weight, *numbers, *(dense.column for dense in layout.dense)):
        if not is_number(schema.field(column).type):
            raise refuse(schema, column, path, "numbers are needed here")
    if layout.time is not None and not is_time(schema.field(layout.time).type):
        raise refuse(schema, layout.time, path, "times are numbers, dates, timestamps, or their texts")
    for feature in inputs:
        if is_number_input(feature):
            continue
        kind = schema.field(feature.column).type
        listed = is_listed(kind)
        if isinstance(feature, RawPart) or feature.kind == "categorical":
            if listed:
                raise refuse(schema, feature.column, path, f"name '{feature.name}' as a bag or sequence")
        elif not listed and feature.separator is None:
            raise refuse(schema, feature.column, path, f"{feature.kind} '{feature.name}' needs lists, or a separator")
        if not is_nameable(kind.value_type if listed else kind) and not is_whole_float(kind):
            raise refuse(schema, feature.column, path, "values must be text, integers or booleans; store them as text")


def is_time(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        is_number(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_string_view(kind)
    )


def is_number(kind: pa.DataType) -> bool:
    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean, types.is_string, types.is_null)
    return any(test(kind) for test in (*tests, types.is_large_string))


def refuse(schema: pa.Schema, column: str, path: Path, cure: str) -> DataError:
    return DataError(f"column '{column}' of {path} is of type {schema.field(column).type}: {cure}")
