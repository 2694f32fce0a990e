"""A split of a prepared data folder, memory-mapped: rows in file order, as Batches that view the files.

Opening reads `schema.json` and the files' footers; a row takes memory once it is read, and the operating system may
reclaim that memory. The format is in `docs/formats.md`.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from holdall.common.checked_files import FileCheck
from holdall.common.errors import DataError, did_you_mean
from holdall.common.summary import Summarised, Summary
from holdall.data.batch import Batch
from holdall.data.chunk_order import Runs
from holdall.data.columns import Array, Columns, Ragged, offsets_of
from holdall.data.copy_runs import copy_runs
from holdall.data.folder_files import check_split_files
from holdall.data.identity import data_fingerprint, ids_fingerprint
from holdall.data.schema import CURE, SCHEMA_FILE, DataFile, Schema

LONG_RUN = 32
"""Rows of a run from which on one copy of each run is faster than an index of rows."""


class DataSet(Summarised):
    """The rows of one split, 0..len-1.

    A missing or damaged file is a DataError: sizes and hashes are compared with `schema.json`. A file that this machine
    has hashed before is not read again, except with `verify`, which also validates every value of the columns. With
    `check=False` hashes are left to the caller, who must not use a result before `check_files().result()`.

    Batches are views of the mapped files and must not be written to: a write goes to a private copy of the page, not to
    the file, but changes every other view of that page in this process.
    """

    def __init__(self, folder: str | Path, split: str = "train", verify: bool = False, *, check: bool = True):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise DataError(f"no data folder {self.folder}: name one that `holdall prepare` made")
        self.schema = Schema.load(self.folder)
        if split not in self.schema.splits:
            raise DataError(f"{self.folder} has no split '{split}'{did_you_mean(split, self.schema.splits)}")
        self.split = split
        self.files = self.schema.splits[split].files
        self._one_hot = [feature.one_hot for feature in self.schema.features]
        if check:
            self.check_files(remember=not verify).result()
        self._columns = [read_columns(self.folder, file, self.schema, full=verify) for file in self.files]
        self._starts = [0, *accumulate(len(columns) for columns in self._columns)]
        if len(self) != self.schema.splits[split].rows:
            raise DataError(
                f"the files of split '{split}' in {self.folder} hold {len(self)} rows, but {SCHEMA_FILE} has "
                f"{self.schema.splits[split].rows}: {CURE}"
            )

    def _summary(self) -> Summary:
        title = f"DataSet {str(self.folder)!r}, split '{self.split}': {len(self):,} rows, label '{self.schema.label}'"
        rows = [(feature.name, feature.kind, feature.num_rows) for feature in self.schema.features]
        return Summary(f"{title}, {len(self.schema.dense)} dense columns", ("feature", "kind", "table rows"), rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def check_files(self, *, remember: bool = True) -> FileCheck:
        """Comparison of the files with their hashes, running on worker threads."""
        return check_split_files(self.folder, self.files, remember=remember)

    @property
    def fingerprint(self) -> str:
        """SHA-256 that identifies the whole data set: its columns, ids and rows."""
        return data_fingerprint(self.schema)

    @property
    def ids_fingerprint(self) -> str | None:
        """SHA-256 of the columns and of the value behind every id: a model fits each data set that has the same."""
        return ids_fingerprint(self.schema)

    def slice(self, start: int, stop: int) -> Batch:
        """Rows start..stop: views of a file, or copies where the range crosses from one file to the next."""
        return self.columns(start, stop).batch(self._one_hot)

    def join(self, *ranges: tuple[int, int]) -> Batch:
        """The rows of several ranges, one range after the other, copied."""
        return Columns.concatenate([self.columns(start, stop) for start, stop in ranges]).batch(self._one_hot)

    def columns(self, start: int, stop: int) -> Columns:
        """Rows start..stop as arrays; like `slice`, without making a Batch of them."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start}..{stop} of a split of {len(self)}")
        parts = []
        for file in self._files_of(start, stop):
            first, columns = self._starts[file], self._mapped(file)
            parts.append(columns.slice(max(start - first, 0), min(stop - first, len(columns))))
        return Columns.concatenate(parts) if parts else self._no_rows()

    def refuse_truncated(self, start: int, stop: int) -> None:
        """Raise if a file of rows start..stop is shorter than it was, as views made before would end the process."""
        for file in self._files_of(start, stop):
            self._mapped(file)

    def _files_of(self, start: int, stop: int) -> Iterator[int]:
        """Files that have some of rows start..stop."""
        file = max(0, bisect_right(self._starts, start) - 1)
        while file < len(self._columns) and self._starts[file] < stop:
            yield file
            file += 1

    def _mapped(self, file: int) -> Columns:
        """Columns of a file, if it still is as long as its map: the system kills a process (SIGBUS) that reads more."""
        columns = self._columns[file]
        if columns.mapped is not None and columns.mapped.size() < len(columns.mapped):
            raise DataError(
                f"{self.folder / self.files[file].name} was truncated while it was in use ({columns.mapped.size():,} "
                f"of {len(columns.mapped):,} bytes are left): {CURE}"
            )
        return columns

    def take(self, rows: Array) -> Batch:
        """The named rows, in that order, copied."""
        rows = np.asarray(rows, dtype=np.int64)
        if len(self._columns) == 1:
            return self._mapped(0).take(rows).batch(self._one_hot)
        order = np.argsort(rows, kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return self._take_sorted(rows[order]).take(back).batch(self._one_hot)

    def take_runs(self, runs: Runs, sizes: Sequence[int]) -> Iterator[Batch]:
        """The rows of the runs, copied, in batches of the given sizes."""
        bounds = pairwise(offsets_of(np.array(sizes)).tolist())
        if len(runs.starts) * LONG_RUN < sum(sizes) and all(self._one_hot):
            copied = self._copy_runs(runs)
            yield from (copied.slice(start, stop).batch(self._one_hot) for start, stop in bounds)
            return
        if len(self._columns) == 1:
            rows = runs.rows()
            yield from (self._mapped(0).take(rows[start:stop]).batch(self._one_hot) for start, stop in bounds)
            return
        order = np.argsort(runs.starts)
        in_order = Runs(runs.starts[order], runs.lengths[order])
        copied = self._take_sorted(in_order.rows())
        places = np.empty_like(order)
        places[order] = offsets_of(in_order.lengths)[:-1]
        rows = Runs(places, runs.lengths).rows()
        yield from (copied.take(rows[start:stop]).batch(self._one_hot) for start, stop in bounds)

    def _take_sorted(self, rows: Array) -> Columns:
        """Copies of rows in ascending order, so that each file and each page is read once."""
        parts = [
            self._mapped(file).take(rows[start:stop] - self._starts[file])
            for file, (start, stop) in enumerate(pairwise(np.searchsorted(rows, self._starts)))
            if start < stop
        ]
        return Columns.concatenate(parts) if parts else self._no_rows()

    def _copy_runs(self, runs: Runs) -> Columns:
        """Copies of the runs; bags are left out."""
        ends = np.concatenate([runs.starts, runs.starts + runs.lengths - 1])
        for file in np.unique(np.searchsorted(self._starts, ends, side="right") - 1).tolist():
            self._mapped(file)
        return Columns(
            label=copy_runs([columns.label for columns in self._columns], self._starts, runs),
            dense=copy_runs([columns.dense for columns in self._columns], self._starts, runs),
            ids=copy_runs([columns.ids for columns in self._columns], self._starts, runs),
            weight=self._copy_weights(runs),
        )

    def _copy_weights(self, runs: Runs) -> Array | None:
        weights = [columns.weight for columns in self._columns if columns.weight is not None]
        return copy_runs(weights, self._starts, runs) if weights else None

    def probability(self) -> Array:
        """[R] float32: the planted click probability of every row, which only synthetic sets have."""
        parts = [self._mapped(file).probability for file in range(len(self.files))]
        found = [part for part in parts if part is not None]
        if len(found) != len(parts):
            raise DataError(f"{self.folder} has no planted probability: only synthetic data sets do")
        return np.concatenate(found) if found else np.zeros(0, dtype=np.float32)

    def labels(self) -> Array:
        """[R] uint8: the label of every row."""
        return np.concatenate(
            [np.zeros(0, dtype=np.uint8), *(self._mapped(file).label for file in range(len(self.files)))]
        )

    def _no_rows(self) -> Columns:
        num_bags = self._one_hot.count(False)
        return Columns(
            label=np.zeros(0, dtype=np.uint8),
            dense=np.zeros((0, self.schema.num_dense), dtype=np.float32),
            ids=np.zeros((0, len(self._one_hot) - num_bags), dtype=np.int32),
            bags=(Ragged(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int32)),) * num_bags,
            weight=None if self.schema.weight is None else np.zeros(0, dtype=np.float32),
        )


