"""Lookups of every table row: in the batches that a model trains on, or as the data folder has them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.folder_files import has_other_file
from holdall.data.id_map import id_map_path, load_counts
from holdall.data.schema import Schema
from holdall.popularity.choose_hot_rows import count_lookups


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


def stored_counts(data: DataSet) -> dict[str, Tensor]:
    """Lookups [num_rows] of every row in the training split, by table: those in the id maps of the data folder.

    A folder without id maps is counted once. Negatives that are drawn in training do not count.
    """
    first = {feature.table or feature.name: feature.name for feature in reversed(data.schema.features)}
    if all(has_other_file(data.folder, id_map_path(data.folder, name), data.schema) for name in first.values()):
        counts = {table: load_counts(data.folder, name, data.schema) for table, name in first.items()}
    else:
        counts = count_lookups(DataSet(data.folder, "train"))
    return {table: torch.from_numpy(counts[table]) for table in first}
