"""Files that are compared with their size and SHA-256 before they are used, once per file and machine.

    FileCheck({path: FileHash.of(path)}, listed_in="schema.json", cure="copy it again").result()

A check reads whole files, several at a time. A file that passed is remembered in the user's cache folder by its path,
size, times, inode and hash, so that the next process does not read it again. The memory saves a read and nothing else:
where it is damaged, or cannot be written, files are read again. `HOLDALL_REMEMBER_CHECKS=0` turns it off.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from holdall.common.decode import Count
from holdall.common.errors import DataError, HoldallError
from holdall.common.files import PARTIAL, cache_folder, sha256
from holdall.common.worker_thread import WorkerThread

REMEMBER = "HOLDALL_REMEMBER_CHECKS"
MAX_THREADS = 4
MAX_FOLDERS = 256
"""Folders whose files are remembered, the last checked ones."""
MAX_FILES = 100_000
"""Files that are remembered of a folder."""
SETTLED_NS = 2_000_000_000
"""A file that was changed less than this before a check is not remembered: another change could leave the same time,
which file systems round to a tick of the clock, and some to two seconds."""

State: TypeAlias = tuple[int, int, int, int, int, str]
"""Size, times of change in nanoseconds, inode and device of a file, and the SHA-256 that it had."""

_known: dict[str, dict[str, State]] = {}
"""Files that passed a check of this process or of an earlier one, by the key of their folder and by name."""


@dataclass(frozen=True, kw_only=True)
class FileHash:
    """Size and content of a file, as its manifest lists it."""

    bytes: Count
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileHash:
        return cls(bytes=path.stat().st_size, sha256=sha256(path))


class FileCheck:
    """Check of files, which runs on worker threads from construction on; `result` waits for it.

    Raises at once where a file is missing or has another size. `listed_in` is the name of the manifest and `cure` the
    advice, for error messages. Without `remember` every file is read, whatever an earlier check has found.
    """

    def __init__(
        self,
        files: Mapping[Path, FileHash],
        *,
        listed_in: str,
        cure: str,
        error: type[HoldallError] = DataError,
        remember: bool = True,
    ):
        self._listed_in, self._cure, self._error = listed_in, cure, error
        self._started_ns = time.time_ns()
        remembers = remember and os.environ.get(REMEMBER, "1") != "0"
        self._memory = {folder: _recall(folder) for folder in {path.parent for path in files}} if remembers else {}
        self._files = {path: file for path, file in files.items() if not self._is_known(path, file)}
        self.num_bytes = sum(file.bytes for file in self._files.values())
        """Bytes of the files that no earlier check has read."""
        count = min(MAX_THREADS, os.cpu_count() or 1, len(self._files))
        self._threads = [WorkerThread(f"check-{number}") for number in range(count)]
        self._hashes: dict[Path, Future[State]] = {
            path: self._threads[number % count].submit(_hashed, path) for number, path in enumerate(self._files)
        }

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return all(future.done() for future in self._hashes.values())

    def result(self) -> None:
        """Wait until all files are read; raise if one was changed."""
        passed: dict[Path, dict[str, State]] = {}
        try:
            for path, future in self._hashes.items():
                try:
                    state = future.result()
                except OSError as error:
                    raise self._error(f"{path} cannot be read ({error}): {self._cure}") from error
                if state[-1] != self._files[path].sha256:
                    raise self._error(
                        f"{path} was changed: its SHA-256 is not the one in {self._listed_in}; {self._cure}"
                    )
                if path.parent in self._memory and max(state[1], state[2]) < self._started_ns - SETTLED_NS:
                    passed.setdefault(path.parent, {})[path.name] = state
        finally:
            self.cancel()
        for folder, states in passed.items():
            _remember(folder, self._memory[folder] | states)
        self._hashes = {}

    def cancel(self) -> None:
        """Skip the files that have not been read yet."""
        for future in self._hashes.values():
            future.cancel()
        for thread in self._threads:
            thread.shutdown(wait=False)

    def _is_known(self, path: Path, file: FileHash) -> bool:
        """Whether the file passed an earlier check; raises where its size alone tells that it was changed."""
        try:
            found = path.stat()
        except FileNotFoundError:
            raise self._error(f"{path} is missing, but {self._listed_in} lists it: {self._cure}") from None
        except OSError as error:
            raise self._error(f"{path} cannot be read ({error}): {self._cure}") from error
        if found.st_size != file.bytes:
            state = "truncated" if found.st_size < file.bytes else "not the file that was written"
            raise self._error(
                f"{path} has {found.st_size:,} bytes instead of {file.bytes:,}, so it is {state}: {self._cure}"
            )
        known = self._memory.get(path.parent, {}).get(path.name)
        return known is not None and known == _state(found, file.sha256)


def _state(found: os.stat_result, digest: str) -> State:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev, digest


def _hashed(path: Path) -> State:
    """State of a file, read now. The file is not settled, and so not remembered, if it changes meanwhile."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _state(os.fstat(file.fileno()), digest)


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory_file(folder: Path) -> Path:
    key = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:32]
    return cache_folder() / "checked" / f"{key}.json"


def _recall(folder: Path) -> dict[str, State]:
    """States of the files of a folder that passed an earlier check."""
    path = _memory_file(folder)
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        found = {name: tuple(state) for name, state in json.loads(path.read_bytes()).items()}
    return {**found, **_known.get(path.name, {})}


def _remember(folder: Path, states: dict[str, State]) -> None:
    """Keep the states of the files of a folder; on disk, where that can be written."""
    path = _memory_file(folder)
    states = dict(list(states.items())[-MAX_FILES:])
    _known[path.name] = states
    partial = path.with_name(f"{path.stem}-{os.getpid()}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(states), encoding="utf-8")
        os.replace(partial, path)
        remembered = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        for old in remembered[:-MAX_FOLDERS]:
            old.unlink(missing_ok=True)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
