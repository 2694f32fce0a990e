"""Quality of click predictions in bounded memory: AUC, logloss, normalised entropy, accuracy, calibration.

Nothing here keeps a prediction. AUC comes from a histogram of the logits by class, with a bound on its error that is
computed from the same histogram.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from holdall.common.errors import DataError
from holdall.evaluation.logit_histogram import NUM_BINS, LogitHistogram

ONE = 1 << 20
"""Weight of 1 as the histogram counts it: AUC takes weights in steps of a millionth, so that sums are exact."""
BATCH_SIZE = 16_384
"""Rows that an evaluation scores at once."""


class BinaryMetrics:
    """Metrics of a binary classifier, accumulated over batches of logits.

    Logits are counted as float32 numbers in a `LogitHistogram`, whose bins adapt to them. Pairs of a positive and a
    negative in different bins are ordered as their logits are; a pair in one bin counts one half, as a tie does. So
    the error of the AUC is at most half the share of such pairs:

        auc_error_bound = sum over bins of positives * negatives / (2 * P * N)

    It is 0 where every bin is known to hold one number alone: then all such pairs are ties.

    With weights, every sample counts as its weight: the rates and pairs of AUC, logloss, accuracy and calibration are
    sums of weights. `samples` and `positives` count rows, and a sample of weight 0 changes these alone.

    `update` launches work but never waits for the device. Invalid values are therefore counted, and reported by
    `compute`. Metrics of several processes are added up by `sum_over_ranks`; AUC and its bound are then those of one
    process with all samples, to the bit.
    """

    def __init__(self, num_bins: int = NUM_BINS, device: torch.device | str = "cpu"):
        self.histogram = LogitHistogram(num_bins, device)
        """Samples by label and logit."""
        self.sums = torch.zeros(10, dtype=torch.float64, device=device)
        """Sums of logloss, predicted probability, correct predictions, non-finite logits, labels other than 0 and 1,
        logits that are no float32 numbers; and of samples with weights, positives among these, and the weights of
        negatives and of positives."""

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch: logits [B] of any float type and labels [B] of 0 and 1, on the device of the metrics.

        Weights [B] are finite and not negative; either all batches have them or none.
        """
        if logits.shape != labels.shape or logits.dim() != 1:
            raise DataError(
                f"metrics need logits and labels of one shape [B], got {list(logits.shape)} and {list(labels.shape)}"
            )
        logit, label = logits.detach().double(), labels.detach()
        positive = label == 1
        if weights is not None:
            self._update_weighted(logits, logit, label, weights.detach())
            return
        # Values that are not valid are counted as they come: `compute` refuses all results once there is one.
        sums = (
            F.softplus(torch.where(positive, -logit, logit), threshold=50).sum(),
            torch.sigmoid(logit).sum(),
            ((logit > 0) == positive).count_nonzero(),
            (~torch.isfinite(logit)).count_nonzero(),
            (~positive & (label != 0)).count_nonzero(),
            (logit.float() != logit).count_nonzero() if logits.dtype == torch.float64 else self.sums.new_zeros(()),
        )
        self.sums[:6] += torch.stack([value.double() for value in sums])
        self.histogram.add(logits.detach(), positive)

    def _update_weighted(self, logits: Tensor, logit: Tensor, label: Tensor, weights: Tensor) -> None:
        """`update` with weights; `logit` is `logits` in float64."""
        positive, weight = label == 1, weights.double()
        loss = F.softplus(torch.where(positive, -logit, logit), threshold=50)
        # Weights of 0 must not hide a logit that is not finite: these are counted by row.
        sums = (
            torch.where(weight > 0, loss * weight, 0.0).sum(),
            torch.where(weight > 0, torch.sigmoid(logit) * weight, 0.0).sum(),
            (((logit > 0) == positive) * weight).sum(),
            (~torch.isfinite(logit)).count_nonzero(),
            (~positive & (label != 0)).count_nonzero(),
            (logit.float() != logit).count_nonzero() if logits.dtype == torch.float64 else self.sums.new_zeros(()),
            self.sums.new_full((), float(len(label))),
            positive.count_nonzero(),
            (weight * ~positive).sum(),
            (weight * positive).sum(),
        )
        self.sums += torch.stack([value.double() for value in sums])
        self.histogram.add(logits.detach(), positive, (weight * ONE).round().long())

    def merge(self, other: BinaryMetrics) -> None:
        """Add the samples of `other` to these."""
        self.histogram.merge(other.histogram)
        self.sums += other.sums.to(self.sums.device)

    def sum_over_ranks(self, reduce: Callable[[Tensor], None]) -> None:
        """Metrics of the samples of all ranks, on each of them; `reduce` adds up a tensor over the ranks in place."""
        self.histogram.sum_over_ranks(reduce)
        reduce(self.sums)

    def compute(self, allow_one_class: bool = False) -> dict[str, float]:
        """`auc`, `auc_error_bound`, `logloss`, `normalized_entropy`, `accuracy`, `calibration`, `samples`, `positives`.

        Normalised entropy is logloss over the entropy of the base rate (1 is what predicting the base rate gives);
        calibration is the mean prediction over the mean label (1 is right, above 1 predicts too many clicks).
        With one class only, AUC and normalised entropy do not exist (nor calibration without positives): an error, or
        NaN in their place with `allow_one_class`.
        """
        negatives, positives = self.histogram.counts().cpu().double()
        logloss, predicted, correct, num_nonfinite, num_bad_labels, num_rounded, *weighted = self.sums.tolist()
        num_positives, num_negatives = float(positives.sum()), float(negatives.sum())
        total = num_positives + num_negatives
        samples, positive_samples = int(total), int(num_positives)
        if weighted[0]:
            negatives, positives = negatives / ONE, positives / ONE
            samples, positive_samples = int(weighted[0]), int(weighted[1])
            num_negatives, num_positives = weighted[2:]
            total = num_negatives + num_positives
        self._refuse_bad_values(int(num_nonfinite), int(num_bad_labels))
        if total == 0:
            found = f"all {samples:,} rows weigh 0" if samples else "the split is empty"
            raise DataError(f"metrics of no samples are undefined: {found}")
        pairs = float(positives.sum()) * float(negatives.sum())
        one_class = pairs == 0
        if one_class and not allow_one_class:
            raise DataError(one_class_message(samples, positive_samples))
        auc = bound = entropy = math.nan
        if not one_class:
            below = negatives.cumsum(0) - negatives
            shared = float((positives * negatives).sum()) / 2
            auc = (float((positives * below).sum()) + shared) / pairs
            bound = 0.0 if self.histogram.is_exact() and not num_rounded else shared / pairs
            rate = num_positives / total
            entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
        return {
            "auc": auc,
            "auc_error_bound": bound,
            "logloss": logloss / total,
            "normalized_entropy": logloss / total / entropy,
            "accuracy": correct / total,
            "calibration": predicted / num_positives if num_positives else math.nan,
            "samples": samples,
            "positives": positive_samples,
        }

    def _refuse_bad_values(self, num_nonfinite: int, num_bad_labels: int) -> None:
        if num_nonfinite:
            raise DataError(
                f"{num_nonfinite} logits are not finite numbers (NaN or infinite): the model has diverged, or its "
                f"input holds such values; lower the learning rate or check the dense columns"
            )
        if num_bad_labels:
            raise DataError(f"{num_bad_labels} labels are neither 0 nor 1: these metrics are for binary labels")


