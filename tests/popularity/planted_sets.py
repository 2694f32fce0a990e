"""Prepared data folders with ids of one's own, and streams whose popularity is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdall.data.arrow_files import write_split_file
from holdall.data.schema import Feature, Schema, Split


def write_set(
    folder: Path,
    ids: np.ndarray,
    num_rows: Sequence[int],
    bags: Mapping[str, Sequence[Sequence[int]]] | None = None,
    bag_rows: int = 10,
    tables: Mapping[str, str] | None = None,
    source: dict[str, Any] | None = None,
) -> Path:
    """A data folder whose train split has these one-hot ids [R, F] (features c0, c1, ...) and these bags."""
    folder.mkdir(parents=True)
    bags, tables = bags or {}, tables or {}
    features = [
        Feature(name=f"c{i}", num_rows=rows, unseen=rows - 1, table=tables.get(f"c{i}"))
        for i, rows in enumerate(num_rows)
    ]
    features += [Feature(name=name, num_rows=bag_rows, unseen=bag_rows - 1, kind="bag") for name in bags]
    lists = {}
    for name, rows in bags.items():
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        lists[name] = (np.array([value for row in rows for value in row], dtype=np.int32), offsets)
    label = np.zeros(len(ids), dtype=np.uint8)
    dense = np.zeros((len(ids), 0), dtype=np.float32)
    file = write_split_file(folder / "train-00000.arrow", label, dense, ids.astype(np.int32), lists)
    splits = {"train": Split(rows=len(ids), positives=0, files=(file,))}
    schema = Schema(label="y", dense=(), features=tuple(features), splits=splits, source=source or {"format": "table"})
    schema.save(folder)
    return folder


def zipf(rng: np.random.Generator, num_ids: int, size: int, power: float = 1.05) -> np.ndarray:
    """Ids 0..num_ids-1 with probability proportional to (id + 1)^-power."""
    weights = np.arange(1, num_ids + 1) ** -power
    return np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(size)).clip(max=num_ids - 1)


def in_popularity_order(ids: np.ndarray, num_ids: int) -> np.ndarray:
    """The same stream renumbered so that id 0 is the most frequent."""
    rank = np.empty(num_ids, dtype=np.int64)
    rank[np.argsort(-np.bincount(ids, minlength=num_ids), kind="stable")] = np.arange(num_ids)
    return rank[ids]
