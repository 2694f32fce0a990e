"""Files that are either complete or absent: atomic writes, hashes, JSON documents with a format and a version."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdall.common.decode import decode, parse_json, shown
from holdall.common.errors import DataError, HoldallError
from holdall.common.sizes import readable_bytes

T = TypeVar("T")

PARTIAL = ".partial"  # suffix of files and folders that are being written
MAX_TEXT_BYTES = 1 << 28
"""Largest JSON or TOML file that is read: documents of Holdall have a few MB at most."""
HASH_KEY = "sha256"  # key of a JSON document's own hash


def sha256(path: Path) -> str:
    """Hex digest of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_file(path: Path) -> None:
    """Force a file, or a folder's list of names, to disk; Windows does not sync the latter."""
    is_posix = hasattr(os, "O_DIRECTORY")
    if not is_posix and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if is_posix else os.O_RDWR)
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


def cache_folder() -> Path:
    """Folder for what can be made again: `$XDG_CACHE_HOME/holdall`."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "holdall"


def content_hash(document: dict[str, Any]) -> str:
    """SHA-256 of a JSON document: of its content, whatever its white space and the order of its keys."""
    content = {name: value for name, value in document.items() if name != HASH_KEY}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _has_own_hash(document: dict[str, Any]) -> bool:
    try:
        return bool(content_hash(document) == document[HASH_KEY])
    except RecursionError:
        return False


def _refuse_surrogates(document: dict[str, Any], path: Path) -> None:
    """Raise if a text has half of a surrogate pair, as file names that are not UTF-8 do: it could not be read back."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        text = error.object
        start, end = text.rfind('"', 0, error.start) + 1, text.find('"', error.start)
        name = text[start:end].encode("utf-8", "backslashreplace").decode()
        raise HoldallError(f"{name} is not valid UTF-8, so {path} cannot name it: rename the file or folder") from None


def write_json(path: Path, document: dict[str, Any], *, hashed: bool = False) -> None:
    """Write a JSON document atomically: temporary file, fsync, rename. `hashed` adds the hash of its content."""
    if hashed:
        document = json.loads(json.dumps(document))  # keys become text, as they are in the file, and are sorted as such
        document[HASH_KEY] = content_hash(document)
    _refuse_surrogates(document, path)
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


def read_json(
    path: Path,
    kind: type[T],
    *,
    format: str,
    version: int,
    error: type[HoldallError] = DataError,
    cure: str = "make it or copy it again",
) -> T:
    """Read a JSON document of the `format` and `version` expected as a `kind` (`holdall.common.decode`).

    The hash of its content is compared, and left out. Documents of earlier versions, and those that may be edited by
    hand, have none.
    """
    try:
        data = read_bounded(path)
    except FileNotFoundError:
        raise error(f"{path} does not exist: is {path.parent} a {format} folder?") from None
    except OSError as cause:
        raise error(f"{path} cannot be read as JSON ({cause}): {cure}") from cause
    document = parse_json(data, str(path), error=error, cure=cure)
    found = document.get("format") if isinstance(document, dict) else document
    if not isinstance(document, dict) or found != format:
        raise error(f"{path} is not a {format} document (format: {shown(found)}): {cure}")
    if type(document.get("version")) is not int or document["version"] != version:
        raise error(
            f"{path} has {format} version {shown(document.get('version'))}, this Holdall reads version {version}: "
            f"make it again with this version"
        )
    if HASH_KEY in document and not _has_own_hash(document):
        raise error(f"{path} was changed after it was written: its content does not have its SHA-256; {cure}")
    document.pop(HASH_KEY, None)
    if is_dataclass(kind):
        del document["format"], document["version"]
    return decode(document, kind, str(path), error=error, cure=cure)


def read_bounded(path: Path) -> bytes:
    """The content of a text file, unless it is too large to be one."""
    with path.open("rb") as file:
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {readable_bytes(MAX_TEXT_BYTES)}")
    return data


def quoted(path: str | Path) -> str:
    """A path as a shell takes it, for commands that are shown to users."""
    return shlex.quote(str(path))
