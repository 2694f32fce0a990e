"""File of scores, Parquet or CSV: a row for each row that was read, written whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from holdall.common.errors import ConfigError, DataError, HoldallError
from holdall.common.files import PARTIAL, fsync_file
from holdall.common.folder_lock import locked
from holdall.common.output_folder import refuse_place
from holdall.data.bad_rows import BAD_ROWS_FILE
from holdall.serving.file_rows import EncodedRows

LABEL, SCORE = "label", "score"
SUFFIXES = (".parquet", ".pq", ".csv")


def bad_rows_path(out: Path) -> Path:
    """The list of refused rows, beside the scores."""
    return out.with_name(f"{out.stem}.{BAD_ROWS_FILE}")


def refuse_output(out: Path, inputs: Iterable[Path], overwrite: bool) -> None:
    """Raise if the scores must not be written to `out`."""
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"{out} is neither Parquet nor CSV by its name: name a file such as scores.parquet")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name a file such as {out / 'scores.parquet'}")
    for path in (out, bad_rows_path(out)):
        refuse_place(path, inputs)
        if path.exists() and not overwrite:
            raise ConfigError(f"{path} exists already: name another file, or replace it with --overwrite")


@contextmanager
def output_file(out: Path) -> Iterator[tuple[Path, Path]]:
    """Temporary files for scores and refused rows; when the block ends without an error they get their names.

    An old list of refused rows is removed where there is no new one.
    """
    listed = bad_rows_path(out)
    partial, partial_list = (path.with_name(path.name + PARTIAL) for path in (out, listed))
    with locked(out):
        try:
            yield partial, partial_list
            for path in (partial_list, partial):
                if path.exists():
                    fsync_file(path)
            if partial_list.exists():
                os.replace(partial_list, listed)
            else:
                listed.unlink(missing_ok=True)
            os.replace(partial, out)
            fsync_file(out.parent)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise HoldallError(
                f"the disk is full while writing {out}: free some space or choose another place, and run it again; "
                f"nothing half-written was kept"
            ) from error
        finally:
            for path in (partial, partial_list):
                path.unlink(missing_ok=True)


class ScoreWriter:
    """Writer of the columns to keep, the labels and the scores of blocks of rows; refused rows have nulls."""

    def __init__(self, path: Path, named: Path, keep: Sequence[str]):
        """`path` is written to; the suffix of `named` tells the format."""
        self.path, self.csv, self.keep = path, named.suffix == ".csv", tuple(keep)
        self._writer: Any = None
        self._schema: pa.Schema | None = None
        self._stack = ExitStack()

    def write(self, rows: EncodedRows, scores: npt.NDArray[np.float32]) -> None:
        """Write a block whose good rows have these scores [G]."""
        columns = [*rows.kept, rows.label, pa.array(scores)]
        if len(rows.places) < rows.num_rows:
            order = np.zeros(rows.num_rows, dtype=np.int64)
            order[rows.places] = np.arange(len(rows.places))
            refused = np.ones(rows.num_rows, dtype=bool)
            refused[rows.places] = False
            indices = pa.array(order, mask=refused)
            columns = [column.take(indices) for column in columns]
        batch = pa.record_batch(columns, names=[*self.keep, LABEL, SCORE])
        if self._writer is None:
            self._open(batch.schema)
        try:
            self._writer.write_batch(batch.cast(self._schema))
        except pa.ArrowException as error:
            raise DataError(
                f"the columns to keep of {rows.source} cannot be written with those before them ({error}): score this "
                f"file alone, or leave --keep out"
            ) from error

    def _open(self, schema: pa.Schema) -> None:
        nested = [field.name for field in schema if pa.types.is_nested(field.type)]
        if self.csv and nested:
            raise ConfigError(f"--keep {nested[0]}: a CSV file cannot hold {schema.field(nested[0]).type}; use Parquet")
        self._schema = schema
        writer = pa_csv.CSVWriter(self.path, schema) if self.csv else pq.ParquetWriter(self.path, schema)
        self._writer = self._stack.enter_context(writer)

    def __enter__(self) -> ScoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
