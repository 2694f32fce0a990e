"""Errors of the operating system as sentences."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from holdall.common.system_errors import CURES, explained


@pytest.mark.parametrize("number", CURES)
def test_every_error_names_its_file_and_the_cure(number: int) -> None:
    said = explained(OSError(number, os.strerror(number), "folder/file"), "out")
    assert said == f"folder/file: {CURES[number]}"
    assert explained(OSError(number, os.strerror(number)), "out") == f"out: {CURES[number]}"


def test_a_full_disk_is_that_of_the_copy() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "source", None, "copy")
    assert explained(full, "out") == f"copy: {CURES[errno.ENOSPC]}"
    absent = OSError(errno.ENOENT, os.strerror(errno.ENOENT), "source", None, "copy")
    assert explained(absent, "out") == f"source: {CURES[errno.ENOENT]}"


def test_errors_without_a_cure_keep_the_words_of_the_system() -> None:
    assert explained(OSError(errno.ENXIO, "No such device", b"x"), "out") == (
        "x: No such device; check the path and the disk"
    )
    assert explained(OSError("two\nlines"), "out") == "out: two; check the path and the disk"


def test_names_that_are_not_utf8_are_shown_with_escapes() -> None:
    name = os.fsdecode(b"caf\xe9")
    with pytest.raises(UnicodeEncodeError) as stop:
        name.encode()
    assert explained(stop.value, "out") == "caf\\udce9: the name is not valid UTF-8; rename the file or folder"
    assert str(explained(OSError(errno.ENOENT, "No such file", name), "out")).startswith("caf\\udce9: it does not")


def test_memory_of_python_numpy_and_torch() -> None:
    for ask in (lambda: bytearray(2**62), lambda: np.empty(2**59), lambda: torch.empty(2**59)):
        with pytest.raises((MemoryError, RuntimeError)) as stop:
            ask()
        assert "there is not enough memory" in str(explained(stop.value, "out"))
    assert "a number is too large" in str(explained(OverflowError("int too big to convert"), "out"))


def test_errors_of_files_that_libraries_raise_as_their_own() -> None:
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert explained(error, "out") == f"out: {CURES[errno.ENOSPC]}"


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RuntimeError("x"), AssertionError("(os error 28)")])
def test_other_errors_are_not_explained(error: Exception) -> None:
    assert explained(error, "out") is None
