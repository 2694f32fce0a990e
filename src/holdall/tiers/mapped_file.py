"""Files of zeros in memory whose disk space is reserved: rows of tables on disk.

The system kills a process (SIGBUS) that writes to a mapped page for which the disk has no space left, so space is
reserved before a file is mapped. (File systems that copy on write, such as Btrfs and ZFS, may still run out of it.)
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.common.sizes import readable_bytes

RESIDENT_BYTES = 1 << 30
"""Mapped pages of a file that may stay resident before the process releases them (the page cache keeps them)."""
ZEROS = 1 << 22
"""Bytes written at a time where the system cannot reserve space."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def exceeds_resident(num_bytes: int) -> bool:
    """Whether a file of so many bytes is larger than what may stay resident."""
    return num_bytes > RESIDENT_BYTES


def refuse_full_disk(folder: Path, num_bytes: int) -> None:
    """Raise unless the disk of a folder, which need not exist yet, has so many bytes left."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise ConfigError(
            f"the rows of tables on disk take {readable_bytes(num_bytes)} and the disk of {folder} has "
            f"{readable_bytes(free)} left: free {readable_bytes(num_bytes - free)}, or use another disk (--out of a "
            f"run, TMPDIR of an evaluation)"
        )


class MappedFile:
    """New file of `num_bytes` zeros on the disk of a folder, mapped into memory.

    It has no name, so nothing is left of it when the process ends, in whatever way, and no one else can truncate it.
    """

    def __init__(self, folder: Path, num_bytes: int):
        self.num_bytes = num_bytes
        if not hasattr(mmap, "MADV_RANDOM"):
            raise ConfigError("rows of tables on disk need madvise, which this system does not have: use --tail host")
        refuse_full_disk(folder, num_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        try:
            _reserve(self.file.fileno(), num_bytes)
        except OSError as error:
            self.file.close()
            if error.errno not in NO_SPACE:
                raise
            raise ConfigError(
                f"the disk of {folder} cannot hold the {readable_bytes(num_bytes)} of a file with rows of tables "
                f"({error.strerror}): free some, raise the quota, or use another disk (--out of a run, TMPDIR of an "
                f"evaluation)"
            ) from error
        self._map = mmap.mmap(self.file.fileno(), num_bytes)
        self._map.madvise(mmap.MADV_RANDOM)  # no readahead: the rows of a step are scattered
        self._accessed = 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._map, dtype=dtype).view(*shape)

    def before_access(self, num_rows: int) -> None:
        """Bound what is resident."""
        self._accessed += num_rows * mmap.PAGESIZE
        if self._accessed > RESIDENT_BYTES and exceeds_resident(self.num_bytes):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._accessed = 0


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Give an empty file so many bytes of zeros, and blocks on the disk for all of them."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
        else:
            return
    zeros = memoryview(bytes(min(ZEROS, num_bytes)))
    written = 0
    while written < num_bytes:
        written += os.pwrite(descriptor, zeros[: num_bytes - written], written)
    os.fsync(descriptor)  # a file system that allocates late reports a full disk here
