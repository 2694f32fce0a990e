"""Paired differences of AUC and of logloss between two models scored on the same rows, with bounds.

The errors of two models on one split are nearly the same errors, and cancel in the difference: where one AUC on 27,000
rows has a standard error of 0.004, that of a model and its compressed form differ with a tenth of it. So a loss of
quality of a few ten-thousandths can be proved on a validation split of ordinary size.

The variance of the AUC is that of DeLong, DeLong and Clarke-Pearson, "Comparing the areas under two or more correlated
receiver operating characteristic curves" (Biometrics 1988), computed from ranks in O(n log n) as by Sun and Xu (IEEE
Signal Processing Letters 2014). All counts are whole numbers, so that ties and equal models are exact. Bounds are those
of the normal distribution, for one comparison that was decided on beforehand.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from holdall.common.errors import DataError
from holdall.evaluation.metrics import one_class_message

CONFIDENCE = 0.95
BLOCK_ROWS = 1 << 20
"""Rows whose logloss is computed at once."""


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Difference of a metric between a candidate and the reference that it is to replace, on the same rows."""

    metric: Literal["auc", "logloss"]
    reference: float
    candidate: float
    difference: float
    """`candidate - reference`, computed from the rows: it does not lose the digits that both have in common."""
    standard_error: float
    """Standard error of the difference."""
    rows: int
    confidence: float = CONFIDENCE

    @property
    def interval(self) -> tuple[float, float]:
        """Two-sided confidence interval of the difference."""
        margin = NormalDist().inv_cdf((1 + self.confidence) / 2) * self.standard_error
        return self.difference - margin, self.difference + margin

    @property
    def loss(self) -> float:
        """Observed loss of quality: AUC that the candidate has less, or logloss that it has more."""
        return -self.difference if self.metric == "auc" else self.difference

    @property
    def loss_bound(self) -> float:
        """One-sided upper bound of the loss: the true one is below it with probability `confidence`."""
        return self.loss + self._one_sided * self.standard_error

    @property
    def gain_bound(self) -> float:
        """One-sided upper bound of the gain of quality, `-loss`."""
        return -self.loss + self._one_sided * self.standard_error

    @property
    def _one_sided(self) -> float:
        return NormalDist().inv_cdf(self.confidence)

    def to_json(self) -> dict[str, Any]:
        """Its numbers and bounds by name."""
        return {**asdict(self), "interval": list(self.interval), "loss": self.loss, "loss_bound": self.loss_bound}


def paired_auc(reference: Any, candidate: Any, labels: Any, *, confidence: float = CONFIDENCE) -> PairedDifference:
    """Paired difference of AUC, by DeLong's variance; scores and labels are [n] arrays or host tensors.

    With P positives and N negatives, a positive's placement is the share of negatives below it, ties counting half; a
    negative's is the share of positives above it. AUC is the mean of either, and the variance of a difference is

        var(differences of positives) / P + var(differences of negatives) / N

    Memory is about 50 bytes a row.
    """
    first, second, positive = _checked(reference, candidate, labels, confidence)
    num_positives = int(positive.sum())
    num_negatives = positive.size - num_positives
    if min(num_positives, num_negatives) == 0:
        raise DataError(one_class_message(positive.size, num_positives))
    if min(num_positives, num_negatives) == 1:
        raise DataError(
            f"a bound of the AUC needs two rows of each class at least, not {num_positives} positives and "
            f"{num_negatives} negatives: use a larger split"
        )
    credit = _credits(first, positive)
    reference_auc = _auc(credit, positive)
    change = _credits(second, positive)
    candidate_auc = _auc(change, positive)
    change -= credit
    of_positives = change[positive] / (2 * num_negatives)
    of_negatives = change[~positive] / (2 * num_positives)
    variance = of_positives.var(ddof=1) / num_positives + of_negatives.var(ddof=1) / num_negatives
    return PairedDifference(
        metric="auc",
        reference=reference_auc,
        candidate=candidate_auc,
        difference=_auc(change, positive),
        standard_error=math.sqrt(variance),
        rows=positive.size,
        confidence=confidence,
    )


