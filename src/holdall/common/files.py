"""Files that are either complete or absent: atomic writes, hashes, JSON documents with a format and a version."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdall.common.errors import DataError, HoldallError

PARTIAL = ".partial"  # suffix of files and folders that are being written


def sha256(path: Path) -> str:
    """Hex digest of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_file(path: Path) -> None:
    """Force a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Temporary folder that is renamed to `path` when the block ends without an error.

    A temporary folder of an earlier, killed run is removed first. An error removes this one. `path` itself must not
    exist. A full disk is reported as such.
    """
    partial = path.with_name(path.name + PARTIAL)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for file in sorted(partial.rglob("*")):
            fsync_file(file)
        fsync_file(partial)
        os.rename(partial, path)
        fsync_file(path.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise HoldallError(
                f"the disk is full while writing {path}: free some space or choose another place, and run it again; "
                f"nothing half-written was kept"
            ) from error
        raise


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON document atomically: temporary file, fsync, rename."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: Path, *, format: str, version: int, error: type[HoldallError] = DataError) -> dict[str, Any]:
    """Read a JSON document and check that it is the `format` and `version` expected."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path} does not exist: is {path.parent} a {format} folder?") from None
    except (OSError, ValueError) as cause:
        raise error(f"{path} cannot be read as JSON ({cause}): make it or copy it again") from cause
    if not isinstance(document, dict) or document.get("format") != format:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise error(f"{path} is not a {format} document (format: {found!r})")
    if document.get("version") != version:
        raise error(
            f"{path} has {format} version {document.get('version')!r}, this Holdall reads version {version}: "
            f"make it again with this version"
        )
    return document


def refuse_existing(path: Path, *, overwrite: bool = False, what: str = "output folder") -> None:
    """Raise if `path` exists; with `overwrite`, remove it."""
    if not path.exists():
        return
    if not overwrite:
        raise HoldallError(f"the {what} {path} exists already: choose another name or pass --overwrite")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
