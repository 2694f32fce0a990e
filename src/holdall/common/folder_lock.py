"""Lock of an output path for one writing process, released when that process ends, however it ends.

A lock is a file beside the output, `.<name>.holdall-lock`, that names its holder. It is locked by flock while the
holder lives, and removed in the end; the file of a killed process is not locked any more, and is taken over. So a path
can be locked before it exists, and while one folder is replaced by another.

Where there is no flock, the file itself is the lock: one that a killed process left has to be removed by hand, and the
error says so.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdall.common.errors import HoldallError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

RESTART_SECONDS = 3.0
"""Seconds to wait for a process that is about to end, as when torchrun restarts all of them."""
SUFFIX = ".holdall-lock"
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextmanager
def locked(path: Path, timeout: float = 0.0) -> Iterator[None]:
    """Lock the file or folder `path`, which need not exist; raise if another process keeps it for `timeout` seconds.

    Folders above it are made, and removed again in the end if they are empty.
    """
    target = Path(os.path.realpath(path))
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    try:
        try:
            file, descriptor = _wait_for_lock(path, target, timeout)
        except OSError as error:  # a disk that is full or read-only: the lock file is not what the user named
            raise OSError(error.errno, error.strerror, str(path)) from None
        try:
            yield
        finally:
            with suppress(OSError):
                file.unlink()  # before the lock is released: later it could be that of the next holder
            os.close(descriptor)
    finally:
        with suppress(OSError):
            for parent in made:
                parent.rmdir()


def lock_file(target: Path) -> Path:
    """File that locks a path: beside it, or in the folder itself where nothing can be made beside it."""
    if target.is_dir() and not os.access(target.parent, os.W_OK):
        return target / SUFFIX
    return target.with_name(f".{target.name}{SUFFIX}")


def _wait_for_lock(path: Path, target: Path, timeout: float) -> tuple[Path, int]:
    file = lock_file(target)
    deadline = time.monotonic() + timeout
    while True:
        descriptor, has_flock = _try_lock(file)
        if descriptor is not None:
            holder = {"pid": os.getpid(), "host": socket.gethostname()}
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(holder).encode())
            return file, descriptor
        if time.monotonic() >= deadline:
            cure = "" if has_flock else f", and remove {file} if it has ended already"
            raise HoldallError(
                f"{_holder(file)} is writing to {path}: wait for it or end it{cure}, or choose another output"
            )
        time.sleep(0.1)


def _try_lock(file: Path) -> tuple[int | None, bool]:
    """Descriptor that locks the file while it is open, None if another process has it; and whether there is flock."""
    while True:
        try:
            descriptor, is_new = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            if file.is_symlink():  # one that leads nowhere exists for the first open, and not for the second
                raise HoldallError(f"the lock file {file} is a link: remove it") from None
            try:
                descriptor, is_new = os.open(file, os.O_RDWR), False
            except FileNotFoundError:  # its holder has just removed it
                continue
        found = _flock(descriptor)
        if _is_same(descriptor, file) if found else is_new and found is None:
            return descriptor, found is not None
        os.close(descriptor)
        if not found:
            return None, found is not None


def _flock(descriptor: int) -> bool | None:
    """Whether the file is now locked by this process; None where there are no such locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in TAKEN else None
    return True


def _is_same(descriptor: int, file: Path) -> bool:
    """Whether an open file still has its name: a holder that ended between opening and locking has removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _holder(file: Path) -> str:
    """The process that a lock file names, in words."""
    try:
        holder = json.loads(file.read_bytes()[:1000])
        return f"process {int(holder['pid'])} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # it has not written its name yet
        return "another process"
