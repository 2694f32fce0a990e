"""Paired differences: the definition by pairs, a bootstrap, coverage of the bounds, exact cases and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdall.common.errors import DataError
from holdall.data.dataset import DataSet
from holdall.evaluation.evaluate_model import evaluate_model, score_split
from holdall.evaluation.metrics import exact_auc
from holdall.evaluation.paired import PairedDifference, paired_auc, paired_logloss, rows_needed
from holdall.models import DLRMConfig

Array = NDArray[Any]


def by_pairs(reference: Array, candidate: Array, labels: Array) -> tuple[float, float]:
    """Difference of AUC and its standard error, from every pair of a positive and a negative."""

    def wins(scores: Array) -> Array:
        gap = scores[labels == 1][:, None] - scores[labels == 0][None, :]
        return (gap > 0) + 0.5 * (gap == 0)

    change = wins(candidate) - wins(reference)
    of_positives, of_negatives = change.mean(1), change.mean(0)
    variance = of_positives.var(ddof=1) / of_positives.size + of_negatives.var(ddof=1) / of_negatives.size
    return float(change.mean()), math.sqrt(variance)


def planted(rows: int, noise: float, seed: int) -> tuple[Array, Array, Array]:
    """Logits of a model, the same with noise, and labels drawn from the model."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(-1, 1.5, rows)
    labels = (draw.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    return logits.astype(np.float32), (logits + draw.normal(0, noise, rows)).astype(np.float32), labels


@given(
    rows=st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.integers(0, 1)), min_size=0, max_size=40).map(
        lambda rows: [*rows, (0, 1, 0), (1, 0, 0), (0, 0, 1), (2, 1, 1)]
    )
)
@settings(deadline=None, max_examples=200)
def test_ranks_give_what_pairs_give(rows: list[tuple[int, int, int]]) -> None:
    """Many ties, within a class and across."""
    reference, candidate, labels = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    found = paired_auc(reference, candidate, labels)
    difference, error = by_pairs(reference, candidate, labels)
    assert found.difference == pytest.approx(difference, abs=1e-14)
    assert found.standard_error == pytest.approx(error, abs=1e-14)
    assert found.reference == pytest.approx(exact_auc(reference, labels), abs=1e-14)
    assert found.candidate == pytest.approx(exact_auc(candidate, labels), abs=1e-14)
    assert found.rows == len(rows)


def test_pairs_of_scores_without_ties() -> None:
    reference, candidate, labels = planted(1500, 0.3, 0)
    found = paired_auc(torch.from_numpy(reference), torch.from_numpy(candidate), torch.from_numpy(labels))
    difference, error = by_pairs(reference, candidate, labels)
    assert (found.difference, found.standard_error) == pytest.approx((difference, error), rel=1e-12)


def test_standard_errors_are_those_of_a_paired_bootstrap() -> None:
    reference, candidate, labels = planted(3000, 0.3, 1)
    draw = np.random.default_rng(2)
    aucs, losses = [], []
    for _ in range(400):
        rows = draw.integers(0, labels.size, labels.size)
        part = (reference[rows], candidate[rows], labels[rows])
        aucs.append(paired_auc(*part).difference)
        losses.append(paired_logloss(*part).difference)
    assert np.std(aucs) == pytest.approx(paired_auc(reference, candidate, labels).standard_error, rel=0.1)
    assert np.std(losses) == pytest.approx(paired_logloss(reference, candidate, labels).standard_error, rel=0.1)


@pytest.mark.parametrize("measure", [paired_auc, paired_logloss])
def test_bounds_hold_as_often_as_they_say(measure: Any) -> None:
    """Of 400 splits 95% are covered: 3.5 standard deviations are 15 splits."""
    truth = measure(*planted(1_000_000, 0.4, 999))
    found = [measure(*planted(500, 0.4, seed)) for seed in range(400)]
    assert truth.standard_error < found[0].standard_error / 20
    covered = sum(one.loss_bound >= truth.loss for one in found)
    inside = sum(one.interval[0] <= truth.difference <= one.interval[1] for one in found)
    gained = sum(one.gain_bound >= -truth.loss for one in found)
    assert abs(covered - 380) <= 15
    assert abs(inside - 380) <= 15
    assert abs(gained - 380) <= 15


def test_a_paired_difference_is_far_sharper_than_two_measurements() -> None:
    reference, candidate, labels = planted(20_000, 0.02, 3)
    found = paired_auc(reference, candidate, labels)
    alone = paired_auc(np.zeros_like(reference), reference, labels).standard_error
    assert found.standard_error < alone / 20


def test_equal_models_have_a_bound_of_zero() -> None:
    reference, _, labels = planted(1000, 0.0, 4)
    for measure in (paired_auc, paired_logloss):
        found = measure(reference, reference.copy(), labels)
        assert (found.difference, found.standard_error, found.loss_bound) == (0.0, 0.0, 0.0)
        assert found.interval == (0.0, 0.0)
    found = paired_auc(reference, 3 * reference + 1, labels)  # in the same order
    assert (found.difference, found.standard_error) == (0.0, 0.0)


