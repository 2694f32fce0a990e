"""Errors of the operating system and of memory, as one sentence that names the place and the cure.

A disk that is full or read-only, a path through a file, a name that is too long or not UTF-8, a size that no memory
holds: they can come up in every command, at any line that touches a file, so they are put into words in one place.
"""

from __future__ import annotations

import errno
import os
import re

CURES = {
    errno.ENOSPC: "the disk is full; free some space or choose another place, and run it again",
    errno.EDQUOT: "the quota of the disk is used up; free some space or choose another place, and run it again",
    errno.EROFS: "the disk is read-only; choose another place",
    errno.EACCES: "there is no permission; check its owner and mode, or choose another place",
    errno.EPERM: "there is no permission; check its owner and mode, or choose another place",
    errno.ENOENT: "it does not exist; check the path",
    errno.ENOTDIR: "a part of the path is a file and not a folder; check the path",
    errno.EISDIR: "it is a folder; name a file",
    errno.EEXIST: "it exists already; choose another name",
    errno.ENOTEMPTY: "it exists already and is not empty; choose another name",
    errno.ENAMETOOLONG: "the name is too long for the file system; choose a shorter one",
    errno.ELOOP: "its links lead in a circle; remove one of them",
    errno.EBUSY: "it is in use, or a disk is mounted there; choose another place",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine; end other processes",
    errno.EFBIG: "it is larger than the file system or its limit (ulimit -f) allows; choose another place",
    errno.EIO: "the disk cannot read or write it; check the disk, and copy the file again",
    errno.ENOMEM: "there is not enough memory; use smaller sizes, or a machine with more",
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
OUT_OF_MEMORY = re.compile("can't allocate memory|not enough memory|out of memory|bad_alloc|calculation overflowed")


def explained(error: BaseException, place: str) -> str | None:
    """A sentence about an error of the system; None if it is of another kind. `place` is where no file is named."""
    if isinstance(error, UnicodeEncodeError):
        return f"{_readable(error.object)}: the name is not valid UTF-8; rename the file or folder"
    if isinstance(error, OSError):
        return _about_file(error, place)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))):
        return f"{place}: there is not enough memory ({_first_line(error)}); use smaller sizes, or a machine with more"
    if isinstance(error, OverflowError):
        return f"{place}: a number is too large ({_first_line(error)}); use smaller sizes and seeds"
    if isinstance(error, RuntimeError) and "Symlink loop" in str(error):
        return f"{place}: {CURES[errno.ELOOP]}"
    if isinstance(error, ValueError) and "null byte" in str(error):
        return f"{place}: a path has a null byte in it; check the paths"
    return _about_library(error, place)


def _about_file(error: OSError, place: str) -> str:
    path = error.filename
    if error.errno in FULL and error.filename2 is not None:  # of a copy, the file that was written
        path = error.filename2
    name = place if path is None else _readable(os.fsdecode(path))
    return f"{name}: {CURES.get(error.errno or 0) or f'{_first_line(error)}; check the path and the disk'}"


def _about_library(error: BaseException, place: str) -> str | None:
    """Errors of files that safetensors and Arrow raise as their own: their text has the number of the system's."""
    found = re.search(r"\((?:os error|errno) (\d+)\)|\[errno (\d+)\]", str(error))
    if found is None or isinstance(error, AssertionError):
        return None
    number = int(found.group(1) or found.group(2))
    return f"{place}: {CURES.get(number) or os.strerror(number)}"


def _first_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return _readable((text.strip().splitlines() or [type(error).__name__])[0].rstrip("."))


def _readable(text: str) -> str:
    """A text that every terminal can show."""
    return text.encode("utf-8", "backslashreplace").decode()