def read_columns(folder: Path, file: DataFile, schema: Schema, *, full: bool = False) -> Columns:
    """Map one Arrow IPC file of a split and view its columns; `full` validates every value.."""
    path = folder / file.name
    try:
        columns = _Mapped(path, full).columns(schema)
    except FileNotFoundError:
        raise DataError(f"{path} is missing, but {SCHEMA_FILE} lists it: {CURE}") from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as an Arrow IPC file ({error}): {CURE}") from error
    if len(columns) != file.rows:
        raise DataError(f"{path} holds {len(columns):,} rows instead of {file.rows:,}: {CURE}")
    return columns


class _Mapped:
    """One Arrow IPC file in memory, and numpy views of its buffers.

    The map is private and writable (copy-on-write), because torch has no read-only tensors: a stray write then costs
    a page of memory instead of the process, and the file stays as it is.
    """

    def __init__(self, path: Path, full: bool):
        self.path = path
        with path.open("rb") as file:
            try:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError as error:  # an empty file cannot be mapped
                raise DataError(f"{path} is empty: {CURE}") from error
        buffer = pa.py_buffer(self.map)
        self.address = buffer.address
        reader = pa.ipc.open_file(buffer)
        if reader.num_record_batches != 1:
            raise DataError(f"{path} holds {reader.num_record_batches} record batches instead of one: {CURE}")
        self.batch = reader.get_batch(0)
        self.batch.validate(full=full)

    def columns(self, schema: Schema) -> Columns:
        num_one_hot = sum(feature.one_hot for feature in schema.features)
        weight = probability = None
        if schema.weight is not None:
            weight = self.view(self.column("weight", "float32", pa.types.is_float32))
        if "probability" in self.batch.schema.names:  # a name that no bag may have
            probability = self.view(self.column("probability", "float32", pa.types.is_float32))
        return Columns(
            label=self.view(self.column("label", "uint8", pa.types.is_uint8)),
            dense=self.matrix("dense", schema.num_dense, pa.float32()),
            ids=self.matrix("ids", num_one_hot, pa.int32(), pa.int64()),
            bags=tuple(self.ragged(feature.name) for feature in schema.features if not feature.one_hot),
            weight=weight,
            probability=probability,
            mapped=self.map,
        )

    def column(self, name: str, wanted: str, fits: Callable[[pa.DataType], bool]) -> pa.Array:
        if name not in self.batch.schema.names:
            raise DataError(f"{self.path} has no column '{name}': {CURE}")
        column = self.batch.column(name)
        if not fits(column.type):
            raise DataError(f"column '{name}' of {self.path} is {column.type} instead of {wanted}: {CURE}")
        if column.null_count:
            raise DataError(f"column '{name}' of {self.path} has {column.null_count} nulls: {CURE}")
        return column

    def matrix(self, name: str, width: int, *types: pa.DataType) -> Array:
        """[R, width] view of a fixed-size-list column; a width of 0 needs no column."""
        if width == 0:
            return np.zeros((len(self.batch), 0), dtype=types[0].to_pandas_dtype())

        def fits(kind: pa.DataType) -> bool:
            return pa.types.is_fixed_size_list(kind) and kind.list_size == width and kind.value_type in types

        wanted = f"a fixed-size list of {width} {' or '.join(map(str, types))}"
        column = self.column(name, wanted, fits)
        return self.view(column.flatten()).reshape(len(column), width)

    def ragged(self, name: str) -> Ragged:
        def fits(kind: pa.DataType) -> bool:
            return pa.types.is_list(kind) and kind.value_type in (pa.int32(), pa.int64())

        column = self.column(name, "a list of int32 or int64", fits)
        offsets = self.view(column.offsets) if len(column) else np.zeros(1, dtype=np.int32)
        return Ragged(self.view(column.values), offsets)

    def view(self, array: pa.Array) -> Array:
        """A numpy view of a primitive array, straight into the map."""
        if array.null_count:
            raise DataError(f"{self.path} has a list with {array.null_count} nulls in it: {CURE}")
        dtype = np.dtype(array.type.to_pandas_dtype())
        if len(array) == 0:
            return np.zeros(0, dtype=dtype)
        start = array.buffers()[1].address - self.address + array.offset * dtype.itemsize
        if not 0 <= start <= len(self.map) - len(array) * dtype.itemsize:
            raise DataError(f"{self.path} is a compressed Arrow file, which cannot be mapped: {CURE}")
        return np.frombuffer(self.map, dtype=dtype, count=len(array), offset=start)
