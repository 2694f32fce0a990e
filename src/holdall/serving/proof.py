"""Proof of a released model's quality: paired differences to the trained model on the same rows, with their bounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdall.data.splits import hash_numbers
from holdall.evaluation.evaluate_model import SplitScores
from holdall.evaluation.paired import PairedDifference, paired_auc, paired_logloss

HALVES_SEED = 0x5EED
"""Seed of the halves of a split."""


@dataclass(frozen=True)
class Comparison:
    """Differences of AUC and logloss of a candidate to the reference that it is to replace, on the same rows."""

    auc: PairedDifference
    logloss: PairedDifference
    calibration: Calibration

    @property
    def bound_text(self) -> str:
        """Both bounds in words."""
        auc, logloss = self.auc.loss_bound, self.logloss.loss_bound
        return (
            f"{'gains at least' if auc < 0 else 'loses at most'} {abs(auc):.5f} AUC and its logloss "
            f"{'falls by at least' if logloss < 0 else 'rises by at most'} {abs(logloss):.5f}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "auc": self.auc.to_json(),
            "logloss": self.logloss.to_json(),
            "calibration": asdict(self.calibration),
        }


@dataclass(frozen=True)
class Calibration:
    """Mean prediction over mean label of two models on the same rows: 1 is right, above 1 predicts too many clicks."""

    reference: float
    candidate: float


@dataclass(frozen=True)
class Limits:
    """Largest loss of AUC and largest increase of logloss that a form may have; None where there is no limit."""

    auc: float | None = None
    logloss: float | None = None

    @property
    def any(self) -> bool:
        return self.auc is not None or self.logloss is not None

    def exceeded(self, comparison: Comparison) -> tuple[tuple[float, PairedDifference], ...]:
        """Limits that a form is not proved to keep, with the difference that has the larger bound."""
        pairs = ((self.auc, comparison.auc), (self.logloss, comparison.logloss))
        return tuple((limit, one) for limit, one in pairs if limit is not None and not one.loss_bound <= limit)

    def to_json(self) -> dict[str, Any]:
        return {"max_auc_loss": self.auc, "max_logloss_increase": self.logloss}


def compare(reference: SplitScores, candidate: SplitScores, rows: Tensor | None = None) -> Comparison:
    """Comparison of two models scored on the same split, on all of its rows or on some [n] bool."""
    chosen = slice(None) if rows is None else rows
    first, second, labels = reference.logits[chosen], candidate.logits[chosen], reference.labels[chosen]
    auc, logloss = paired_auc(first, second, labels), paired_logloss(first, second, labels)
    clicks = float(labels.double().sum())
    predicted = [float(torch.sigmoid(logits.double()).sum()) for logits in (first, second)]
    return Comparison(auc, logloss, Calibration(predicted[0] / clicks, predicted[1] / clicks))


def halves(num_rows: int) -> tuple[Tensor, Tensor]:
    """Two halves [num_rows] bool of a split: one to choose by, the other to prove the choice on.

    A bound holds for one comparison that was decided on beforehand, so rows that decided on a form cannot prove it.
    Rows are drawn by a hash of their number: in implicit data every n-th row is a positive.
    """
    drawn = torch.from_numpy(hash_numbers(np.arange(num_rows), HALVES_SEED).astype(np.int64) & 1).bool()
    return drawn, ~drawn
