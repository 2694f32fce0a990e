"""Copies of runs of rows: equal to an index of every row, whatever files and remainders the runs have."""

from __future__ import annotations

import numpy as np
import pytest

from holdall.data.chunk_order import ChunkOrder, Runs
from holdall.data.copy_runs import copy_runs


@pytest.mark.parametrize("seed", range(20))
def test_copies_equal_an_index_of_every_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, 1000, (int(rng.integers(1, 60)), 3)) for _ in range(4)]
    starts = [0, *np.cumsum([len(part) for part in parts]).tolist()]
    everything = np.concatenate(parts)
    runs = Runs(rng.integers(0, starts[-1] - 8, 40), np.where(rng.random(40) < 0.8, 8, rng.integers(1, 9, 40)))
    assert np.array_equal(copy_runs(parts, starts, runs), everything[runs.rows()])
    order = ChunkOrder(starts[-1], 4096, (seed,))
    own = order.runs(5, starts[-1] - 2)
    labels = [part[:, 0].astype(np.uint8) for part in parts]
    assert np.array_equal(copy_runs(labels, starts, own), everything[own.rows(), 0].astype(np.uint8))
    assert copy_runs(parts, starts, order.runs(3, 3)).shape == (0, 3)
