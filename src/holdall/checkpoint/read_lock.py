"""Lock of a checkpoint that is read, so that the run that writes it does not remove it meanwhile.

Readers share the lock (flock on the folder); who removes a checkpoint needs it alone. It is released when its process
ends, however it ends. Where the file system has no such locks, nothing is locked.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context in which no run removes the checkpoint at `path`, unless it is being removed already."""
    with _open(path) as descriptor:
        if descriptor is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextmanager
def removing(path: Path) -> Iterator[bool]:
    """Whether the checkpoint at `path` may be removed inside the context: no process reads it."""
    with _open(path) as descriptor:
        is_free = True
        if descriptor is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                is_free = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        yield is_free


@contextmanager
def _open(path: Path) -> Iterator[int | None]:
    """Descriptor of a folder, closed at the end; None if there is no such folder, or no such locks."""
    descriptor = None
    if fcntl is not None:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)
