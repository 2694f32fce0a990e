"""Lock of a folder for one writing process, released when that process ends, however it ends.

The lock is on the folder itself (flock), so there is no lock file. Where the file system has no such locks, nothing is
locked.
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
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK_TIMEOUT = 3.0
"""Seconds to wait for a process that is about to end, as when torchrun restarts all of them."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an existing folder; raise if another process has locked it."""
    descriptor = _lock(folder)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def refuse_locked(folder: Path, timeout: float = LOCK_TIMEOUT) -> None:
    """Raise if another process keeps the folder locked for `timeout` seconds; a missing folder is not locked."""
    if not folder.is_dir():
        return
    deadline = time.monotonic() + timeout
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
    """Descriptor that locks the folder while it is open; None where there are no such locks."""
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
