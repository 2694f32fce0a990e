"""Metrics of the true probabilities of a synthetic log: no model can do better on average."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdall.data.dataset import DataSet
from holdall.evaluation.metrics import exact_auc


def best_possible(probability: npt.ArrayLike, label: npt.ArrayLike) -> dict[str, float]:
    """Metrics of the true probabilities [R] on the labels [R] that were drawn from them."""
    p = np.asarray(probability, dtype=np.float64)
    y = np.asarray(label, dtype=np.float64)
    # Float32 probabilities can round to 0 or 1; clipping to the nearest others keeps the loss finite.
    p = np.clip(p, np.finfo(np.float32).tiny, 1.0 - np.finfo(np.float32).epsneg)
    auc = exact_auc(p, y)
    logloss = -np.where(y == 1, np.log(p), np.log1p(-p)).mean()
    rate = y.mean()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    return {
        "auc": auc,
        "logloss": float(logloss),
        "normalized_entropy": float(logloss / entropy),
        "accuracy": float(((p >= 0.5) == y).mean()),
        "samples": len(y),
    }


def best_possible_of(data: DataSet) -> dict[str, float]:
    """`best_possible` of a split of a synthetic data folder."""
    return best_possible(data.probability(), data.labels())
