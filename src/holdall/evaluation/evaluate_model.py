"""Metrics of a model in memory on a split, measured by one process or by several."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdall.common.progress import SampleProgress
from holdall.data.batch import Batch, Ids
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.data.ranking_cases import RankingCases
from holdall.evaluation.metrics import BATCH_SIZE, BinaryMetrics
from holdall.evaluation.ranking import K, ranking_metrics
from holdall.models.model import batch_device, evaluating


@dataclass(frozen=True)
class SplitShare:
    """Part of a split that this process measures, and the sum of results over processes."""

    rank: int = 0
    world_size: int = 1
    reduce: Callable[[Tensor], None] = lambda _: None
    """Adds up a tensor over the processes, in place."""
    fetch_rows: Callable[[Ids], None] | None = None
    """Fetches the rows of a batch from other processes, before its lookup; every process calls it equally often."""

    def own(self, cases: Iterable[tuple[Batch, Tensor]]) -> Iterator[tuple[Batch, Tensor]]:
        """Ranking cases of this process; with `fetch_rows`, equally many batches on every rank, some without cases."""
        if self.fetch_rows is None:
            yield from itertools.islice(cases, self.rank, None, self.world_size)
            return
        cases = iter(cases)
        while of_all_ranks := list(itertools.islice(cases, self.world_size)):
            if self.rank < len(of_all_ranks):
                yield of_all_ranks[self.rank]
            else:
                batch, counts = of_all_ranks[0]
                yield batch.without_samples(), counts[:0]


def evaluate_model(
    model: nn.Module,
    data: DataSet,
    *,
    batch_size: int = BATCH_SIZE,
    allow_one_class: bool = False,
    quiet: bool = True,
    part: SplitShare = SplitShare(),  # noqa: B008
) -> dict[str, float]:
    """Metrics of `model` over all rows of a split, those of all processes together; see `BinaryMetrics.compute`."""
    device = batch_device(model)
    metrics = BinaryMetrics(device=device)
    with evaluating(model), SampleProgress(len(data), label=f"evaluate {data.split}", quiet=quiet) as progress:
        shares = Loader(data, batch_size, shuffle="none", rank=part.rank, world_size=part.world_size)
        for batch in shares.epoch(0):
            if part.fetch_rows is not None:
                part.fetch_rows(batch.ids)
            if not len(batch):  # fewer rows than processes
                continue
            batch = batch.to(device)
            metrics.update(model(batch), batch.label, batch.weight)
            progress.update(len(batch))
    metrics.sum_over_ranks(part.reduce)
    return metrics.compute(allow_one_class=allow_one_class)


@dataclass(frozen=True)
class SplitScores:
    """Logits and labels of all rows of a split, in the order of its files: 8 bytes a row on the host."""

    logits: Tensor
    """[n] float32."""
    labels: Tensor
    """[n] float32."""


def score_split(model: nn.Module, data: DataSet, *, batch_size: int = BATCH_SIZE, quiet: bool = True) -> SplitScores:
    """Logits of `model` for every row of a split, for metrics that need them all at once (see `evaluation.paired`)."""
    device = batch_device(model)
    logits, labels = torch.empty(len(data)), torch.empty(len(data))
    done = 0
    with evaluating(model), SampleProgress(len(data), label=f"score {data.split}", quiet=quiet) as progress:
        for batch in Loader(data, batch_size, shuffle="none").epoch(0):
            part = slice(done, done + len(batch))
            logits[part], labels[part] = model(batch.to(device)).float(), batch.label
            done += len(batch)
            progress.update(len(batch))
    assert done == len(data)
    return SplitScores(logits, labels)


def rank_model(model: nn.Module, data: DataSet, k: int = K, part: SplitShare = SplitShare()) -> dict[str, float]:  # noqa: B008
    """HR@K and NDCG@K of `model` over the ranking cases of a split; see `RankingMetrics.compute`."""
    cases = RankingCases.load(data.folder, data.split).batches(data)
    return ranking_metrics(model, part.own(cases), k, reduce=part.reduce, fetch_rows=part.fetch_rows)
