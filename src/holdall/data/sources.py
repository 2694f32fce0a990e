"""Raw files of a data set, with patterns expanded; each file is read exactly once."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from holdall.common.errors import ConfigError, DataError


def find_sources(sources: Sequence[str | Path], out: Path) -> list[Path]:
    """Files in the order given; a pattern stands for its matches in sorted order, `day_2` before `day_10`."""
    if not sources:
        raise ConfigError("no source files were named")
    refuse_names_that_are_no_text(out)
    files: list[Path] = []
    for source in map(str, sources):
        if Path(source).exists():  # a file may have brackets in its name
            matches = [source]
        else:
            matches = sorted(glob.glob(source, recursive=True), key=natural)
        if not matches:
            kind = "no file matches the pattern" if glob.has_magic(source) else "no such file:"
            raise DataError(f"{kind} {source} (looked from {os.getcwd()}): check the name")
        files += map(Path, matches)
    for file in files:
        refuse_names_that_are_no_text(file)
        if file.is_dir():
            raise DataError(f"{file} is a folder: name its files, as in '{file}/*.gz'")
        if not os.access(file, os.R_OK):
            raise DataError(f"{file} cannot be read: check its permissions")
        if files.count(file) > 1:
            raise ConfigError(f"{file} is named more than once among the sources: name it once")
        if Path(os.path.realpath(out)) in Path(os.path.realpath(file)).parents:
            raise ConfigError(f"the source {file} is in the output folder {out}: write to another folder")
    return files


def refuse_names_that_are_no_text(path: Path) -> None:
    """Raise if a name is not UTF-8: Arrow does not open it, and no JSON or TSV can hold it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        name = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise ConfigError(f"the name of {name} is not UTF-8: rename the file or folder") from None


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that compares runs of digits as numbers: the last of `day_0`..`day_23` is `day_23`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]
