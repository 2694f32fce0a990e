"""Check of an export when it is made: made-up rows through the bundle's model and through the export."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdall.common.errors import HoldallError
from holdall.data.batch import Batch, Ids
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.models import Model
from holdall.serving.export.exported_scorer import ExportedScorer
from holdall.tables import Table
from holdall.tables.bands import BandsTable

LIMIT = 1e-5
"""Largest difference of scores, and of logits relative to the largest of them, that float32 explains."""
NUM_ROWS = 512
LONG_BAG = 40
"""Ids of the longest bag of a feature without a limit."""


@dataclass(frozen=True)
class Difference:
    """Largest differences between export and bundle."""

    rows: int
    score: float
    """Largest difference of probabilities."""
    logit: float
    """Largest difference of logits, relative to the largest logit of the batch, or to 1 where that is less."""

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "score": self.score, "logit": self.logit, "limit": LIMIT}


def check_export(exported: ExportedScorer, model: Model) -> Difference:
    """The largest differences to the model of the bundle; an error where they are more than rounding."""
    score = logit = 0.0
    rows = 0
    for batch in check_batches(exported.schema, model):
        with torch.no_grad():
            expected = model(batch).float()
        found = exported.logits(batch)
        scale = max(1.0, float(expected.abs().max()))
        rows += len(batch)
        logit = _largest(logit, (found - expected).abs().max() / scale)
        score = _largest(score, (torch.from_numpy(exported.scores(batch)) - expected.sigmoid()).abs().max())
    if not (score <= LIMIT and logit <= LIMIT):
        raise HoldallError(
            f"the {exported.record.target} export scores {rows} made-up rows otherwise than the bundle: by up to "
            f"{score:.1e}, and logits by {logit:.1e} of the largest, where {LIMIT:.0e} are allowed; nothing was kept: "
            f"score with the bundle (`holdall score`, `holdall serve`), and report this with the versions of torch and "
            f"of the runtime"
        )
    return Difference(rows, score, logit)


def _largest(before: float, found: Tensor) -> float:
    return math.nan if torch.isnan(found) else max(before, float(found))  # NaN stays, and is no small difference


def check_batches(schema: Schema, model: Model) -> Iterator[Batch]:
    """Batches of many rows, of one, and, where there are bags, of empty ones alone.

    Ids are popular ones, any, the unseen row, and those on both sides of every cut between bands. Bags are empty, long
    and between. Dense values are common and extreme ones. The same rows each time.
    """
    generator = torch.Generator().manual_seed(0)
    edges = {feature.name: _edges(feature, _table(model, feature)) for feature in schema.features}
    size = max(NUM_ROWS, *(len(found) for found in edges.values()))
    yield _batch(schema, edges, size, generator)
    yield _batch(schema, edges, 1, generator)
    if not all(feature.one_hot for feature in schema.features):
        yield _batch(schema, edges, 3, generator, empty=True)


def _table(model: Model, feature: Feature) -> Table | None:
    name = model.bags.features.get(feature.name)
    return None if name is None else model.bags.table(name)


def _edges(feature: Feature, table: Table | None) -> list[int]:
    """First, last and unseen row, and rows on both sides of the cuts of a table."""
    found = {0, feature.num_rows - 1, feature.unseen}
    cuts = [(table, 0)] if table is not None else []
    while cuts:
        inner, start = cuts.pop()
        if isinstance(inner, BandsTable):
            for band, part in zip(inner.bands, inner.parts, strict=True):
                found.update((start + band.start, start + band.end - 1))
                cuts.append((part, start + band.start))
    return sorted(found)


def _batch(
    schema: Schema, edges: dict[str, list[int]], size: int, generator: torch.Generator, *, empty: bool = False
) -> Batch:
    dense = [_dense(column, size, generator) for column in schema.dense]
    values, lengths = [], []
    of_sequences = _lengths(20, size, generator)  # sequences of a row are equally long
    for feature in schema.features:
        if feature.one_hot:
            length = torch.ones(size, dtype=torch.int64)
        elif empty:
            length = torch.zeros(size, dtype=torch.int64)
        elif feature.kind == "sequence":
            length = of_sequences
        else:
            length = _lengths(feature.max_length or LONG_BAG, size, generator)
        lengths.append(length)
        values.append(_ids(feature, edges[feature.name], int(length.sum()), generator))
    if all(feature.one_hot for feature in schema.features):
        ids = Ids(torch.stack(values), None, len(schema.features))
    else:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
        ids = Ids(torch.cat(values), offsets, len(schema.features))
    columns = torch.stack(dense, dim=1) if dense else torch.zeros(size, 0)
    return Batch(dense=columns, ids=ids, label=torch.zeros(size))


def _dense(column: DenseColumn, size: int, generator: torch.Generator) -> Tensor:
    """Stored values [R] of a column: common ones, and a tenth of them the missing value or extremes."""
    extremes = [0.0, math.log1p(2**31)] if column.transform == "log" else [-10.0, 10.0]
    rare = torch.tensor([column.missing, *extremes])
    common = torch.randn(size, generator=generator)
    chosen = rare[torch.randint(len(rare), (size,), generator=generator)]
    common = common.abs() if column.transform == "log" else common
    return torch.where(torch.rand(size, generator=generator) < 0.1, chosen, common)


def _lengths(longest: int, size: int, generator: torch.Generator) -> Tensor:
    lengths = torch.randint(longest + 1, (size,), generator=generator)
    lengths[:2] = torch.tensor([longest, 0])[:size]
    return lengths


def _ids(feature: Feature, edges: list[int], num_ids: int, generator: torch.Generator) -> Tensor:
    """Ids [L]: those of `edges` first, then half of them popular and half any."""
    drawn = torch.rand(num_ids, generator=generator, dtype=torch.float64)
    drawn[::2] **= 4
    ids = (drawn * feature.num_rows).long().clamp_(max=feature.num_rows - 1)
    count = min(len(edges), num_ids)
    ids[:count] = torch.tensor(edges[:count])
    return ids[torch.randperm(num_ids, generator=generator)]
