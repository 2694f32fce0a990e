"""Metrics within groups of rows, such as those of one user: AUC, and HR@K and NDCG@K among the rows of the group.

Ties count as in `ranking`. Memory: 12 bytes per row for the order, and the scores of the group that is being read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError, DataError
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.evaluation.metrics import BATCH_SIZE
from holdall.evaluation.ranking import RankingMetrics
from holdall.models.model import batch_device, evaluating


class GroupedAUC:
    """AUC within each group, averaged over the groups that have both classes, weighted by their rows.

        GAUC = sum_g n_g AUC_g / sum_g n_g

    Exact, with ties counting half. The rows of a group must follow one another (`grouped_batches` yields them in that
    order), over any number of updates. Kept are the last group's rows, and one byte a group id to detect a group that
    occurs again. `ranking` receives the place of every positive among the negatives of its group.
    """

    def __init__(self, ranking: RankingMetrics | None = None):
        self.ranking = ranking
        self.weighted, self.weight = 0.0, 0
        self.num_groups, self.num_left_out = 0, 0
        self._seen = torch.zeros(0, dtype=torch.bool)
        self._open: tuple[Tensor, Tensor, Tensor] | None = None

    @torch.no_grad()
    def update(self, scores: Tensor, labels: Tensor, groups: Tensor) -> None:
        """Add rows: scores [B], labels [B] of 0 and 1, and the group [B] of each, an id from 0."""
        if not scores.shape == labels.shape == groups.shape or scores.dim() != 1:
            shapes = [list(tensor.shape) for tensor in (scores, labels, groups)]
            raise DataError(f"grouped metrics need scores, labels and groups of one shape [B], got {shapes}")
        rows = (scores.detach().float().cpu(), labels.detach().cpu(), groups.detach().long().cpu())
        if not bool(rows[0].isfinite().all()):
            raise DataError("some scores are not finite numbers: the model has diverged")
        if not bool(((rows[1] == 0) | (rows[1] == 1)).all()):
            raise DataError("some labels are neither 0 nor 1: these metrics are for binary labels")
        if not rows[0].numel():
            return
        if self._open is not None:
            rows = tuple(torch.cat(pair) for pair in zip(self._open, rows, strict=True))  # type: ignore[assignment]
        of = rows[2]
        changes = (of[1:] != of[:-1]).nonzero()
        end = int(changes[-1]) + 1 if changes.numel() else 0
        self._open = (rows[0][end:].clone(), rows[1][end:].clone(), of[end:].clone())
        if end:
            self._close(rows[0][:end], rows[1][:end], of[:end])

    def _close(self, scores: Tensor, labels: Tensor, groups: Tensor) -> None:
        """Count groups whose rows are complete."""
        self._refuse_repeated(groups.unique_consecutive())
        _, index = groups.unique(return_inverse=True)
        of_positive, higher, level = places(scores, labels, index)
        num_groups = int(index.max()) + 1
        num_rows = torch.bincount(index, minlength=num_groups)
        num_positives = torch.bincount(of_positive, minlength=num_groups)
        num_negatives = num_rows - num_positives
        credit = torch.zeros(num_groups, dtype=torch.float64)
        credit.index_add_(0, of_positive, num_negatives[of_positive] - higher - level.double() / 2)
        both = (num_positives > 0) & (num_negatives > 0)
        auc = credit[both] / (num_positives * num_negatives)[both]
        self.weighted += float((auc * num_rows[both]).sum())
        self.weight += int(num_rows[both].sum())
        self.num_groups += int(both.sum())
        self.num_left_out += int((~both).sum())
        if self.ranking is not None:
            device, ranked = self.ranking.sums.device, both[of_positive]
            self.ranking.add(higher[ranked].to(device), level[ranked].to(device))

    def _refuse_repeated(self, groups: Tensor) -> None:
        if int(groups.min()) < 0:
            raise DataError(f"group {int(groups.min())} is no id: groups are counted from 0")
        if int(groups.max()) >= self._seen.numel():
            self._seen = F.pad(self._seen, (0, max(int(groups.max()) + 1, 2 * self._seen.numel()) - self._seen.numel()))
        again = groups[self._seen[groups]]
        if not again.numel() and groups.unique().numel() != groups.numel():
            ordered = groups.sort().values
            again = ordered[1:][ordered[1:] == ordered[:-1]]
        if again.numel():
            raise DataError(f"the rows of group {int(again[0])} do not follow one another: sort them by group")
        self._seen[groups] = True

    def compute(self) -> dict[str, float]:
        """`gauc`, the `groups` it is the mean of, and `groups_left_out` for having one class only; ends the last group.

        With `ranking`, its metrics too.
        """
        if self._open is not None:
            rows, self._open = self._open, None
            self._close(*rows)
        if not self.num_groups:
            raise DataError(f"grouped AUC is undefined: none of {self.num_left_out} groups has both classes")
        found = {
            "gauc": self.weighted / self.weight,
            "groups": self.num_groups,
            "groups_left_out": self.num_left_out,
        }
        return found if self.ranking is None else {**found, **self.ranking.compute()}


def places(scores: Tensor, labels: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every positive: its group, the negatives of that group that score higher, and those that score the same.

    `groups` [n] are indices from 0. O(n log n), whatever the sizes of the groups.
    """
    order = scores.argsort(descending=True, stable=True)
    order = order[groups[order].argsort(stable=True)]
    score, group, negative = scores[order], groups[order], labels[order] == 0
    new_group = F.pad(group[1:] != group[:-1], (1, 0), value=True)
    new_run = new_group | F.pad(score[1:] != score[:-1], (1, 0), value=True)
    run = new_run.cumsum(0) - 1  # rows of one group and one score
    before = negative.cumsum(0) - negative.long()  # negatives of all rows above
    level = torch.zeros(int(new_run.sum()), dtype=torch.int64, device=scores.device).index_add_(0, run, negative.long())
    before_run, before_group = before[new_run][run], before[new_group][new_group.cumsum(0) - 1]
    positive = ~negative
    return group[positive], (before_run - before_group)[positive], level[run][positive]


