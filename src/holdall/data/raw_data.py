"""Raw data as a reader gives it to `prepare`: a layout, files in order, and the rows of each file.

A data set that is a plain table needs a TOML schema and no reader (`formats/table.py`). Others have one short module
that makes a `RawData`; `formats/registry.py` lists them, and `docs/your-data.md` describes how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import numpy as np

from holdall.common.errors import ConfigError, DataError
from holdall.data.blocks import COMPRESSIONS
from holdall.data.layout import Layout
from holdall.data.rows import Refused, Rows, import_polars
from holdall.data.schema import Schema
from holdall.data.sources import find_sources

Read = Callable[[Path], Generator[Rows]]


def no_further_files(folder: Path, schema: Schema) -> None:
    """`finish` of a data set that has splits and id maps only."""


@dataclass(frozen=True, kw_only=True)
class RawData:
    """Raw files and the functions that turn them into rows."""

    layout: Layout
    files: list[Path]
    """Files in the order of reading: those that are joined to others come first."""
    read: Read
    """The rows of one file. A file that is only joined with others gives no rows, but the lines it refused."""
    finish: Callable[[Path, Schema], None] = no_further_files
    """Writes further files into the folder, once ids are known."""
    counts: dict[str, int] = field(default_factory=dict)
    """Irregularities that were accepted, counted by name while reading; stored in `schema.json` under `source`."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """Default for lines that cannot be read."""
    format: str | None = None
    """Name of the format; None for a reader of your own."""
    num_bytes: int | None = None
    """Bytes of rows in memory, which have no file: the one of `files` is what errors call them."""

    def size_of(self, file: Path) -> int:
        """Bytes of one of the files."""
        return file.stat().st_size if self.num_bytes is None else self.num_bytes


def no_rows(layout: Layout, refused: list[Refused], position: int = 0) -> Rows:
    """Rows of a file that gives none itself."""
    pl = import_polars()
    columns = {"label": pl.UInt8} | {f"dense{index}": pl.Float64 for index in range(len(layout.dense))}
    for index, feature in enumerate(layout.features):
        if not feature.cross:
            columns[f"feature{index}"] = pl.String if feature.kind == "categorical" else pl.List(pl.String)
    return Rows(pl.DataFrame(schema=columns), np.zeros(0, dtype=np.int64), refused, 0, position)


def find_roles(
    sources: Sequence[str | Path], out: Path, roles: dict[str, tuple[str, ...]], needed: Sequence[str]
) -> dict[str, Path]:
    """File of each role, in the order of `roles`, found by its name without a compression suffix.

    Sources are files, patterns, or the data set's folder, from which the files with a role are taken.
    """
    everything: list[str | Path] = []
    for source in sources:
        if Path(source).is_dir():
            everything += sorted(file for file in Path(source).iterdir() if role_of(file, roles))
        else:
            everything.append(source)
    names = ", ".join(" or ".join(patterns) for patterns in roles.values())
    if sources and not everything:
        raise DataError(f"{', '.join(map(str, sources))} holds none of the files of this data set ({names})")
    found: dict[str, Path] = {}
    for file in find_sources(everything, out):
        role = role_of(file, roles)
        if role is None:
            raise ConfigError(f"{file} is none of the files of this data set ({names}): leave it out, or rename it")
        if role in found:
            raise ConfigError(f"{found[role]} and {file} are both the {role} of the data set: name one of them")
        found[role] = file
    for role in needed:
        if role not in found:
            wanted = " or ".join(roles[role])
            raise DataError(f"the {role} of the data set ({wanted}) are not among the sources: name that file too")
    return {role: found[role] for role in roles if role in found}


def role_of(file: Path, roles: dict[str, tuple[str, ...]]) -> str | None:
    name = file.stem if file.suffix in COMPRESSIONS else file.name
    return next((role for role, patterns in roles.items() if any(fnmatch(name, p) for p in patterns)), None)
