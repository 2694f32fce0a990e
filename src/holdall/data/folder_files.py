"""Files of a data set folder, compared with the sizes and hashes in its `schema.json` before they are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from holdall.common.checked_files import FileCheck
from holdall.common.errors import DataError
from holdall.data.schema import CURE, SCHEMA_FILE, DataFile, Schema


def check_split_files(folder: Path, files: Iterable[DataFile], *, remember: bool = True) -> FileCheck:
    """Check of files of a split, running; its `result` raises if one was changed."""
    for file in files:
        if Path(file.name).name != file.name:
            raise DataError(f"{folder / SCHEMA_FILE} names a file outside its folder ({file.name!r}): {CURE}")
    listed = {folder / file.name: file for file in files}
    return FileCheck(listed, listed_in=SCHEMA_FILE, cure=CURE, remember=remember)


def check_other_file(folder: Path, path: Path, schema: Schema | None = None, *, remember: bool = True) -> None:
    """Raise if a file of the folder besides those of the splits is not the one that was written.

    A folder of an earlier version does not list such files, and they are read as they are.
    """
    schema = Schema.load(folder) if schema is None else schema
    if schema.files is None:
        return
    name = path.relative_to(folder).as_posix()
    if name in schema.files:
        FileCheck({path: schema.files[name]}, listed_in=SCHEMA_FILE, cure=CURE, remember=remember).result()
    elif path.exists():
        raise DataError(f"{path} is not a file of this data set: {SCHEMA_FILE} does not list it; {CURE}")


def has_other_file(folder: Path, path: Path, schema: Schema) -> bool:
    """Whether a data set has such a file, by its list of files, or by the file where it has no list."""
    return path.exists() if schema.files is None else path.relative_to(folder).as_posix() in schema.files
