"""Rows of raw files as batches of a scorer, block by block, with labels, refused rows and columns to keep.

Files are read by the readers of `prepare`. Parquet files have a fast path: each distinct value of a block is looked up
once, and no text is made for a row. A block that it does not take (other types, a row that must be refused) is read by
the plain path, which gives the same rows.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from holdall.common.errors import DataError
from holdall.data.batch import Batch
from holdall.data.layout import Layout, RawPart, is_number_input
from holdall.data.raw_data import RawData
from holdall.data.read_parquet import SUFFIXES, check_types, checked, flat_batch, flat_schema, is_utf8
from holdall.data.rows import Refused, Rows, check_columns, inputs_of
from holdall.data.schema import Schema
from holdall.serving.scorer import Scorer

Array = npt.NDArray[Any]
ROWS_PER_BLOCK = 1 << 17
"""Rows of a Parquet file that are encoded at once: the more there are, the fewer of their values are distinct."""


@dataclass(frozen=True)
class EncodedRows:
    """Block of rows of a file. R rows were read, and G of them are good."""

    source: Path
    batch: Batch
    """The good rows."""
    label: pa.Array
    """[G] uint8, null where a row has no label."""
    kept: list[pa.Array]
    """Columns [G] that are passed on."""
    places: Array
    """[G] place of each good row in the block, from 0."""
    num_rows: int
    """R: the rows that were read."""
    first_row: int
    """Number of the first row in its file."""
    position: int
    """Bytes of the file read so far."""
    refused: list[Refused] = field(default_factory=list)
    splits: Array | None = None
    """[G] split of each good row, where the data set defines it."""


def read_schema(scorer: Scorer) -> Schema:
    """Schema of the columns that the model reads: those that rows must have."""
    features = tuple(feature for feature in scorer.schema.features if feature.name in scorer.reads)
    return replace(scorer.schema, features=features)


def encoded_file(scorer: Scorer, raw: RawData, path: Path, *, fast: bool = True) -> Generator[EncodedRows]:
    """The rows of one file, a block at a time. `fast=False` takes the plain path for all of them."""
    if fast and raw.format == "table" and path.suffix in SUFFIXES:
        yield from encoded_parquet(scorer, raw.layout, path)
        return
    first_row = 0
    with closing(raw.read(path)) as blocks:
        for rows in blocks:
            yield encoded(scorer, raw.layout, path, rows, first_row)
            first_row += rows.num_rows


def encoded(scorer: Scorer, layout: Layout, path: Path, rows: Rows, first_row: int) -> EncodedRows:
    """Checked rows of a reader, the first of which is row `first_row` of the file, as a block of batches."""
    table = rows.frame.to_arrow()
    return EncodedRows(
        source=path,
        batch=scorer.encode(named_columns(table, layout)),
        label=table["label"].combine_chunks(),
        kept=[table[f"keep{index}"].combine_chunks() for index in range(len(layout.keep))],
        places=rows.numbers - first_row,
        num_rows=rows.num_rows,
        first_row=first_row,
        position=rows.position,
        refused=rows.refused,
        splits=rows.splits,
    )


def named_columns(table: pa.Table, layout: Layout) -> pa.Table:
    """Dense columns and features of rows that a reader checked, by the names of the schema."""
    columns = {dense.name: table[f"dense{index}"] for index, dense in enumerate(layout.dense)}
    columns |= {feature.name: table[name] for name, feature in inputs_of(layout).items()}
    return pa.table(columns)


# --- the fast path of Parquet ---------------------------------------------------------------------------------------


def encoded_parquet(scorer: Scorer, layout: Layout, path: Path) -> Iterator[EncodedRows]:
    """`encoded_file` of a Parquet file, whose columns of text are read as dictionaries."""
    try:
        with pq.ParquetFile(path) as file:
            schema, num_rows, size = flat_schema(file.schema_arrow), file.metadata.num_rows, path.stat().st_size
        layout = layout.for_columns(schema.names)
        check_columns(schema.names, layout, str(path))
        check_types(schema, layout, path)
        if not num_rows:
            raise DataError(f"{path} holds no rows: leave it out")
        inputs = inputs_of(layout).values()
        texts = [f.column for f in inputs if is_plain_text(schema.field(f.column).type) and not is_number_input(f)]
        takes = layout.positive is None or not layout.positive.compares_text
        takes &= all(is_plain_number(schema.field(column).type) for column in number_columns(layout))
        first_row = 0
        with pq.ParquetFile(path, read_dictionary=[name for name in texts if name not in layout.keep]) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_BLOCK, columns=list(layout.used_columns)):
                batch = flat_batch(batch)
                position = size * (first_row + len(batch)) // num_rows
                made = encoded_batch(scorer, layout, path, batch, first_row, position) if takes else None
                if made is None:
                    rows = checked(without_dictionaries(batch, schema), layout, first_row, position)
                    made = encoded(scorer, layout, path, rows, first_row)
                yield made
                first_row += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}): copy or download it again") from error


def encoded_batch(
    scorer: Scorer, layout: Layout, path: Path, batch: pa.RecordBatch, first_row: int, position: int
) -> EncodedRows | None:
    """The rows of a batch if none of them must be refused, else None."""
    if not all(is_utf8(batch[column]) for column in layout.keep):
        return None
    label = label_of(batch, layout)
    if label is None:
        return None
    columns = {dense.name: batch[dense.column] for dense in layout.dense}
    for feature in inputs_of(layout).values():
        values = batch[feature.column]
        single = isinstance(feature, RawPart) or feature.kind == "categorical"
        if single and not is_number_input(feature) and not pa.types.is_dictionary(values.type):
            values = values.dictionary_encode()
        columns[feature.name] = values
    try:
        encoded = scorer.encode(pa.table(columns))
    except DataError:
        return None
    kept = [batch[column] for column in layout.keep]
    places = np.arange(len(batch))
    return EncodedRows(path, encoded, label, kept, places, len(batch), first_row, position)


def label_of(batch: pa.RecordBatch, layout: Layout) -> pa.Array | None:
    """Labels [R] of a batch; None if one of them is wrong."""
    if layout.label is None:
        return pa.nulls(len(batch), pa.uint8())
    given = batch[layout.label].cast(pa.float64(), safe=False)
    missing = np.asarray(given.is_null())
    numbers = np.where(missing, 0.0, given.to_numpy(zero_copy_only=False))
    fine = np.isin(numbers, (0.0, 1.0)) if layout.positive is None else np.isfinite(numbers)
    if not fine.all():
        return None
    label = numbers if layout.positive is None else layout.positive(numbers)
    return pa.array(label.astype(np.uint8), mask=missing)


def number_columns(layout: Layout) -> list[str]:
    """Raw columns that must hold numbers."""
    label = [] if layout.label is None else [layout.label]
    buckets = [feature.column for feature in inputs_of(layout).values() if is_number_input(feature)]
    return [*label, *(dense.column for dense in layout.dense), *buckets]


def is_plain_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def is_plain_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def without_dictionaries(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the types of the file."""
    columns = [
        column.dictionary_decode()
        if pa.types.is_dictionary(column.type) and not pa.types.is_dictionary(schema.field(name).type)
        else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.record_batch(columns, names=batch.schema.names)
