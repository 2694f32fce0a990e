"""Rows of tables on a disk that is full: a sentence, or a run that has its space already; never SIGBUS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdall.data.synthetic import SyntheticConfig, write_prepared
from tests.faults.launch import SMALL

pytestmark = pytest.mark.slow

FILL_AND_WRITE = """
import os, sys
from pathlib import Path
import torch
from holdall.tiers.host_rows import DiskRows

folder = Path(sys.argv[1])
rows = DiskRows(folder, (10_000, 16), torch.float32)
with (folder / "filler").open("wb", buffering=0) as filler:
    try:
        while True:
            filler.write(bytes(4096))
    except OSError as error:
        print(error.strerror)
rows.write(torch.arange(10_000), torch.ones(10_000, 16))
print(rows.read(torch.arange(10_000)).sum().item())
"""


def test_a_disk_that_fills_up_later(small_disk: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FILL_AND_WRITE, small_disk], capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\n") == ["No space left on device", "160000.0", ""]


def test_a_disk_that_cannot_hold_all_files_together(tmp_path: Path, small_disk: Path) -> None:
    """Weights take 0.8 MB and their state as much, of 1 MiB."""
    write_prepared(SyntheticConfig(rows=2000, cardinalities=(45_000, 5000), num_dense=1), tmp_path / "data")
    words = ["train", tmp_path / "data", "--out", small_disk / "run", "--strategy", "split", "--hot-bytes", "1KB"]
    found = subprocess.run(
        [sys.executable, "-m", "holdall", *words, "--tail", "disk", "--optimizer", "adagrad", *SMALL],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.returncode == 2, found.stderr
    assert "the rows of tables on disk take" in found.stderr
    assert "Traceback" not in found.stderr
    assert not (small_disk / "run").exists()
