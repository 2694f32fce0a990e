"""Embedding rows of raw values, for nearest-neighbour indexes and other models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from holdall.common.errors import ConfigError
from holdall.common.files import PARTIAL, fsync_file
from holdall.data.batch import Ids
from holdall.models import Model
from holdall.serving.id_lookup import IdLookup

Array = npt.NDArray[Any]
BLOCK_BYTES = 1 << 24
"""Bytes of float32 rows that are in memory at a time."""


def feature_rows(model: Model, feature: str, ids: Array) -> npt.NDArray[np.float32]:
    """Rows [n, dim] in float32 of ids [n] of one feature, as a lookup of the model gives them."""
    names = list(model.bags.features)
    position = names.index(feature)
    offsets = torch.zeros(len(names) + 1, dtype=torch.int64)
    offsets[position + 1 :] = len(ids)
    with torch.no_grad():
        rows = model.bags.rows(Ids(torch.from_numpy(ids), offsets, len(names)), position)
    found: npt.NDArray[np.float32] = rows.float().cpu().numpy()
    return found


def write_vectors(model: Model, feature: str, lookup: IdLookup, path: Path, *, overwrite: bool = False) -> int:
    """Write every value of a feature with its count and its row, in the order of ids; the number of rows.

    The file appears under its name when it is complete.
    """
    step = max(1, BLOCK_BYTES // (4 * model.bags.dim))

    def blocks() -> Iterator[tuple[int, int, npt.NDArray[np.float32]]]:
        for start in range(0, lookup.num_rows, step):
            stop = min(start + step, lookup.num_rows)
            yield start, stop, feature_rows(model, feature, np.arange(start, stop))

    return write_blocks(blocks(), model.bags.dim, lookup, path, overwrite=overwrite)


def write_blocks(
    blocks: Iterable[tuple[int, int, npt.NDArray[np.float32]]],
    dim: int,
    lookup: IdLookup,
    path: Path,
    *,
    overwrite: bool = False,
) -> int:
    """Write vectors of `dim` numbers, given as first id, last id + 1 and [n, dim] of consecutive blocks."""
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists already: name another file, or pass overwrite=True")
    vector = pa.list_(pa.float32(), dim)
    schema = pa.schema([("id", pa.int64()), ("value", pa.string()), ("count", pa.int64()), ("vector", vector)])
    partial = path.with_name(path.name + PARTIAL)
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            for start, stop, rows in blocks:
                texts, counts = lookup.rows(start, stop)
                columns = [
                    pa.array(np.arange(start, stop)),
                    texts,
                    pa.array(counts),
                    pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), dim),
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        fsync_file(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return lookup.num_rows