def paired_logloss(reference: Any, candidate: Any, labels: Any, *, confidence: float = CONFIDENCE) -> PairedDifference:
    """Paired difference of the mean logloss of logits: the mean and the standard error of the difference of a row."""
    first, second, positive = _checked(reference, candidate, labels, confidence)
    if positive.size < 2:
        raise DataError(f"a bound of the logloss needs two rows at least, not {positive.size}: use a larger split")
    total, change, squares = 0.0, 0.0, 0.0
    for start in range(0, positive.size, BLOCK_ROWS):
        part = slice(start, start + BLOCK_ROWS)
        losses = _losses(first[part], positive[part])
        changes = _losses(second[part], positive[part]) - losses
        total, change, squares = total + losses.sum(), change + changes.sum(), squares + np.square(changes).sum()
    rows = positive.size
    variance = max(0.0, squares - change * change / rows) / (rows - 1)
    return PairedDifference(
        metric="logloss",
        reference=float(total / rows),
        candidate=float((total + change) / rows),
        difference=float(change / rows),
        standard_error=math.sqrt(variance / rows),
        rows=rows,
        confidence=confidence,
    )


def rows_needed(limit: float, difference: PairedDifference, *, loss: float | None = None) -> int | None:
    """Rows of such a split on which the bound of the loss would be at most `limit`; None if no number would do.

    Rows have the variance that was observed, and the loss that was observed, or `loss`. A loss of `limit` or more
    cannot be shown to be less.
    """
    margin = limit - (difference.loss if loss is None else loss)
    if difference.standard_error == 0:
        return difference.rows if margin >= 0 else None
    if not margin > 0:
        return None
    quantile = NormalDist().inv_cdf(difference.confidence)
    return math.ceil(difference.rows * (quantile * difference.standard_error / margin) ** 2)


def _checked(
    reference: Any, candidate: Any, labels: Any, confidence: float
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
    """Scores of both models and whether each row is a positive."""
    if not 0.5 <= confidence < 1:
        raise DataError(f"the confidence of a bound is from 0.5 to below 1, not {confidence}")
    first, second, label = np.asarray(reference), np.asarray(candidate), np.asarray(labels)
    if not first.shape == second.shape == label.shape or label.ndim != 1:
        shapes = f"{list(first.shape)}, {list(second.shape)} and {list(label.shape)}"
        raise DataError(
            f"a paired difference needs two scores and a label of the same rows [n], not {shapes}: score one split "
            f"with both models"
        )
    for name, scores in (("reference", first), ("candidate", second)):
        if bad := int((~np.isfinite(scores)).sum()):
            raise DataError(f"{bad} scores of the {name} are not finite numbers: the model has diverged")
    positive = label == 1
    if not np.array_equal(positive, label):
        raise DataError("some labels are neither 0 nor 1: these metrics are for binary labels")
    return first, second, positive


def _credits(scores: NDArray[Any], positive: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Twice the rows of the other class that each row is ordered rightly with, ties counting once."""
    order = np.argsort(scores)
    ordered, is_positive = scores[order], positive[order]
    starts = np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1))
    lengths = np.diff(starts, append=scores.size)
    positives = np.add.reduceat(is_positive.astype(np.int64), starts)
    negatives = lengths - positives
    below = 2 * np.cumsum(negatives) - negatives
    above = 2 * (positives.sum() - np.cumsum(positives)) + positives
    found = np.empty(scores.size, dtype=np.int64)
    found[order] = np.where(is_positive, np.repeat(below, lengths), np.repeat(above, lengths))
    return found


def _auc(credit: NDArray[np.int64], positive: NDArray[np.bool_]) -> float:
    """AUC of `_credits`, or the difference of two from theirs."""
    num_positives = int(positive.sum())
    return int(credit[positive].sum()) / (2 * num_positives * (positive.size - num_positives))


def _losses(logits: NDArray[Any], positive: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Logloss of every row."""
    signed = logits.astype(np.float64)
    return np.logaddexp(0.0, np.where(positive, -signed, signed))