def exact_auc(scores: Any, labels: Any) -> float:
    """Probability that a random positive scores above a random negative, ties counting half; keeps every score.

    `scores` and `labels` are [n] arrays or host tensors. O(n log n). The reference for `BinaryMetrics`.
    """
    score = numpy.asarray(scores)
    label = numpy.asarray(labels)
    if score.shape != label.shape or score.ndim != 1:
        raise DataError(f"exact_auc needs scores and labels of one shape [n], got {score.shape} and {label.shape}")
    num_nonfinite = int((~numpy.isfinite(score)).sum())
    if num_nonfinite:
        raise DataError(f"{num_nonfinite} scores are not finite numbers")
    if not numpy.isin(label, (0, 1)).all():
        raise DataError("exact_auc needs labels of 0 and 1")
    positive = label == 1
    num_positives = int(positive.sum())
    num_negatives = label.size - num_positives
    if not num_positives or not num_negatives:
        raise DataError(one_class_message(label.size, num_positives))
    distinct, place = numpy.unique(score, return_inverse=True)
    positives = numpy.bincount(place, weights=positive, minlength=distinct.size)
    negatives = numpy.bincount(place, weights=~positive, minlength=distinct.size)
    below = numpy.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / num_positives / num_negatives)


def one_class_message(num_samples: int, num_positives: int) -> str:
    """The error of an AUC of rows that are all positives, or all negatives."""
    return (
        f"AUC is undefined: all {num_samples} labels are {1 if num_positives else 0} "
        f"({num_positives} positives, {num_samples - num_positives} negatives): "
        f"use a split that holds both classes, a larger one for instance"
    )
