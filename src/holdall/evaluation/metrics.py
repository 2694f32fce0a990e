"""Quality of click predictions in bounded memory: AUC, logloss, normalised entropy, accuracy, calibration.

Nothing here keeps a prediction. AUC comes from two histograms of the logits, one a class (1 MiB in all at the default
number of bins), with a bound on its error that is computed from the same histograms.
"""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from holdall.common.errors import ConfigError, DataError

BATCH_SIZE = 16_384
"""Rows that an evaluation scores at once."""

# 2^16 bins gave errors below 1e-6 and bounds below 1e-4 on a million normal logits centred at -3.
NUM_BINS = 1 << 16


class BinaryMetrics:
    """Metrics of a binary classifier, accumulated over batches of logits.

    A logit x falls into bin `floor((x / (1 + |x|) + 1) / 2 * num_bins)`: this map grows strictly over all of the reals,
    so nothing is clipped, and its bins are finest around 0 (width 3e-5 at 0, 5e-4 at 3, 4e-3 at 10 for 2^16 bins).
    Pairs of a positive and a negative in different bins are ordered as their logits are; a pair in one bin counts one
    half, as a tie does. So the error of the AUC is at most half the share of such pairs:

        auc_error_bound = sum over bins of positives * negatives / (2 * P * N)

    `update` launches work but never waits for the device. Invalid values are therefore counted, and reported by
    `compute`. `counts` and `sums` are the whole state: summed element by element over processes (an all-reduce each),
    they are the state of all samples.
    """

    def __init__(self, num_bins: int = NUM_BINS, device: torch.device | str = "cpu"):
        if num_bins < 2:
            raise ConfigError(f"num_bins is {num_bins}, it must be 2 or more")
        self.num_bins = num_bins
        self.counts = torch.zeros(2, num_bins, dtype=torch.int64, device=device)
        """Samples by label and bin."""
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        """Sums of logloss, predicted probability, correct predictions, non-finite logits, labels other than 0 and 1."""

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits [B] of any float type and labels [B] of 0 and 1, on the device of the metrics."""
        if logits.shape != labels.shape or logits.dim() != 1:
            raise DataError(
                f"metrics need logits and labels of one shape [B], got {list(logits.shape)} and {list(labels.shape)}"
            )
        # Through float32 first: neighbours of that type stay apart in the float64 arithmetic below, so that rounding
        # cannot swap two logits at the edge of a bin.
        logit = logits.detach().float().double()
        label = labels.detach().double()
        finite = torch.isfinite(logit)
        binary = (label == 0) | (label == 1)
        good = finite & binary
        logit = torch.where(good, logit, 0.0)
        label = torch.where(good, label, 0.0)
        weight = good.double()
        positive = label > 0.5
        sums = (
            F.softplus(torch.where(positive, -logit, logit), threshold=50) * weight,
            torch.sigmoid(logit) * weight,
            ((logit > 0) == positive) & good,
            ~finite,
            ~binary,
        )
        self.sums += torch.stack([values.sum(dtype=torch.float64) for values in sums])
        place = ((logit / (1 + logit.abs()) + 1) * (self.num_bins / 2)).long().clamp_(max=self.num_bins - 1)
        self.counts.view(-1).scatter_add_(0, place + positive * self.num_bins, good.long())

    def merge(self, other: BinaryMetrics) -> None:
        """Add the samples of `other` to these."""
        if other.num_bins != self.num_bins:
            raise ConfigError(f"metrics of {other.num_bins} bins cannot be merged into metrics of {self.num_bins}")
        self.counts += other.counts.to(self.counts.device)
        self.sums += other.sums.to(self.sums.device)

    def compute(self, allow_one_class: bool = False) -> dict[str, float]:
        """`auc`, `auc_error_bound`, `logloss`, `normalized_entropy`, `accuracy`, `calibration`, `samples`, `positives`.

        Normalised entropy is logloss over the entropy of the base rate (1 is what predicting the base rate gives);
        calibration is the mean prediction over the mean label (1 is right, above 1 predicts too many clicks).
        With one class only, AUC and normalised entropy do not exist (nor calibration without positives): an error, or
        NaN in their place with `allow_one_class`.
        """
        negatives, positives = self.counts.cpu().double()
        logloss, predicted, correct, num_nonfinite, num_bad_labels = self.sums.tolist()
        num_positives, num_negatives = float(positives.sum()), float(negatives.sum())
        total = num_positives + num_negatives
        self._refuse_bad_values(int(num_nonfinite), int(num_bad_labels))
        if total == 0:
            raise DataError("metrics of no samples are undefined: the split is empty")
        one_class = num_positives == 0 or num_negatives == 0
        if one_class and not allow_one_class:
            raise DataError(_one_class_message(int(total), int(num_positives)))
        auc = bound = entropy = math.nan
        if not one_class:
            pairs = num_positives * num_negatives
            below = negatives.cumsum(0) - negatives
            shared = float((positives * negatives).sum()) / 2
            auc = (float((positives * below).sum()) + shared) / pairs
            bound = shared / pairs
            rate = num_positives / total
            entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
        return {
            "auc": auc,
            "auc_error_bound": bound,
            "logloss": logloss / total,
            "normalized_entropy": logloss / total / entropy,
            "accuracy": correct / total,
            "calibration": predicted / num_positives if num_positives else math.nan,
            "samples": int(total),
            "positives": int(num_positives),
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
        raise DataError(_one_class_message(label.size, num_positives))
    distinct, place = numpy.unique(score, return_inverse=True)
    positives = numpy.bincount(place, weights=positive, minlength=distinct.size)
    negatives = numpy.bincount(place, weights=~positive, minlength=distinct.size)
    below = numpy.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / num_positives / num_negatives)


def _one_class_message(num_samples: int, num_positives: int) -> str:
    return (
        f"AUC is undefined: all {num_samples} labels are {1 if num_positives else 0} "
        f"({num_positives} positives, {num_samples - num_positives} negatives): "
        f"use a split that holds both classes, a larger one for instance"
    )
