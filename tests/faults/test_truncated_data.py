"""Data file that is truncated to nothing while a run trains on it: a sentence, not SIGBUS."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.launch import SMALL

pytestmark = pytest.mark.slow

TRUNCATE_AFTER_STEP = """
import os, sys
from collections import deque
from itertools import islice
from holdall.cli import main
from holdall.data import loader
from holdall.training.trainer import Trainer

path, *words = sys.argv[1:]
original = Trainer.train_step

def prefetched(items, depth, name):
    ahead = deque()
    while ahead.extend(islice(items, depth + 1 - len(ahead))) or ahead:
        yield ahead.popleft()

def train_step(self, *batches):
    loss = original(self, *batches)
    if self.step == 3:
        os.truncate(path, 0)
    return loss

loader.prefetched, Trainer.train_step = prefetched, train_step
main(words)
"""
"""Views are made ahead of use, but not by a thread, which could read one at the very moment."""


@pytest.mark.parametrize("more", [[], ["--strategy", "split", "--hot-bytes", "1KB"]])
def test_a_run_ends_with_the_name_of_the_file(more: list[str], clicks: Path, tmp_path: Path) -> None:
    shutil.copytree(clicks, tmp_path / "data")
    path = tmp_path / "data" / "train-00000.arrow"
    words = ["train", tmp_path / "data", "--out", tmp_path / "run", *SMALL, *more]
    found = subprocess.run(
        [sys.executable, "-c", TRUNCATE_AFTER_STEP, path, *words], capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 2, (found.returncode, found.stderr)
    assert f"{path} was truncated while it was in use (0 of" in found.stderr
    assert "Traceback" not in found.stderr
