"""`FileCheck`: changed files are found, checked ones are remembered, and the memory never hides a change."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from holdall.common import checked_files
from holdall.common.checked_files import FileCheck, FileHash
from holdall.common.errors import CheckpointError, DataError
from holdall.common.files import content_hash, read_json, write_json
from tests.edits import flip_bit, swap

LONG_AGO = time.time_ns() - 10**12


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and a process that has checked nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(checked_files.REMEMBER, raising=False)
    monkeypatch.setattr(checked_files, "_known", {})
    monkeypatch.setattr(checked_files, "SETTLED_NS", -(10**12))  # files of a test count as old
    return tmp_path / "cache" / "holdall" / "checked"


@pytest.fixture
def files(tmp_path: Path) -> dict[Path, FileHash]:
    """Six files of one size in two folders."""
    made = {}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number in range(3):
            path = tmp_path / folder / f"{number}.bin"
            path.write_bytes(f"{folder}{number}".encode() * 500)
            made[path] = FileHash.of(path)
    return made


def check(files: dict[Path, FileHash], remember: bool = True) -> int:
    """Check the files; the bytes that had to be read."""
    checking = FileCheck(files, listed_in="list.json", cure="copy it", remember=remember)
    checking.result()
    return checking.num_bytes


def forget_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_files, "_known", {})


def test_every_changed_file_is_found(files: dict[Path, FileHash]) -> None:
    assert check(files) == 6000
    for path in files:
        content = path.read_bytes()
        flip_bit(path)
        with pytest.raises(DataError, match=rf"{path.name} was changed: .* in list\.json; copy it"):
            check(files)
        path.write_bytes(content)
    first, second = list(files)[:2]
    swap(first, second)
    with pytest.raises(DataError, match="was changed"):
        check(files)


def test_missing_and_truncated_files_raise_at_once(files: dict[Path, FileHash]) -> None:
    first, second = list(files)[:2]
    first.write_bytes(b"x")
    with pytest.raises(DataError, match=r"0\.bin has 1 bytes instead of 1,000, so it is truncated: copy it"):
        FileCheck(files, listed_in="list.json", cure="copy it")
    first.unlink()
    with pytest.raises(CheckpointError, match=r"0\.bin is missing, but list\.json lists it: copy it"):
        FileCheck(files, listed_in="list.json", cure="copy it", error=CheckpointError)
    del files[first]
    second.unlink()
    second.mkdir()
    with pytest.raises(DataError, match=r"1\.bin (has|cannot be read)"):
        check(files)


def test_a_checked_file_is_not_read_again(files: dict[Path, FileHash], monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(files) == 6000
    assert check(files) == 0
    forget_process(monkeypatch)
    assert check(files) == 0  # another process of this machine
    assert check(files, remember=False) == 6000
    monkeypatch.setenv(checked_files.REMEMBER, "0")
    assert check(files) == 6000


@pytest.mark.parametrize("restored", ["mtime", "nothing"])
def test_a_change_after_the_check_is_found(files: dict[Path, FileHash], restored: str) -> None:
    check(files)
    path = next(iter(files))
    before = path.stat()
    flip_bit(path)
    if restored == "mtime":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match="was changed"):
        check(files)


def test_a_remembered_file_must_have_the_hash_asked_for(files: dict[Path, FileHash]) -> None:
    check(files)
    path = next(iter(files))
    with pytest.raises(DataError, match="was changed"):
        check({path: FileHash(bytes=1000, sha256="0" * 64)})


def test_a_file_of_this_moment_is_not_remembered(
    files: dict[Path, FileHash], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(checked_files, "SETTLED_NS", 10**12)
    assert check(files) == 6000
    assert check(files) == 6000
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"0.bin": 7}', b'{"0.bin": [1, 2]}', b"[" * 100_000])
def test_a_damaged_memory_does_no_harm(
    files: dict[Path, FileHash], cache: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    check(files)
    assert len(list(cache.iterdir())) == 2
    for path in cache.iterdir():
        path.write_bytes(content)
    forget_process(monkeypatch)
    assert check(files) == 6000
    forget_process(monkeypatch)
    assert check(files) == 0


def test_a_cache_that_cannot_be_written_does_no_harm(
    files: dict[Path, FileHash], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("not a folder")
    assert check(files) == 6000
    assert check(files) == 0  # the process remembers
    forget_process(monkeypatch)
    assert check(files) == 6000


def test_the_memory_is_bounded(files: dict[Path, FileHash], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_files, "MAX_FOLDERS", 1)
    check(files)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(checked_files, "MAX_FILES", 2)
    forget_process(monkeypatch)
    check(files)
    forget_process(monkeypatch)
    assert check(files) >= 4000


def test_a_cancelled_check_leaves_files_unread(files: dict[Path, FileHash]) -> None:
    checking = FileCheck(files, listed_in="list.json", cure="copy it")
    checking.cancel()
    assert check(files) == 6000


def test_a_json_document_knows_its_content(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"format": "f", "version": 1, "sizes": {10: 0.1, 9: float("nan")}}, hashed=True)
    document = read_json(path, dict[str, Any], format="f", version=1)
    assert set(document) == {"format", "version", "sizes"}
    assert content_hash({"b": 1, "a": [2.5]}) == content_hash({"a": (2.5,), "b": 1})
    text = path.read_text()
    path.write_text(text.replace("\n", "").replace(" ", ""))
    assert read_json(path, dict[str, Any], format="f", version=1)["sizes"]["10"] == 0.1
    path.write_text(text.replace("0.1", "0.2"))
    with pytest.raises(DataError, match=r"a\.json was changed after it was written: .*make it or copy it again"):
        read_json(path, dict[str, Any], format="f", version=1)
