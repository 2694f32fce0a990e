"""Histories: the sequences of a user's last events, and the features of the target that they are compared with.

An event consists of the values of the sequence features (an item, its category); the target consists of the categorical
features that share their tables. All other features belong to the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.common.eager import eager
from holdall.common.errors import ConfigError, DataError
from holdall.data.batch import Batch, Ids
from holdall.data.schema import Schema
from holdall.embedding.bags import EmbeddingBags
from holdall.models.model import Model


@dataclass(frozen=True)
class FeatureRoles:
    """Positions of a data set's features, by their role in a model of histories."""

    sample: tuple[int, ...]
    """Features that events do not have."""
    target: tuple[int, ...]
    """Categorical features of the target, each with the table of the sequence at the same place in `history`."""
    history: tuple[int, ...]
    """Sequence features."""

    @classmethod
    def of(cls, schema: Schema, family: str) -> FeatureRoles:
        """Roles of the features of a data set; an error, which names the model's family, where one is missing."""
        tables = [feature.table or feature.name for feature in schema.features]
        history = [i for i, feature in enumerate(schema.features) if feature.kind == "sequence"]
        if not history:
            raise ConfigError(
                f"{family} reads a user's last events: this data set has no sequence feature, prepare some"
            )
        target = []
        for position in history:
            found = [i for i, f in enumerate(schema.features) if f.one_hot and tables[i] == tables[position]]
            if not found:
                raise ConfigError(
                    f"sequence '{schema.features[position].name}' has no target: {family} compares its events with a "
                    f"categorical feature of the same table '{tables[position]}'"
                )
            target.append(found[0])
        sample = [i for i in range(len(tables)) if i not in history and i not in target]
        return cls(tuple(sample), tuple(target), tuple(history))

    def longest(self, schema: Schema, length: int) -> int:
        """Events to read: `length`, or fewer where the data set has no longer sequences."""
        return min(length, max(schema.features[position].max_length or length for position in self.history))


class HistoryModel(Model):
    """Base of models that read the last `length` events of a history one by one."""

    def __init__(self, bags: EmbeddingBags, roles: FeatureRoles, length: int):
        super().__init__()
        self.bags = bags
        self.roles = roles
        self.length = length
        self.checks_lengths = True
        """Whether a lookup checks that the sequences of a sample are equally long; an export has a check of its own."""

    def check(self, ids: Ids) -> None:
        super().check(ids)
        self._check_lengths(ids)

    def lookup(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors [B, S + E, D] of sample and target, [B, T, E, D] of the history, and which events [B, T] exist."""
        ids = batch.ids
        vectors_BFD = self.bags(ids, (*self.roles.sample, *self.roles.target))
        if self.checks_lengths:
            self._check_lengths(ids)
        place_BT, exists_BT = last_places(_offsets(ids, self.roles.history[0]), self.length)
        events = [_pick(self.bags.rows(ids, position), place_BT) for position in self.roles.history]
        return vectors_BFD, torch.stack(events, dim=2), exists_BT

    @eager
    def _check_lengths(self, ids: Ids) -> None:
        """Raise unless the sequences of each sample are equally long; ids on a device are not read back."""
        if ids.values.device.type != "cpu":
            return
        names = list(self.bags.features)
        first, *others = self.roles.history
        expected = _offsets(ids, first).diff()
        for position in others:
            found = _offsets(ids, position).diff()
            if not torch.equal(found, expected):
                sample = int((found != expected).nonzero()[0])
                raise DataError(
                    f"sample {sample} of the batch has {int(expected[sample])} events in '{names[first]}' and "
                    f"{int(found[sample])} in '{names[position]}': sequences of one history must be equally long"
                )


def last_places(offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Positions [B, length] of the last `length` ids of each bag, -1 before its first; and whether each exists."""
    starts, ends = offsets[:-1, None], offsets[1:, None]
    places = ends + torch.arange(-length, 0, device=offsets.device)
    exists = places >= starts
    return torch.where(exists, places, -1), exists


def _pick(rows_LD: Tensor, place_BT: Tensor) -> Tensor:
    """Rows [B, T, D] at the given places; zeros at -1."""
    padded = F.pad(rows_LD, (0, 0, 1, 0))
    return F.embedding(place_BT + 1, padded)


def _offsets(ids: Ids, position: int) -> Tensor:
    """Offsets [B + 1] of one feature."""
    offsets = ids.bag(position)[1]
    return torch.arange(ids.batch_size + 1, device=ids.values.device) if offsets is None else offsets
