"""Rows of a Parquet file."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdall.common.errors import DataError
from holdall.data.id_map import is_nameable
from holdall.data.layout import Layout
from holdall.data.rows import Refused, Rows, check_columns, check_values, import_polars

if TYPE_CHECKING:
    import polars as pl

SUFFIXES = (".parquet", ".pq")
ROWS_PER_BLOCK = 1 << 16


def read_parquet(path: Path, layout: Layout) -> Generator[Rows]:
    """The rows of one file, a block at a time; only the used columns are read."""
    pl = import_polars()
    try:
        with pq.ParquetFile(path) as file:
            check_columns(file.schema_arrow.names, layout, str(path))
            check_types(file.schema_arrow, layout, path)
            num_rows, size = file.metadata.num_rows, path.stat().st_size
            if not num_rows:
                raise DataError(f"{path} holds no rows: leave it out")
            first_row = 0
            for batch in file.iter_batches(batch_size=ROWS_PER_BLOCK, columns=list(layout.used_columns)):
                raw = pl.from_arrow(pa.Table.from_batches([batch]))
                last_row = first_row + raw.height
                yield typed(raw, layout, first_row, position=size * last_row // num_rows)
                first_row = last_row
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}): copy or download it again") from error


def typed(raw: pl.DataFrame, layout: Layout, first_row: int, position: int) -> Rows:
    frame, reasons = check_values(raw, layout)
    numbers = np.arange(first_row, first_row + raw.height)
    if not reasons:
        return Rows(frame, numbers, [], raw.height, position)
    refused = [Refused(first_row + row + 1, reason, repr(raw.row(row, named=True))) for row, reason in reasons.items()]
    return Rows(frame, np.delete(numbers, list(reasons)), refused, raw.height, position)


def check_types(schema: pa.Schema, layout: Layout, path: Path) -> None:
    """Refuse columns whose type does not match the layout, before any row is read."""
    for column in (layout.label, *(dense.column for dense in layout.dense)):
        if not is_number(schema.field(column).type):
            raise refuse(schema, column, path, "numbers are needed here")
    for feature in layout.features:
        kind = schema.field(feature.column).type
        listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if feature.kind == "categorical" and listed:
            raise refuse(schema, feature.column, path, f"name '{feature.name}' as a bag or sequence")
        if feature.kind != "categorical" and not listed and feature.separator is None:
            raise refuse(schema, feature.column, path, f"{feature.kind} '{feature.name}' needs lists, or a separator")
        if not is_nameable(kind.value_type if listed else kind):
            raise refuse(schema, feature.column, path, "values must be text, integers or booleans; store them as text")


def is_number(kind: pa.DataType) -> bool:
    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean, types.is_string, types.is_null)
    return any(test(kind) for test in (*tests, types.is_large_string))


def refuse(schema: pa.Schema, column: str, path: Path, cure: str) -> DataError:
    return DataError(f"column '{column}' of {path} is of type {schema.field(column).type}: {cure}")
