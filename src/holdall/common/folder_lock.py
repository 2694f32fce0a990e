"""A folder that one process at a time writes to: held until it lets go or ends, however it ends.

The lock is on the folder itself, so it leaves no file behind. Where the file system has no such locks, nothing is held
and nothing refused.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdall.common.errors import HoldallError

try:
    import fcntl
except ImportError:  # not a system with such locks
    fcntl = None  # type: ignore[assignment]

PATIENCE = 3.0
"""Seconds that a process which is about to end may take to let go, as when torchrun starts all of them again."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder that is there; raise if another process does."""
    descriptor = _lock(folder)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def refuse_locked(folder: Path, patience: float = PATIENCE) -> None:
    """Raise if another process holds the folder, and goes on to for as long as `patience`; one that is not there is
    free."""
    if not folder.is_dir():
        return
    deadline = time.monotonic() + patience
    while True:
        try:
            descriptor = _lock(folder)
        except HoldallError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
        else:
            if descriptor is not None:
                os.close(descriptor)
            return


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder while it is open; None where there are no such locks."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with suppress(OSError):
            os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise HoldallError(
                f"another process is training in {folder}: wait for it or end it, or choose another folder"
            ) from None
        return None
    return descriptor
