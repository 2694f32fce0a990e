"""Both passes of `prepare`: the first reads and counts, the second puts ids into popularity order.

Raw text is parsed once: the first pass writes what it parsed, with provisional ids, to a temporary folder, and the
second turns provisional ids into ids by one array lookup each. Memory holds a block of rows and the distinct values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdall.common.errors import DataError
from holdall.data.arrow_files import Spill, read_batch, write_split_file
from holdall.data.bad_rows import BadRows
from holdall.data.dense import Moments, transform
from holdall.data.id_map import id_map_path
from holdall.data.layout import Layout
from holdall.data.numbering import Numbering
from holdall.data.raw_data import Read
from holdall.data.raw_transforms import Quantiles, with_texts
from holdall.data.rows import FLOAT32_MAX, Rows, import_polars
from holdall.data.schema import CrossPart, DataFile, DenseColumn, Feature, Split, WeightColumn
from holdall.data.splits import SPLITS, TEST, TRAIN, draw_splits

MAX_WEIGHT = 1e6
"""Largest weight of a row, in means of the training rows."""

Array = npt.NDArray[Any]
Progress = Callable[[str, int, int], None]
"""Callback for progress: (stage, done, total)."""


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """Assignment of rows to splits."""

    valid: float
    test: float
    seed: int
    test_file: Path | None = None
    """Every row of this file is a test row, and `test` is not drawn from the others."""

    def draw(self, source: Path, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The split of each row of `source`, given by row number."""
        if source == self.test_file:
            return np.full(len(numbers), TEST, dtype=np.uint8)
        return draw_splits(numbers, self.seed, self.valid, 0.0 if self.test_file else self.test)


class FirstPass:
    """First pass over every source: numbers and counts values, sums up dense columns, spills the rows."""

    def __init__(self, layout: Layout, rule: SplitRule, folder: Path, rows_per_file: int, read: Read):
        folder.mkdir()
        self.layout = layout
        self.read = read
        self.rule = rule
        self.tables = {name: Numbering() for name in layout.tables}
        self.moments = [Moments() for _ in layout.dense]
        self.spills = [Spill(folder, split, rows_per_file) for split in SPLITS]
        self.weights = np.zeros(2)
        """Number of training rows, and the sum of their raw weights, where they have them."""
        self.num_rows = 0
        """Rows read so far, refused ones counted."""

    def run(
        self, sources: Sequence[Path], bad_rows: BadRows, progress: Progress, size_of: Callable[[Path], int]
    ) -> None:
        total = sum(map(size_of, sources))
        done = 0
        for source in sources:
            first_row = self.num_rows
            with closing(self.read(source)) as blocks:
                for rows in blocks:
                    bad_rows.add(source, rows.refused)
                    splits = rows.splits
                    if splits is None:
                        splits = self.rule.draw(source, rows.numbers + first_row)
                    self._take(rows, splits)
                    self.num_rows += rows.num_rows
                    progress("read", done + rows.position, total)
            done += size_of(source)
        for spill in self.spills:
            spill.finish()

    def _take(self, rows: Rows, splits: npt.NDArray[np.uint8]) -> None:
        table = self._number(rows)
        features = [(f"feature{index}", feature) for index, feature in enumerate(self.layout.features)]
        for column, feature in features:
            self.tables[feature.table_name].see(flat(table[column]))
        for split in np.unique(splits):
            part = table if (splits == split).all() else table.filter(pa.array(splits == split))
            if split == TRAIN:
                for column, feature in features:
                    self.tables[feature.table_name].count(flat(part[column]))
                for index, moments in enumerate(self.moments):
                    moments.add(part[f"dense{index}"].to_numpy())
                if self.layout.weight is not None:
                    self.weights += part.num_rows, part["weight"].to_numpy().sum()
            self.spills[split].add(part)

    def _number(self, rows: Rows) -> pa.Table:
        """The rows with provisional ids in place of values, and NaN in place of missing numbers."""
        pl = import_polars()
        columns = [pl.col("label"), *([] if self.layout.weight is None else [pl.col("weight")])]
        columns += [pl.col(f"dense{index}").fill_null(float("nan")) for index in range(len(self.layout.dense))]
        columns += [
            self.tables[feature.table_name].expression(f"feature{index}", feature.kind == "categorical")
            for index, feature in enumerate(self.layout.features)
        ]
        frame = with_texts(rows.frame, self.layout) if self.layout.has_transforms else rows.frame
        return frame.select(columns).to_arrow()


def flat(column: pa.ChunkedArray) -> Array:
    """The numbers of a column, list or not."""
    if pa.types.is_large_list(column.type):
        column = pa.chunked_array([chunk.flatten() for chunk in column.chunks], type=column.type.value_type)
    return column.to_numpy()


