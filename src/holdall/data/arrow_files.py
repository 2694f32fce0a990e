"""Arrow IPC files of a split (docs/formats.md), and the provisional files they are made from.

Each holds exactly one record batch, uncompressed, so that a reader maps it and slices whole arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from holdall.common.errors import ConfigError, DataError
from holdall.common.files import sha256
from holdall.data.schema import DataFile

Array = npt.NDArray[Any]
Lists = tuple[Array, Array]
"""Lists of R rows: values [L] and offsets [R + 1], starting at 0."""


def write_split_file(
    path: Path,
    label: Array,
    dense: Array,
    ids: Array,
    lists: Mapping[str, Lists],
    *,
    weight: Array | None = None,
    probability: Array | None = None,
) -> DataFile:
    """Write one file of a split: label [R], dense [R, N], ids [R, F1], and the bags and sequences by name.

    `dense` and `ids` are left out when they have no columns. `weight` [R] are the weights of rows that have them,
    `probability` [R] is the planted click probability of synthetic sets.
    """
    columns: dict[str, pa.Array] = {"label": pa.array(label, type=pa.uint8())}
    for name, matrix in (("dense", dense), ("ids", ids)):
        if matrix.shape[1]:
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])
    for name, (values, offsets) in lists.items():
        if offsets[-1] >= 2**31:
            raise ConfigError(
                f"{path.name} would hold {offsets[-1]:,} values of '{name}': lower rows_per_file or max_length"
            )
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), pa.array(values))
    if weight is not None:
        columns["weight"] = pa.array(weight, type=pa.float32())
    if probability is not None:
        columns["probability"] = pa.array(probability, type=pa.float32())
    write_batch(path, pa.RecordBatch.from_pydict(columns))
    return DataFile(name=path.name, rows=len(label), bytes=path.stat().st_size, sha256=sha256(path))


def write_batch(path: Path, batch: pa.RecordBatch) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def read_batch(path: Path) -> pa.RecordBatch:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).get_batch(0)


def whole_numbers(column: pa.Array, name: str, path: Path, below: int | None = None) -> Array:
    """The integers of a column of ids, or of flattened lists of them; anything else is refused."""
    if not pa.types.is_integer(column.type) or column.null_count:
        found = f"{column.type} with {column.null_count} nulls"
        raise DataError(f"{path} has {found} in the place of ids in column '{name}': prepare the data set again")
    numbers: Array = column.to_numpy()
    if below is not None and len(numbers) and not (numbers.min() >= 0 and numbers.max() < below):
        wrong = numbers.min() if numbers.min() < 0 else numbers.max()
        raise DataError(
            f"{path} has {wrong} in column '{name}', where {below:,} is the end: prepare the data set again"
        )
    return numbers


class Spill:
    """Writer of the rows of one split, as provisional files of `rows_per_file` rows."""

    def __init__(self, folder: Path, split: str, rows_per_file: int):
        self.folder = folder
        self.split = split
        self.rows_per_file = rows_per_file
        self.files: list[Path] = []
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0

    def add(self, table: pa.Table) -> None:
        if not table.num_rows:
            return
        self._waiting.append(table)
        self._num_waiting += table.num_rows
        while self._num_waiting >= self.rows_per_file:
            self._write(self.rows_per_file)

    def finish(self) -> None:
        if self._num_waiting:
            self._write(self._num_waiting)

    def _write(self, num_rows: int) -> None:
        table = pa.concat_tables(self._waiting)
        path = self.folder / f"{self.split}-{len(self.files):05d}.arrow"
        write_batch(path, table.slice(0, num_rows).combine_chunks().to_batches()[0])
        self.files.append(path)
        rest = table.slice(num_rows)
        self._waiting = [rest] if rest.num_rows else []
        self._num_waiting = rest.num_rows
