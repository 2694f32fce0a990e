"""Inputs of an exported model: their names, shapes and types, and the arrays of a batch.

    dense              float32 [B, N]     dense columns, after their transforms
    ids                int64 [B, F]       one id for each feature that has one a row
    <feature>.values   int64 [L]          ids of all bags (or sequences) of a feature, one row after the other
    <feature>.offsets  int64 [B + 1]      the bag of row b is values[offsets[b] : offsets[b + 1]]

An input that a model does not need is left out. Rows are the first dimension, as in other programs that make batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.embedding.id_checks import check_feature
from holdall.models import ModelConfig

Arrays = dict[str, npt.NDArray[Any]]

DENSE = "dense"
IDS = "ids"


@dataclass(frozen=True)
class Input:
    """One input: its name, type and shape, where text stands for a size that differs from call to call."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class ModelInputs:
    """Columns and features that a model reads, and the inputs that they make."""

    dense: tuple[DenseColumn, ...]
    features: tuple[Feature, ...]
    positions: tuple[int, ...]
    """Place of each of the features in a batch."""

    @classmethod
    def of(cls, config: ModelConfig, schema: Schema) -> ModelInputs:
        """Inputs of a model of these settings for the rows of a data set."""
        features = config.reads(schema).features
        dense = schema.dense if config.reads_dense(schema) else ()
        return cls(dense, features, tuple(schema.features.index(feature) for feature in features))

    @property
    def single(self) -> tuple[Feature, ...]:
        """Features with one id a row: the columns of `ids`."""
        return tuple(feature for feature in self.features if feature.one_hot)

    @property
    def bags(self) -> tuple[Feature, ...]:
        """Features with any number of ids a row."""
        return tuple(feature for feature in self.features if not feature.one_hot)

    def __iter__(self) -> Iterator[Input]:
        if self.dense:
            yield Input(DENSE, "float32", ("rows", len(self.dense)))
        if self.single:
            yield Input(IDS, "int64", ("rows", len(self.single)))
        for number, feature in enumerate(self.bags):
            yield Input(f"{feature.name}.values", "int64", (f"ids_{number}",))
            yield Input(f"{feature.name}.offsets", "int64", ("rows + 1",))

    def arrays(self, batch: Batch) -> Arrays:
        """A batch as the arrays of the inputs, by name, after a check of its ids."""
        if batch.ids.weights is not None:
            raise ConfigError("an exported model takes no weights of ids: score this batch with the bundle")
        found: Arrays = {DENSE: batch.dense.numpy()} if self.dense else {}
        columns = []
        for feature, position in zip(self.features, self.positions, strict=True):
            check_feature(batch.ids, position, feature.name, feature.num_rows)
            values, offsets, _ = batch.ids.bag(position)
            if feature.one_hot:
                if len(values) != len(batch):
                    raise ConfigError(f"feature '{feature.name}' has one id a row: give each row exactly one")
                columns.append(values.numpy())
            else:
                bounds = np.arange(len(batch) + 1) if offsets is None else offsets.numpy()
                found[f"{feature.name}.values"] = values.numpy().astype(np.int64, copy=False)
                found[f"{feature.name}.offsets"] = bounds.astype(np.int64, copy=False)
        if columns:
            found[IDS] = np.stack(columns, axis=1).astype(np.int64, copy=False)
        return found
