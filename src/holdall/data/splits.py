"""Assignment of rows to splits by a hash of the seed and the row's number: it never changes and needs no memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SPLITS = ("train", "valid", "test")
TRAIN, VALID, TEST = range(3)


def draw_splits(numbers: npt.NDArray[np.int64], seed: int, valid: float, test: float) -> npt.NDArray[np.uint8]:
    """[R] splits (0 train, 1 valid, 2 test) of the rows with these numbers.

    Each row draws u in [0, 1) from (seed, number): test when u < test, valid when u < test + valid. So the test rows
    stay the same whatever `valid` is.
    """
    uniform = hash_numbers(numbers, seed) / 2.0**64
    splits = np.zeros(len(numbers), dtype=np.uint8)
    splits[uniform < test + valid] = VALID
    splits[uniform < test] = TEST
    return splits


def hash_numbers(numbers: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint64]:
    """SplitMix64 of each number, in a stream of its own for each seed."""
    return _mix(numbers.astype(np.uint64) + _mix(np.array([seed & (2**64 - 1)], dtype=np.uint64)))


def _mix(x: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
