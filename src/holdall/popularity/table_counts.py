"""Lookups of every table row in the batches that a model trains on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from holdall.data.batch import Batch
from holdall.data.schema import Schema


def table_counts(batches: Iterable[Batch], schema: Schema) -> dict[str, Tensor]:
    """Lookups [num_rows] of every row in all batches, by table; features that share a table are added up."""
    tables = [feature.table or feature.name for feature in schema.features]
    counts = {
        table: torch.zeros(feature.num_rows, dtype=torch.int64)
        for table, feature in zip(tables, schema.features, strict=True)
    }
    for batch in batches:
        for position, table in enumerate(tables):
            ids = batch.ids.bag(position)[0].reshape(-1).long()
            counts[table].index_put_((ids,), torch.ones_like(ids), accumulate=True)
    return counts