class SecondPass:
    """Second pass: orders the values, writes the id maps, and rewrites the spilled rows as the files of the splits."""

    def __init__(self, first: FirstPass, folder: Path, rare_below: int, dense: Literal["log", "standard", "none"]):
        self.first = first
        self.folder = folder
        self.rare_below = rare_below
        self.dense: tuple[DenseColumn, ...] = tuple(
            moments.column(raw.name, raw.transform or dense)
            for raw, moments in zip(first.layout.dense, first.moments, strict=True)
        )
        self.weight = weight_column(first.layout.weight, *first.weights.tolist())
        self.features: tuple[Feature, ...] = ()
        self._remaps: dict[str, Array] = {}
        self.num_clipped = 0
        """Dense values beyond float32, stored as its largest."""

    def order(self, progress: Progress) -> None:
        """Write `ids/<feature>.arrow` for every feature, one table at a time."""
        made: dict[str, Feature] = {}
        tables = self.first.layout.tables
        for done, table in enumerate(tables, start=1):
            members = [raw for raw in self.first.layout.features if raw.table_name == table]
            numbering, bounds = self.first.tables.pop(table), members[0].bucket
            if members[0].buckets is None:
                id_map, self._remaps[table] = numbering.order(self.rare_below)
            else:
                quantiles = Quantiles(members[0].buckets)
                id_map, self._remaps[table] = numbering.order_groups(self.rare_below, quantiles.group)
                bounds = quantiles.bounds
            for raw in members:
                id_map.save(id_map_path(self.folder, raw.name))
                made[raw.name] = Feature(
                    name=raw.name,
                    num_rows=id_map.num_rows,
                    unseen=id_map.unseen,
                    kind=raw.kind,
                    max_length=raw.max_length,
                    table=raw.table,
                    bucket=bounds,
                    hash=raw.hash,
                    dim=raw.dim,
                    cross=tuple(CrossPart(name=p.name, bucket=p.bucket, hash=p.hash) for p in raw.cross),
                )
            progress("order", done, len(tables))
        self.features = tuple(made[raw.name] for raw in self.first.layout.features)

    def write(self, progress: Progress) -> dict[str, Split]:
        """Write the files of every split that has rows."""
        splits = {}
        total = sum(len(spill.files) for spill in self.first.spills)
        done = 0
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            for spill in self.first.spills:
                files, positives, weights = [], 0, np.zeros(2)
                for file, file_positives, file_weights, num_clipped in pool.map(self._write_file, spill.files):
                    files.append(file)
                    positives += file_positives
                    weights += file_weights
                    self.num_clipped += num_clipped
                    done += 1
                    progress("write", done, total)
                if files:
                    rows = sum(file.rows for file in files)
                    sums = None if self.weight is None else (float(weights[0]), float(weights[1]))
                    splits[spill.split] = Split(rows=rows, positives=positives, weights=sums, files=tuple(files))
        return splits

    def _write_file(self, spilled: Path) -> tuple[DataFile, int, Array, int]:
        """The file, its positives, its weights by label, and how many of its dense values were clipped."""
        batch = read_batch(spilled)
        num_clipped = 0
        dense = np.empty((batch.num_rows, len(self.dense)), dtype=np.float32)
        for index, column in enumerate(self.dense):
            dense[:, index] = transform(batch[f"dense{index}"].to_numpy(), column)
            if column.transform == "standard":
                num_clipped += int(np.count_nonzero(np.abs(dense[:, index]) >= np.float32(FLOAT32_MAX)))
        remaps = [self._remaps[raw.table_name] for raw in self.first.layout.features]
        one_hot = [index for index, feature in enumerate(self.features) if feature.one_hot]
        dtype = np.result_type(np.int32, *(remaps[index].dtype for index in one_hot))
        ids = np.empty((batch.num_rows, len(one_hot)), dtype=dtype)
        for place, index in enumerate(one_hot):
            ids[:, place] = remaps[index][batch[f"feature{index}"].to_numpy()]
        lists = {}
        for index, feature in enumerate(self.features):
            if not feature.one_hot:
                column = batch[f"feature{index}"]
                offsets = column.offsets.to_numpy()
                lists[feature.name] = (remaps[index][column.flatten().to_numpy()], offsets - offsets[0])
        label = batch["label"].to_numpy()
        weight = None if self.weight is None else relative(batch["weight"].to_numpy(), self.weight)
        weights = np.zeros(2) if weight is None else np.bincount(label, weight, minlength=2)
        file = write_split_file(self.folder / spilled.name, label, dense, ids, lists, weight=weight)
        positives = int(label.sum())
        spilled.unlink()
        return file, positives, weights, num_clipped


def weight_column(name: str | None, num_rows: float, total: float) -> WeightColumn | None:
    """The column of weights with the mean of the training rows; refused where these have no weight at all."""
    if name is None:
        return None
    if total == 0:
        raise DataError(
            f"column '{name}' gives every training row the weight 0, so there is nothing to learn: correct it, or "
            f"leave weight out of the schema"
        )
    return WeightColumn(name=name, mean=total / num_rows)


def relative(weight: Array, column: WeightColumn) -> Array:
    """[R] float32: raw weights over their mean in the training split."""
    found = weight / column.mean
    if len(found) and found.max() > MAX_WEIGHT:
        raise DataError(
            f"column '{column.name}' has a weight of {weight.max():g}, more than {MAX_WEIGHT:g} times the mean of the "
            f"training rows ({column.mean:g}): correct it"
        )
    return found.astype(np.float32)
