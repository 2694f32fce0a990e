"""Whether all ids of a batch are rows of their tables, found out in one pass over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[Any]

FOLDED = 64
"""Samples that are compared side by side where the ids of a sample lie together: a few features are too short a line
for the processor to work on many at a time. 16,384 samples of 26 features take 0.13 ms instead of 0.57, on one core."""


def all_below(values: Tensor, limits: Tensor) -> bool:
    """Whether ids [F, B], on the host, are 0 or more and below the limit of their feature [F]."""
    if values.shape[1] == 0:
        return True
    found = values.numpy()
    found = found.view(np.dtype(f"u{found.itemsize}"))  # a negative id is larger than any other without its sign
    largest = _largest_of_samples(found.T) if found.T.flags.c_contiguous else found.max(axis=1)
    return bool((largest.astype(np.uint64) < limits.numpy().astype(np.uint64)).all())


def _largest_of_samples(ids: Array) -> Array:
    """[F]: the largest ids of samples [B, F] whose rows follow each other."""
    samples, features = ids.shape
    folded = samples // FOLDED * FOLDED
    if folded == 0:
        return ids.max(axis=0)
    largest = ids[:folded].reshape(-1, FOLDED * features).max(axis=0).reshape(FOLDED, features).max(axis=0)
    return largest if folded == samples else np.maximum(largest, ids[folded:].max(axis=0))
