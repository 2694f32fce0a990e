"""Rows of a prepared data set as plain arrays, between an Arrow file and a Batch.

Shapes: R rows, N dense columns, F1 one-hot features, L lookups of a bag or sequence feature.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdall.data.batch import Batch, Ids

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Ragged:
    """One list a row: list i is `values[offsets[i] : offsets[i + 1]]`. Offsets need not start at 0."""

    values: Array
    """[L] ids."""
    offsets: Array
    """[R + 1], not decreasing."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        return np.diff(self.offsets)

    @property
    def flat(self) -> Array:
        """Values of all rows, one row after the other, without unused ones at either end."""
        return self.values[int(self.offsets[0]) : int(self.offsets[-1])]

    def slice(self, start: int, stop: int) -> Ragged:
        """Rows start..stop as a view."""
        return Ragged(self.values, self.offsets[start : stop + 1])

    def take(self, rows: Array) -> Ragged:
        """A copy of the named rows, in that order."""
        starts = self.offsets[rows].astype(np.int64)
        lengths = self.offsets[rows + 1] - starts
        offsets = offsets_of(lengths)
        # Position j of the result is `starts[row] + (j - offsets[row])`, written without a loop over rows.
        positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Ragged(self.values[positions], offsets)

    @staticmethod
    def concatenate(parts: Sequence[Ragged]) -> Ragged:
        lengths = np.concatenate([part.lengths for part in parts])
        return Ragged(np.concatenate([part.flat for part in parts]), offsets_of(lengths))


def offsets_of(lengths: Array) -> npt.NDArray[np.int64]:
    """Offsets, starting at 0, of lists with these lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True)
class Columns:
    """R rows. Slices are views; `take` and `concatenate` copy."""

    label: Array
    """[R] uint8."""
    dense: Array
    """[R, N] float32."""
    ids: Array
    """[R, F1] int32 or int64: the one-hot features, in schema order."""
    bags: tuple[Ragged, ...] = ()
    """The bag and sequence features, in schema order."""
    weight: Array | None = None
    """[R] float32: weights of the rows, where the data set has them."""
    probability: Array | None = None
    """[R] float32: the planted click probability, where there is one."""
    mapped: mmap.mmap | None = None
    """Map of a whole file, if the arrays are views of it."""

    def __len__(self) -> int:
        return len(self.label)

    def slice(self, start: int, stop: int) -> Columns:
        return Columns(
            label=self.label[start:stop],
            dense=self.dense[start:stop],
            ids=self.ids[start:stop],
            bags=tuple(bag.slice(start, stop) for bag in self.bags),
            weight=None if self.weight is None else self.weight[start:stop],
            probability=None if self.probability is None else self.probability[start:stop],
        )

    def take(self, rows: Array) -> Columns:
        """A copy of the named rows, in that order, without their planted probability."""
        return Columns(
            label=self.label.take(rows),
            dense=self.dense.take(rows, axis=0),  # faster than an index by a factor of two
            ids=self.ids.take(rows, axis=0),
            bags=tuple(bag.take(rows) for bag in self.bags),
            weight=None if self.weight is None else self.weight.take(rows),
        )

    @staticmethod
    def concatenate(parts: Sequence[Columns]) -> Columns:
        if len(parts) == 1:
            return parts[0]
        weights = [part.weight for part in parts if part.weight is not None]
        probabilities = [part.probability for part in parts if part.probability is not None]
        return Columns(
            label=np.concatenate([part.label for part in parts]),
            dense=np.concatenate([part.dense for part in parts]),
            ids=np.concatenate([part.ids for part in parts]),
            bags=tuple(Ragged.concatenate(bags) for bags in zip(*(part.bags for part in parts), strict=True)),
            weight=np.concatenate(weights) if len(weights) == len(parts) else None,
            probability=np.concatenate(probabilities) if len(probabilities) == len(parts) else None,
        )

    def batch(self, one_hot: Sequence[bool]) -> Batch:
        """The rows as a Batch; `one_hot` tells for each feature, in schema order, whether it is a column of `ids`.

        With one-hot features alone nothing but the label is copied: `ids.values` [F, B] is the transposed view of
        `ids` [B, F]. With any bag the values are gathered feature-major, which copies them (4 bytes per lookup, and
        8 an offset).
        """
        return Batch(
            dense=torch.from_numpy(self.dense),
            ids=self._ids(one_hot),
            label=torch.from_numpy(self.label).to(torch.float32),
            weight=None if self.weight is None else torch.from_numpy(self.weight),
        )

    def _ids(self, one_hot: Sequence[bool]) -> Ids:
        if not self.bags:
            return Ids(values=torch.from_numpy(self.ids).t(), offsets=None, num_features=len(one_hot))
        values, lengths = [], []
        columns, bags = iter(self.ids.T), iter(self.bags)
        ones = np.ones(len(self), dtype=np.int64)
        for single in one_hot:
            if single:
                values.append(next(columns))
                lengths.append(ones)
            else:
                bag = next(bags)
                values.append(bag.flat)
                lengths.append(bag.lengths)
        return Ids(
            values=torch.from_numpy(np.concatenate(values)),
            offsets=torch.from_numpy(offsets_of(np.concatenate(lengths))),
            num_features=len(one_hot),
        )
