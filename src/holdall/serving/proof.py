"""Proof of a released model's quality: paired differences to the trained model on the same rows, with their bounds."""

from __future__ import annotations

from dataclasses import dataclass
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

    @property
    def loss_bound(self) -> float:
        """95% bound of the loss of AUC."""
        return self.auc.loss_bound

    @property
    def bound_text(self) -> str:
        """The bound in words."""
        return f"{'gains at least' if self.loss_bound < 0 else 'loses at most'} {abs(self.loss_bound):.5f}"

    def to_json(self) -> dict[str, Any]:
        return {"auc": self.auc.to_json(), "logloss": self.logloss.to_json()}


def compare(reference: SplitScores, candidate: SplitScores, rows: Tensor | None = None) -> Comparison:
    """Comparison of two models scored on the same split, on all of its rows or on some [n] bool."""
    chosen = slice(None) if rows is None else rows
    first, second, labels = reference.logits[chosen], candidate.logits[chosen], reference.labels[chosen]
    return Comparison(paired_auc(first, second, labels), paired_logloss(first, second, labels))


def halves(num_rows: int) -> tuple[Tensor, Tensor]:
    """Two halves [num_rows] bool of a split: one to choose by, the other to prove the choice on.

    A bound holds for one comparison that was decided on beforehand, so rows that decided on a form cannot prove it.
    Rows are drawn by a hash of their number: in implicit data every n-th row is a positive.
    """
    drawn = torch.from_numpy(hash_numbers(np.arange(num_rows), HALVES_SEED).astype(np.int64) & 1).bool()
    return drawn, ~drawn
