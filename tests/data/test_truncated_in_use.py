"""Data files that are truncated while they are mapped: refused by name before their pages are read.

One byte is cut off: the size has changed, and all pages can still be read, so that a test that fails does not end by
SIGBUS. (`tests/faults` cuts off everything.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from holdall.common.errors import DataError
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader, Shuffle
from holdall.data.synthetic import SyntheticConfig, write_prepared

TOLD = r"train-00001\.arrow was truncated while it was in use \([\d,]+ of [\d,]+ bytes are left\): copy"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """Files of 100, 100 and 40 rows."""
    monkeypatch.setattr("holdall.data.synthetic.ROWS_PER_FILE", 100)
    config = SyntheticConfig(rows=240, cardinalities=(30, 9), num_dense=2, bag_lengths=(1, 3))
    write_prepared(config, tmp_path / "data", valid=0.0, test=0.0)
    found = DataSet(tmp_path / "data")
    assert [file.rows for file in found.files] == [100, 100, 40]
    return found


def cut(data: DataSet, file: int = 1) -> None:
    path = data.folder / data.files[file].name
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    "read",
    [
        lambda data: data.slice(150, 160),
        lambda data: data.slice(90, 210),
        lambda data: data.join((0, 5), (199, 201)),
        lambda data: data.take(np.array([3, 150])),
        DataSet.labels,
        DataSet.probability,
    ],
)
def test_rows_of_the_file_are_refused(read: Callable[[DataSet], object], data: DataSet) -> None:
    read(data)
    cut(data)
    with pytest.raises(DataError, match=TOLD):
        read(data)


def test_rows_of_other_files_are_read(data: DataSet) -> None:
    cut(data)
    assert len(data.slice(0, 100)) == 100
    assert len(data.take(np.array([0, 220]))) == 2


@pytest.mark.parametrize("shuffle", ["none", "rows", "blocks", "chunks"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_that_were_made_before_are_refused_too(
    shuffle: Shuffle, prefetch: int, data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of the file that a thread had made ahead of use would be read after the truncation."""
    monkeypatch.setattr("holdall.data.loader.COPIED_ROWS", 30)
    loader = Loader(data, 30, shuffle=shuffle, prefetch=prefetch)
    batches = loader.epoch(0)
    next(batches)
    for file in range(3):
        cut(data, file)
    num_copies = prefetch + 1 if shuffle in ("rows", "chunks") else 0  # copies that were made before may be used
    with pytest.raises(DataError, match="was truncated while it was in use"):
        list(islice(batches, num_copies + 1))
