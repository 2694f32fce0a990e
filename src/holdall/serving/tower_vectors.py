"""Vectors of the towers of a two-tower model: of the users and items of raw rows, and of every known item."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.data.columns import Ragged, offsets_of
from holdall.data.items import ITEMS_FILE, ItemTable
from holdall.data.schema import Schema
from holdall.models import Model, TwoTower
from holdall.models.model import batch_device
from holdall.models.two_tower import Side
from holdall.serving.row_encoder import RowEncoder
from holdall.serving.vectors import BLOCK_BYTES

Floats = npt.NDArray[np.float32]


def two_tower(model: Model) -> TwoTower:
    """The model, which must have towers."""
    if not isinstance(model, TwoTower):
        raise ConfigError(f"{type(model).__name__} has no towers: use vectors(feature, values) for the rows of a table")
    return model


def row_vectors(model: TwoTower, side: Side, encoder: RowEncoder, rows: Any) -> Floats:
    """Vectors [R, K] of one tower for raw rows, which need the columns of that tower alone."""
    schema, names = encoder.form.schema, getattr(model.config, side)
    batch = encoder.only(names).encode(rows)
    dense = torch.zeros(len(batch), schema.num_dense)
    own = [place for place, column in enumerate(schema.dense) if column.name in names]
    dense[:, own] = batch.dense
    if not len(batch):
        return np.zeros((0, model.config.tower[-1]), dtype=np.float32)
    device = batch_device(model)
    with torch.no_grad():
        found = model.side_vectors(side, type(batch)(dense, batch.ids, batch.label).to(device))
    return found.float().cpu().numpy()


def item_blocks(model: TwoTower, schema: Schema, folder: Path) -> Iterator[tuple[int, int, Floats]]:
    """First id, last id + 1 and vectors of every item, a block at a time; their attributes are in `folder`."""
    config, device = model.config, batch_device(model)
    item, attributes = config.item[0], config.item[1:]
    table = ItemTable.load(folder, schema) if attributes and (folder / ITEMS_FILE).exists() else None
    for name in attributes:
        if table is None or name not in table.attributes:
            raise ConfigError(
                f"the item's tower reads '{name}', and {folder} does not know it of every item: give the items with "
                f"their columns to item_vectors(rows)"
            )
    step = max(1, BLOCK_BYTES // (4 * max(config.tower)))
    num_rows = schema.feature(item).num_rows
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        parts = {item: np.arange(start, stop)}
        parts |= {name: _slice(table.attributes[name], start, stop) for name in attributes} if table else {}
        ids = _joined(list(model.bags.features), parts, stop - start)
        with torch.no_grad():
            dense = torch.zeros(stop - start, schema.num_dense, device=device)
            found = model.vectors_of("item", dense, ids.to(device))
        yield start, stop, found.float().cpu().numpy()


def _slice(values: Any, start: int, stop: int) -> Any:
    return values.slice(start, stop) if isinstance(values, Ragged) else values[start:stop]


def _joined(features: list[str], parts: dict[str, Any], count: int) -> Ids:
    """Ids of these features, those of the user without any."""
    values, lengths = [], []
    for name in features:
        part = parts.get(name)
        if part is None:
            lengths.append(np.zeros(count, dtype=np.int64))
        elif isinstance(part, Ragged):
            values.append(part.flat)
            lengths.append(part.lengths)
        else:
            values.append(part)
            lengths.append(np.ones(count, dtype=np.int64))
    flat = torch.from_numpy(np.concatenate(values).astype(np.int64))
    return Ids(flat, torch.from_numpy(offsets_of(np.concatenate(lengths))), len(features))
