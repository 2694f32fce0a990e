"""Mapped files: their space is reserved, a full disk is a sentence, and nothing is left of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.tiers.mapped_file import ZEROS, MappedFile

SIZE = ZEROS + 4 * 1001
"""More than is written at a time where the system cannot reserve space, and no whole number of blocks."""


def failing(number: int) -> object:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def without_fallocate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)


def unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP), raising=False)


@pytest.mark.parametrize("change", [None, without_fallocate, unsupported])
def test_all_blocks_are_allocated_at_once(change: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if callable(change):
        change(monkeypatch)
    mapped = MappedFile(tmp_path / "new" / "folder", SIZE)
    found = os.fstat(mapped.file.fileno())
    assert found.st_size == SIZE
    assert found.st_blocks * 512 >= SIZE
    values = mapped.tensor((SIZE // 4,), torch.int32)
    assert not values.any()
    values[-1] = 7
    assert os.pread(mapped.file.fileno(), 4, SIZE - 4) == (7).to_bytes(4, "little")


def test_the_file_has_no_name(tmp_path: Path) -> None:
    mapped = MappedFile(tmp_path, SIZE)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(mapped.file.fileno()).st_nlink == 0


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """No disk here has space for 16 TiB: the error names the missing bytes."""
    with pytest.raises(ConfigError, match=r"on disk take .* TB and the disk of .* left: free .* TB, or use another"):
        MappedFile(tmp_path / "new", 1 << 44)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("function", ["posix_fallocate", "pwrite", "fsync"])
def test_a_disk_that_fills_up_meanwhile(
    function: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if function != "posix_fallocate":
        without_fallocate(monkeypatch)
    monkeypatch.setattr(os, function, failing(number), raising=False)
    with pytest.raises(ConfigError, match=rf"cannot hold the .* \({os.strerror(number)}\): free some, raise the quota"):
        MappedFile(tmp_path, SIZE)
