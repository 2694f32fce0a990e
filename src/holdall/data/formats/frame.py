"""Frames in memory (pandas, polars, Arrow) as raw data: the rows that a Parquet file of the same content gives.

Neither pandas nor polars is needed to read them: frames come through the Arrow PyCapsule protocol.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdall.common.errors import ConfigError, DataError
from holdall.data.encode import is_list
from holdall.data.formats.table import load_layout, parse_layout, table_data
from holdall.data.guess_columns import document, guess_columns
from holdall.data.layout import Layout
from holdall.data.raw_data import RawData
from holdall.data.read_parquet import ROWS_PER_BLOCK, check_types, checked, flat_table, for_polars
from holdall.data.rows import Rows, check_columns, import_polars

if TYPE_CHECKING:
    from holdall.data.prepare import PrepareConfig

NAME = Path("the frame")
"""What errors call a frame."""
SAMPLE_ROWS = 100_000
"""Rows that lists of columns are guessed from."""

Entries = Sequence[str | Mapping[str, Any]]
"""Columns by name, or with further keys as in a TOML schema."""


def is_frame(source: Any) -> bool:
    """Whether a source is a table in memory."""
    return isinstance(source, pa.Table) or hasattr(source, "__arrow_c_stream__")


def open_frame(
    frame: Any,
    config: PrepareConfig,
    label: str | Mapping[str, Any] | None,
    columns: Mapping[str, Entries | None],
    single: Mapping[str, str | None],
) -> RawData:
    """A frame as raw data, with the columns of each role, or those of the TOML schema of `config`.

    `single` are roles that one column has, by name: `weight` and `time`.
    """
    table = as_arrow(frame)
    given = {role: list(entries) for role, entries in columns.items() if entries is not None}
    named = {role: name for role, name in single.items() if name is not None}
    if config.schema is not None:
        if label is not None or named or given:
            raise ConfigError("the schema names the columns: leave the schema or the names of columns out")
        layout = load_layout(config.schema)
    elif label is None:
        raise ConfigError('a frame needs the name of its label: give label="NAME", or a schema in PrepareConfig')
    else:
        layout = frame_layout(table, label, given, named)
    layout = replace(layout, max_value_bytes=config.max_value_bytes)
    if not table.num_rows:
        raise DataError("the frame holds no rows: give one with rows")
    check_columns(table.column_names, layout, str(NAME))
    check_types(table.schema, layout, NAME)
    raw = table_data(layout, [NAME], lambda _, layout: read_frame(table, layout), config)
    return replace(raw, num_bytes=max(table.nbytes, 1), format="table")


def frame_layout(
    table: pa.Table, label: str | Mapping[str, Any], given: Mapping[str, list[Any]], single: Mapping[str, str]
) -> Layout:
    """The layout that names of columns describe; without any, that of guesses."""
    rule = {"column": label} if isinstance(label, str) else dict(label)
    first = {"label": rule, **single}
    if not given:
        pl = import_polars()
        sample = pl.from_arrow(for_polars(table.slice(0, SAMPLE_ROWS)))
        sample = sample.drop(single.values(), strict=False)
        return parse_layout({**document(guess_columns(sample, rule.get("column"))), **first})
    entries = {role: [dict(e) if isinstance(e, Mapping) else e for e in list_] for role, list_ in given.items()}
    lists = {name for name, kind in zip(table.column_names, table.schema.types, strict=True) if is_list(kind)}
    values = entries.get("categorical", [])
    moved = [entry for entry in values if isinstance(entry, str) and entry in lists]
    entries["categorical"] = [entry for entry in values if entry not in moved]
    entries["bag"] = entries.get("bag", []) + moved
    return parse_layout({**first, **entries})


def as_arrow(frame: Any) -> pa.Table:
    """A frame of any library as an Arrow table, without the index of pandas."""
    try:
        table = frame if isinstance(frame, pa.Table) else pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"the frame has a column that is not of one type ({error}): convert it") from error
    names = [name for name in table.column_names if not name.startswith("__index_level_")]
    table = table.select(names) if len(names) < table.num_columns else table
    table = flat_table(table)
    return table.cast(pa.schema([field.with_type(without_views(field.type)) for field in table.schema]))


def without_views(kind: pa.DataType) -> pa.DataType:
    """A type with plain text in the place of views of text, which not every step reads."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_large_list(kind) and pa.types.is_string_view(kind.value_type):
        return pa.large_list(pa.large_string())
    return kind


def read_frame(table: pa.Table, layout: Layout) -> Generator[Rows]:
    """The rows of a table in the blocks of a Parquet file."""
    used = table.select(list(layout.used_columns))
    for start in range(0, table.num_rows, ROWS_PER_BLOCK):
        part = used.slice(start, ROWS_PER_BLOCK)
        columns = [merged(column) for column in part.columns]
        batch = pa.record_batch(columns, names=part.column_names)
        yield checked(batch, layout, start, position=table.nbytes * (start + len(batch)) // table.num_rows)


def merged(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    found = column.combine_chunks()
    return found.chunk(0) if isinstance(found, pa.ChunkedArray) else found