def test_signs() -> None:
    """A worse candidate has less AUC and more logloss; its loss is above 0 in both."""
    reference, candidate, labels = planted(5000, 1.0, 5)
    auc, logloss = paired_auc(reference, candidate, labels), paired_logloss(reference, candidate, labels)
    assert auc.difference < 0 < auc.loss == -auc.difference
    assert logloss.difference > 0
    assert logloss.loss == logloss.difference
    for found in (auc, logloss):
        low, high = found.interval
        assert low < found.difference < high
        assert found.loss < found.loss_bound < found.loss + (high - low) / 2
        assert found.loss + found.gain_bound == pytest.approx(found.loss_bound - found.loss)
    assert auc.candidate - auc.reference == pytest.approx(auc.difference, abs=1e-12)
    assert auc.to_json() == {
        **vars(auc),
        "interval": list(auc.interval),
        "loss": auc.loss,
        "loss_bound": auc.loss_bound,
    }


def test_logloss_of_large_logits() -> None:
    found = paired_logloss([200.0, -300.0, 1e4], [100.0, -300.0, 1e4], [0, 1, 1])
    assert found.reference == pytest.approx(500 / 3)
    assert found.difference == pytest.approx(-100 / 3)


def test_rows_needed() -> None:
    reference, candidate, labels = planted(20_000, 0.2, 6)
    found = paired_auc(reference, candidate, labels)
    for limit in (found.loss + 1e-4, found.loss + 1e-3):
        rows = rows_needed(limit, found)
        assert rows is not None
        margin = (found.loss_bound - found.loss) * math.sqrt(found.rows / rows)
        assert found.loss + margin == pytest.approx(limit, rel=1e-3)
    assert rows_needed(found.loss_bound, found) in (found.rows, found.rows + 1)
    assert rows_needed(found.loss, found) is None
    assert rows_needed(found.loss, found, loss=0.0) is not None
    same = paired_auc(reference, reference, labels)
    assert rows_needed(0.0, same) == 20_000
    assert rows_needed(-0.1, same) is None


def test_twice_the_rows_that_are_needed_prove_the_limit() -> None:
    few = paired_auc(*planted(2000, 0.2, 7))
    limit = 0.006
    rows = rows_needed(limit, few)
    assert rows is not None
    assert few.loss_bound > limit
    assert paired_auc(*planted(2 * rows, 0.2, 8)).loss_bound <= limit


@pytest.mark.parametrize(
    ("reference", "candidate", "labels", "message"),
    [
        ([1.0, 2], [1.0, 2], [1, 1], "all 2 labels are 1 .* use a split that holds both classes"),
        ([1.0, 2, 3], [1.0, 2, 3], [1, 0, 0], "two rows of each class at least, not 1 positives and 2 negatives"),
        ([1.0, math.nan, 3], [1.0, 2, 3], [1, 0, 0], "1 scores of the reference are not finite"),
        ([1.0, 2, 3], [math.inf, math.nan, 3], [1, 0, 0], "2 scores of the candidate are not finite"),
        ([1.0, 2, 3], [1.0, 2], [1, 0, 0], "score one split with both models"),
        ([1.0, 2, 3], [1.0, 2, 3], [1, 0, 2], "neither 0 nor 1"),
        ([1.0, 2, 3], [1.0, 2, 3], [1, 0, math.nan], "neither 0 nor 1"),
        ([[1.0, 2]], [[1.0, 2]], [[1, 0]], "of the same rows"),
        ([], [], [], "all 0 labels"),
    ],
)
def test_refused(reference: Any, candidate: Any, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        paired_auc(reference, candidate, labels)


def test_refused_by_logloss() -> None:
    with pytest.raises(DataError, match="two rows at least, not 1"):
        paired_logloss([1.0], [2.0], [1])
    with pytest.raises(DataError, match=r"from 0\.5 to below 1, not 95"):
        paired_logloss([1.0, 2.0], [2.0, 1.0], [1, 0], confidence=95)
    assert isinstance(paired_logloss([1.0, 2.0], [2.0, 1.0], [1, 1]), PairedDifference)  # one class is enough


@pytest.mark.parametrize("batch_size", [7, 100, 100_000])
def test_scores_of_a_split_are_in_its_order(data: Path, batch_size: int) -> None:
    rows = DataSet(data, "valid")
    torch.manual_seed(0)
    model = DLRMConfig(dim=4, bottom=(8,), top=(16,)).build(rows.schema)
    model.train()
    scores = score_split(model, rows, batch_size=batch_size)
    whole = rows.take(np.arange(len(rows)))
    with torch.no_grad():
        assert torch.allclose(scores.logits, model(whole), atol=1e-6)
    assert torch.equal(scores.labels, whole.label)
    assert model.training
    assert exact_auc(scores.logits, scores.labels) == pytest.approx(evaluate_model(model, rows)["auc"], abs=1e-4)
