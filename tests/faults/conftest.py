"""Small data set, and the results of runs on it without faults."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from holdall.data.synthetic import SyntheticConfig, write_prepared
from tests.faults.launch import Launched, launch


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """800 clicks, of which 640 to train on: an epoch of 10 batches of 64."""
    out = tmp_path_factory.mktemp("faults") / "clicks"
    write_prepared(SyntheticConfig(rows=800, cardinalities=(300, 40, 9), num_dense=2), out)
    return out


@pytest.fixture(scope="session")
def undisturbed(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], Launched]:
    """Run with these options and without faults; each is made once."""
    made: dict[tuple[str, ...], Launched] = {}

    def make(words: Sequence[str]) -> Launched:
        key = tuple(words)
        if key not in made:
            made[key] = launch(clicks, tmp_path_factory.mktemp("undisturbed") / "run", words)
            assert made[key].succeeded
        return made[key]

    return make


@pytest.fixture(scope="session")
def same_as_undisturbed(undisturbed: Callable[[Sequence[str]], Launched]) -> Callable[[Launched, Sequence[str]], None]:
    """Compare a run with the one without faults: the rows of its log and its last tensors, to the bit.

    Bits can be compared as processes are as many, sums are in their order, and `--deterministic` fixes the rest.
    """

    def compare(found: Launched, words: Sequence[str]) -> None:
        expected = undisturbed(words)
        assert found.succeeded, found.said(0) + found.said(1)
        assert found.rows() == expected.rows()
        tensors, others = found.tensors(), expected.tensors()
        assert tensors.keys() == others.keys()
        assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
        assert [path.name for path in (found.run / "checkpoints").iterdir() if path.suffix] == []

    return compare


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system: a full disk is tested by injection alone")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