def grouped_batches(data: DataSet, feature: str, batch_size: int = BATCH_SIZE) -> Iterator[tuple[Batch, Tensor]]:
    """All rows of a split, those with the same id of `feature` one after the other; and that id [B] of each.

    Works for any order of the files; keeps 12 bytes per row, and reads rows as they come up.
    """
    if not data.schema.feature(feature).one_hot:
        raise ConfigError(f"rows can be grouped by a feature of one id per sample, '{feature}' has several")
    column = [f.name for f in data.schema.features if f.one_hot].index(feature)
    parts = [data.columns(i, min(i + (1 << 20), len(data))).ids[:, column] for i in range(0, len(data), 1 << 20)]
    ids = np.concatenate([np.zeros(0, dtype=np.int32), *parts])
    order = np.argsort(ids, kind="stable")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        yield data.take(rows), torch.from_numpy(ids[rows])


def grouped_metrics(
    model: nn.Module, data: DataSet, feature: str, k: int | None = 10, *, batch_size: int = BATCH_SIZE
) -> dict[str, float]:
    """GAUC, HR@K and NDCG@K of a model over a split, within the rows of each id of `feature` (the user).

    For HR and NDCG a case is a positive among the negatives of its group: groups of a leave-one-out split hold one.
    With a `k` of None, GAUC alone. Values that share the feature's unseen row are one group.
    """
    device = batch_device(model)
    metrics = GroupedAUC(None if k is None else RankingMetrics(k))
    with evaluating(model):
        for batch, groups in grouped_batches(data, feature, batch_size):
            metrics.update(model(batch.to(device)), batch.label, groups)
    return metrics.compute()
