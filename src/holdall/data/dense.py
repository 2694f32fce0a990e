"""Transforms of dense columns, and the statistics that `standard` needs."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from holdall.data.rows import FLOAT32_MAX
from holdall.data.schema import DenseColumn

Array = npt.NDArray[Any]


def transform(raw: Array, column: DenseColumn) -> Array:
    """[R] float32 from [R] float64 with NaN where missing; computed in float64 and rounded once.

    A value beyond float32, as `standard` has for one that is far from all of the training rows, becomes its largest.
    """
    if column.transform == "log":
        values = np.log1p(np.maximum(raw, 0.0))
    elif column.transform == "standard":
        with np.errstate(over="ignore"):
            values = np.clip((raw - column.mean) / column.std, -FLOAT32_MAX, FLOAT32_MAX)
    else:
        values = raw
    return np.where(np.isnan(raw), column.missing, values).astype(np.float32)


class Moments:
    """Mean and standard deviation of a column over blocks of it (Chan et al.: pairwise merging, stable)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0
        """Sum of squared distances from the mean."""

    def add(self, raw: Array) -> None:
        """Add values [R] float64; NaN is missing and not counted."""
        values = raw[~np.isnan(raw)]
        if not len(values):
            return
        mean = float(values.mean())
        total = self.count + len(values)
        difference = mean - self.mean
        self._squares += float(np.square(values - mean).sum()) + difference**2 * self.count * len(values) / total
        self.mean += difference * len(values) / total
        self.count = total

    @property
    def std(self) -> float:
        """Population standard deviation; 1 for a constant column, which then becomes 0 everywhere."""
        std = float(np.sqrt(self._squares / self.count)) if self.count else 0.0
        return std if std > 0 else 1.0

    def column(self, name: str, kind: Literal["log", "standard", "none"]) -> DenseColumn:
        if kind != "standard":
            return DenseColumn(name=name, transform=kind)
        return DenseColumn(name=name, transform=kind, mean=self.mean, std=self.std)
