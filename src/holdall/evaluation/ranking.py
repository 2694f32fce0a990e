"""Ranking metrics: HR@K and NDCG@K of positives among given or sampled negatives.

Ties. A positive with h negatives above it and e equal to it has one of the places h, ..., h + e; each counts with the
same probability, as if the tie were broken at random:

    HR@K = P(place < K)        NDCG@K = E[1 / log2(place + 2) where place < K, else 0]

So a model that scores everything alike gets K / (1 + negatives), neither the 1 nor the 0 that an order of the ties
for or against the positive would give it. Without ties this is what NCF's public code computes.

Negatives that are the positive itself (156 in the public MovieLens-1M file) do not count; how many candidates were
dropped is reported. Scores are reduced batch by batch to a few sums: no prediction is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError, DataError
from holdall.data.batch import Batch, Ids
from holdall.evaluation.metrics import BATCH_SIZE
from holdall.models import Model
from holdall.models.model import batch_device, evaluating

K = 10
"""Default number of places that count."""


class RankingMetrics:
    """HR@K and NDCG@K of positives, accumulated.

    `update` launches work but never waits for the device. `sums` is the whole state: summed over processes, it is the
    state of all cases.
    """

    def __init__(self, k: int = K, device: torch.device | str = "cpu"):
        if k < 1:
            raise ConfigError(f"metrics at K need a K of at least 1, not {k}")
        self.k = k
        gains = 1 / torch.log2(torch.arange(k, dtype=torch.float64, device=device) + 2)
        self._gains = F.pad(gains.cumsum(0), (1, 0))
        """[K + 1]: gain of the first j places together."""
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        """Hits, gains, cases, scores that are not finite, candidates dropped."""

    @torch.no_grad()
    def update(self, scores_UC: Tensor, counts_UC: Tensor | None = None) -> None:
        """Add U cases of C candidates each, the positive in column 0; `counts_UC` is False at those to leave out."""
        if scores_UC.dim() != 2 or scores_UC.shape[1] < 1:
            raise DataError(f"ranking needs scores of shape [cases, candidates], got {list(scores_UC.shape)}")
        positive, negatives = scores_UC[:, :1], scores_UC[:, 1:]
        counts = torch.ones_like(negatives, dtype=torch.bool) if counts_UC is None else counts_UC[:, 1:]
        self.sums[3] += (~positive.isfinite()).sum() + (~negatives.isfinite() & counts).sum()
        self.sums[4] += (~counts).sum()
        self.add(((negatives > positive) & counts).sum(1), ((negatives == positive) & counts).sum(1))

    @torch.no_grad()
    def add(self, higher: Tensor, level: Tensor) -> None:
        """Add positives with so many negatives above them [n], and so many level with them [n]."""
        first, last = higher.clamp(max=self.k), (higher + level + 1).clamp(max=self.k)
        places = (level + 1).double()
        self.sums[0] += ((last - first) / places).sum()
        self.sums[1] += ((self._gains[last] - self._gains[first]) / places).sum()
        self.sums[2] += higher.numel()

    def merge(self, other: RankingMetrics) -> None:
        """Add the cases of `other` to these."""
        if other.k != self.k:
            raise ConfigError(f"metrics at {other.k} cannot be merged into metrics at {self.k}")
        self.sums += other.sums.to(self.sums.device)

    def compute(self) -> dict[str, float]:
        """`hr@K`, `ndcg@K`, and over how many `cases`; `dropped` candidates were left out."""
        hits, gains, cases, num_nonfinite, dropped = self.sums.tolist()
        if num_nonfinite:
            raise DataError(f"{int(num_nonfinite)} scores are not finite numbers: the model has diverged")
        if not cases:
            raise DataError("ranking metrics of no cases are undefined: there is no positive to rank")
        return {
            f"hr@{self.k}": hits / cases,
            f"ndcg@{self.k}": gains / cases,
            "cases": int(cases),
            "dropped": int(dropped),
        }


def ranking_metrics(
    model: nn.Module,
    cases: Iterable[tuple[Batch, Tensor]],
    k: int = K,
    *,
    reduce: Callable[[Tensor], None] | None = None,
    fetch_rows: Callable[[Ids], None] | None = None,
) -> dict[str, float]:
    """HR@K and NDCG@K of a model; see `RankingMetrics.compute`.

    `cases` gives batches of U * C rows, case after case with the positive first, and which of their candidates count
    [U, C]: `RankingCases.batches` of a prepared data set, or `candidate_batches` of arrays. `reduce`
    adds up the sums of processes that have a part of the cases each; `fetch_rows` is called before each lookup.
    """
    device = batch_device(model)
    metrics = RankingMetrics(k, device)
    with evaluating(model):
        for batch, counts in cases:
            if fetch_rows is not None:
                fetch_rows(batch.ids)
            if not len(batch):
                continue
            if isinstance(model, Model):
                model.check(batch.ids)  # on the host, where the feature can be named
            metrics.update(model(batch.to(device)).view(counts.shape), counts.to(device))
    if reduce is not None:
        reduce(metrics.sums)
    return metrics.compute()


def candidate_batches(*features: Tensor, batch_size: int = BATCH_SIZE) -> Iterator[tuple[Batch, Tensor]]:
    """Cases of a model without dense columns, from ids of every feature in its order.

    A feature is [U] where the candidates of a case share its id (the user), or [U, C] with the positive's id in column
    0 (the item). Negatives that equal the positive in all of the latter do not count. A batch has about `batch_size`
    rows.
    """
    several = [ids for ids in features if ids.dim() == 2]
    if not several or {ids.shape for ids in several} != {(features[0].shape[0], several[0].shape[1])}:
        shapes = [list(ids.shape) for ids in features]
        raise ConfigError(
            f"candidates are ids [cases] or [cases, candidates], with one such shape at least, not {shapes}"
        )
    num_cases, num_candidates = several[0].shape
    counts_UC = ~torch.stack([ids == ids[:, :1] for ids in several]).all(0)
    counts_UC[:, 0] = True
    step = max(1, batch_size // num_candidates)
    for start in range(0, num_cases, step):
        part = slice(start, start + step)
        values = torch.stack(
            [
                (ids[part] if ids.dim() == 2 else ids[part, None].expand(-1, num_candidates)).reshape(-1).long()
                for ids in features
            ]
        )
        label = torch.zeros_like(counts_UC[part], dtype=torch.float32)
        label[:, 0] = 1
        batch = Batch(torch.zeros(values.shape[1], 0), Ids(values, None, len(features)), label.reshape(-1))
        yield batch, counts_UC[part]
