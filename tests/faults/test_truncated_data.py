"""Data file that is truncated to nothing while a run trains on it: a sentence, not SIGBUS."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from holdall.data import loader
from holdall.training.trainer import Trainer
from tests.faults.launch import SMALL, start

pytestmark = pytest.mark.slow


def truncate_after_a_step(path: Path) -> None:
    """Views are made ahead of use, but not by a thread, which could read one at the very moment."""
    original = Trainer.train_step

    def prefetched(items: Iterator[Any], depth: int, name: str) -> Iterator[Any]:
        ahead: deque[Any] = deque()
        while ahead.extend(islice(items, depth + 1 - len(ahead))) or ahead:
            yield ahead.popleft()

    def train_step(self: Trainer, *batches: Any) -> float | None:
        loss = original(self, *batches)
        if self.step == 3:
            os.truncate(path, 0)
        return loss

    loader.prefetched, Trainer.train_step = prefetched, train_step  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("more", [[], ["--strategy", "split", "--hot-bytes", "1KB"]])
def test_a_run_ends_with_the_name_of_the_file(more: list[str], clicks: Path, tmp_path: Path) -> None:
    shutil.copytree(clicks, tmp_path / "data")
    path = tmp_path / "data" / "train-00000.arrow"
    words = ["train", str(tmp_path / "data"), "--out", str(tmp_path / "run"), *SMALL, *more]
    process = start(words, tmp_path / "said", partial(truncate_after_a_step, path))
    process.join(100)
    said = (tmp_path / "said").read_text(encoding="utf-8")
    assert process.exitcode == 2, (process.exitcode, said)
    assert f"{path} was truncated while it was in use (0 of" in said
    assert "Traceback" not in said
