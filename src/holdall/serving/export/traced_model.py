"""Model of a bundle in operations that can be traced and that other programs have: plain gathers, products and sums.

The scores are those of the model, from the same tensors: tables stay as small as they are stored, and rows are decoded
by the graph. The fast paths of `EmbeddingBags` are not part of it: kernels, and shapes that depend on the ids.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.models import Model
from holdall.models.histories import HistoryModel
from holdall.serving.export.model_inputs import DENSE, IDS, ModelInputs
from holdall.serving.export.traced_lookup import JoinedTables, TracedLookup


class TracedModel(nn.Module):
    """Scores [B] and logits [B] of the inputs of `ModelInputs`, in their order.

    A row with an id that is no row of its table, or with bags that cannot be, scores NaN, and the others as ever:
    programs that make one batch of several requests go on. The model that is given has its tables replaced.
    """

    def __init__(self, model: Model, inputs: ModelInputs):
        super().__init__()
        if model.bags.vector_dtype not in (None, torch.float32):
            raise ConfigError(
                f"the model computes with vectors in {model.bags.vector_dtype}: an export has float32 only"
            )
        self.inputs = inputs
        self.model = model
        single = [position for position, feature in enumerate(inputs.features) if feature.one_hot]
        self.model.bags = cast(EmbeddingBags, TracedBags(model.bags, single))
        self.names = [given.name for given in inputs]
        limits = torch.tensor([feature.num_rows for feature in inputs.single])
        self.register_buffer("limits", limits, persistent=False)
        self.limits: Tensor
        if isinstance(model, HistoryModel):
            model.checks_lengths = False  # `forward` marks rows in the place of raising an error

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(self.names, inputs, strict=True))
        ids = TracedIds(self.inputs, given, self.limits)
        dense = given.get(DENSE)
        if dense is None:
            dense = torch.zeros(ids.batch_size, 0)
        looked_up = self.model.lookup(TracedBatch(ids))  # type: ignore[arg-type]
        logit = self.model.score(dense, looked_up).float()
        wrong = ids.wrong
        if isinstance(self.model, HistoryModel):
            wrong = wrong | ids.lengths_differ(self.model.roles.history)
        logit = torch.where(wrong, torch.nan, logit)
        return torch.sigmoid(logit), logit


class TracedBatch:
    """The part of a `Batch` that `Model.lookup` reads."""

    def __init__(self, ids: TracedIds):
        self.ids = ids


class TracedIds:
    """Ids as the models read them (`Ids`), from the inputs of an export; ids that are no rows are 0, and marked.

    Ids of bags end with one more id, 0, which is in no bag, since some programs fail on tensors without elements.
    """

    def __init__(self, inputs: ModelInputs, given: Mapping[str, Tensor], limits: Tensor):
        """`limits` are the rows of the tables of the features with one id a row."""
        self.num_features = len(inputs.features)
        single = given.get(IDS)
        if single is None:
            self.batch_size = given[f"{inputs.bags[0].name}.offsets"].shape[0] - 1
            self.wrong = torch.zeros(self.batch_size, dtype=torch.bool)
        else:
            outside = (single < 0) | (single >= limits)
            self.batch_size = single.shape[0]
            self.wrong = outside.any(dim=1)
            single = torch.where(outside, 0, single)
        self.single = single
        """[B, F'] ids of the features that have one a row; None where there are none."""
        self._bags: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}
        column = 0
        for feature, position in zip(inputs.features, inputs.positions, strict=True):
            if feature.one_hot:
                assert single is not None
                self._bags[position] = (single[:, column], None, None)
                column += 1
            else:
                values, offsets = given[f"{feature.name}.values"], given[f"{feature.name}.offsets"]
                self._bags[position] = (*self._checked(values, offsets, feature.num_rows), None)
        self.values = self.offsets = next(bag[0] for bag in self._bags.values())

    def _checked(self, values: Tensor, offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        falls = (offsets[1:] < offsets[:-1]).any()
        invalid = falls | (offsets[0] != 0) | (offsets[-1] != values.shape[0])
        offsets = torch.where(invalid, 0, offsets)
        outside = (values < 0) | (values >= num_rows)
        values = F.pad(torch.where(outside, 0, values), (0, 1))
        num_outside = sum_of_bags(F.pad(outside.float(), (0, 1))[:, None], offsets)
        self.wrong = self.wrong | invalid | (num_outside[:, 0] > 0)
        return values, offsets

    def bag(self, position: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `Ids.bag`; offsets are None for features with one id a row."""
        return self._bags[position]

    def select(self, positions: Sequence[int]) -> TracedIds:
        """As `Ids.select`, for the features that the model reads."""
        made = copy.copy(self)
        made.num_features = len(positions)
        made._bags = {place: self._bags[position] for place, position in enumerate(positions)}
        return made

    def lengths_differ(self, positions: Sequence[int]) -> Tensor:
        """[B]: whether the bags of these features have different numbers of ids."""
        first, *others = (cast(Tensor, self._bags[position][1]).diff() for position in positions)
        wrong = torch.zeros_like(first, dtype=torch.bool)
        for lengths in others:
            wrong = wrong | (lengths != first)
        return wrong


class TracedBags(nn.Module):
    """The part of `EmbeddingBags` that models call."""

    def __init__(self, bags: EmbeddingBags, single: Sequence[int]):
        """`single` are the positions of the features with one id a row, among those of the tables."""
        super().__init__()
        self.features = dict(bags.features)
        self.looked_up = [bags.table(name) for name in self.features.values()]
        assert all(table.mode == "sum" for table in self.looked_up)
        self.single = list(single)
        self.tables = JoinedTables(bags)
        self.lookup = TracedLookup(self.tables, [self.looked_up[position] for position in self.single])

    def forward(self, ids: Ids | TracedIds, positions: Sequence[int] | None = None) -> Tensor:
        """Pooled vectors [B, F', dim]."""
        chosen = list(range(len(self.features))) if positions is None else list(positions)
        single_BF = ids.single if isinstance(ids, TracedIds) else ids.values.t()
        columns: dict[int, Tensor] = {}
        if single_BF is not None:
            vectors_BFD = self.lookup(self.tables, single_BF)
            if chosen == self.single:
                return vectors_BFD
            columns = dict(zip(self.single, vectors_BFD.unbind(1), strict=True))
        for position in set(chosen) - set(self.single):
            values, offsets, _ = ids.bag(position)
            assert offsets is not None
            columns[position] = sum_of_bags(self.tables.rows(self.looked_up[position], values), offsets)
        return torch.stack([columns[position] for position in chosen], dim=1)

    def rows(self, ids: TracedIds, position: int) -> Tensor:
        """Rows of every id of one feature, and of the one more that is in no bag."""
        return self.tables.rows(self.looked_up[position], ids.bag(position)[0])

    def packed_rows(self, ids: Ids | TracedIds) -> None:
        """No storage is read by kernels."""


def sum_of_bags(rows: Tensor, offsets: Tensor) -> Tensor:
    """Sums [B, dim] over the bags of rows [L + 1, dim], the last of which is in no bag; offsets [B + 1]."""
    ends = offsets[1:]
    # Row p belongs to the bag whose number is that of the ends up to p; the last row is after all of them.
    bag = torch.zeros(rows.shape[0], dtype=torch.int64).index_add(0, ends, torch.ones_like(ends)).cumsum(0)
    return torch.zeros(offsets.shape[0], rows.shape[1]).index_add(0, bag, rows)[:-1]
