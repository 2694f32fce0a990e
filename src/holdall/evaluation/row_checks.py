"""Checks on a sample of rows: neighbours that are alike, columns that give the label away.

A sample is at most `STRETCHES` stretches of neighbouring rows, evenly spaced over a split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdall.data.columns import Array, Columns, Ragged
from holdall.data.dataset import DataSet
from holdall.data.schema import Schema
from holdall.evaluation.metrics import exact_auc

STRETCHES = 64
STRETCH_ROWS = 2048
LEAST_OF_A_LABEL = 20
"""Rows of either label in either half of the sample, below which no column is suspected."""
SORTED = 0.1
"""Excess of equal neighbours over chance from which on rows count as sorted; in random order it is 0.00 to 0.01."""
ROWS_PER_BIN = 50
"""Rows of a bin of dense values, which is looked up like an id."""


@dataclass(frozen=True)
class Resemblance:
    """Share of neighbouring rows that are equal in a column, and the share by chance."""

    column: str
    neighbours: float
    chance: float

    @property
    def excess(self) -> float:
        """0 for rows in random order, 1 where all neighbours are equal."""
        return (self.neighbours - self.chance) / (1 - self.chance) if self.chance < 1 else 0.0


def sample_rows(data: DataSet) -> list[Columns]:
    """Stretches of neighbouring rows, evenly spaced."""
    num_rows = len(data)
    if num_rows <= STRETCHES * STRETCH_ROWS:
        return [data.columns(0, num_rows)]
    starts = np.linspace(0, num_rows - STRETCH_ROWS, STRETCHES).astype(np.int64)
    return [data.columns(start, start + STRETCH_ROWS) for start in starts.tolist()]


def resemblances(stretches: list[Columns], schema: Schema) -> list[Resemblance]:
    """Resemblance of neighbours in the label and in each feature with one id per row."""
    names = ["label", *(feature.name for feature in schema.features if feature.one_hot)]
    parts = [np.column_stack([columns.label, columns.ids]) for columns in stretches]
    pairs = sum(max(0, len(part) - 1) for part in parts)
    if not pairs:
        return []
    neighbours = np.sum([(part[1:] == part[:-1]).sum(axis=0) for part in parts], axis=0) / pairs
    rows = np.concatenate(parts)
    chance = (rows == np.random.default_rng(0).permutation(rows)).mean(axis=0)
    return [Resemblance(*found) for found in zip(names, neighbours.tolist(), chance.tolist(), strict=True)]


def is_sorted(data: DataSet) -> bool:
    """Whether neighbouring rows are alike in the label or in a feature, far more than by chance."""
    return any(column.excess > SORTED for column in resemblances(sample_rows(data), data.schema))


def predictors(stretches: list[Columns], schema: Schema) -> Iterator[tuple[str, str, float]]:
    """Kind and name of every column, with the AUC of that column alone.

    The score of a row is the mean label of its id (of its ids in a bag, of its bin of a dense value) on one half of the
    sample, and the AUC is that of the other half.
    """
    rows = Columns.concatenate(stretches)
    fitted = np.random.default_rng(0).random(len(rows)) < 0.5
    label = rows.label.astype(np.float64)
    counts = [int((label[half] == value).sum()) for half in (fitted, ~fitted) for value in (0, 1)]
    if min(counts) < LEAST_OF_A_LABEL:
        return
    for number, column in enumerate(schema.dense):
        values = np.nan_to_num(rows.dense[:, number])
        bins = np.unique(np.quantile(values, np.linspace(0, 1, len(values) // ROWS_PER_BIN + 2)))
        yield "dense column", column.name, _auc(_ones(np.searchsorted(bins, values)), label, fitted)
    one_hot, bags = iter(rows.ids.T), iter(rows.bags)
    for feature in schema.features:
        ids = _ones(next(one_hot)) if feature.one_hot else next(bags)
        yield "feature", feature.name, _auc(ids, label, fitted)


def _ones(ids: Array) -> Ragged:
    """One id a row as lists of one."""
    return Ragged(ids, np.arange(len(ids) + 1))


def _auc(ids: Ragged, label: Array, fitted: Array) -> float:
    _, places = np.unique(ids.flat, return_inverse=True)
    lists = np.repeat(np.arange(len(ids)), ids.lengths)
    rate = label[fitted].mean()
    used = fitted[lists]
    seen = np.bincount(places[used], minlength=places.max(initial=0) + 1)
    positive = np.bincount(places[used], weights=label[lists][used], minlength=len(seen))
    score = (positive + rate) / (seen + 1)
    total = np.bincount(lists, weights=score[places], minlength=len(ids))
    scores = np.where(ids.lengths > 0, total / np.maximum(ids.lengths, 1), rate)
    return exact_auc(scores[~fitted], label[~fitted])
