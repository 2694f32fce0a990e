"""Batch prefetching on a CPU; `tests/gpu` tests it on a GPU."""

from __future__ import annotations

import torch

from holdall.data.batch import Batch, Ids
from holdall.runtime.batch_prefetch import prefetch_to_device


def test_on_a_cpu_nothing_runs_ahead() -> None:
    seen = []
    batches = [Batch(torch.zeros(2, 1), Ids(torch.zeros(1, 2), None, 1), torch.zeros(2)) for _ in range(3)]
    for number, (batch, moved) in enumerate(prefetch_to_device(iter(batches), torch.device("cpu"), seen.append)):
        assert batch is moved
        assert len(seen) == number + 1
