"""The gate of a release: forms are tested in order, and the smallest before the first failure is released."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from holdall.common.errors import ConfigError
from holdall.evaluation.evaluate_model import SplitScores
from holdall.models import Model
from holdall.serving.forms import Form, Forms
from holdall.serving.gate import LADDER, GateError, release_model
from holdall.serving.proof import Comparison, Limits, compare, halves


class PlannedForms:
    """Forms whose scores are those of the trained model, and for some budgets its scores spoilt by noise or shifted.

    A shift of all logits leaves their order, and so the AUC, and costs logloss.
    """

    def __init__(self, data: Path, noise: dict[str, float], shift: dict[str, float], num_rows: int = 4000):
        self.data, self.noise, self.shift = data, noise, shift
        self.precision = SimpleNamespace(dense_bytes=10**6)
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(num_rows, generator=generator) - 1
        labels = (torch.rand(num_rows, generator=generator) < torch.sigmoid(logits)).float()
        self.trained = SplitScores(logits, labels)  # the true probabilities: every shift costs logloss
        self.random = torch.randn(num_rows, generator=generator)

    def fit(self, budget: str) -> Form:
        if budget not in self.noise:
            raise ConfigError("a budget that is too small")
        return Form(budget, cast(Model, budget), int(1e6 * eval(budget)))

    def compare(self, model: Any, split: str = "valid", rows: Any = None) -> Comparison:
        spoilt = self.trained.logits + self.noise[model] * self.random + self.shift.get(model, 0.0)
        return compare(self.trained, SplitScores(spoilt, self.trained.labels), rows)


def released(data: Path, *noise: float, shift: tuple[float, ...] = (), **options: Any) -> Any:
    forms = PlannedForms(data, dict(zip(LADDER, noise, strict=False)), dict(zip(LADDER, shift, strict=False)))
    return release_model(cast(Forms, forms), **options)


def test_the_smallest_before_the_first_failure_is_released(data: Path) -> None:
    found = released(data, 0.0, 0.001, 0.002, 3.0, 3.0, 0.0)
    assert found.form.budget == "1/50"
    assert [row.passes for row in found.front] == [True, True, True, False, False]
    assert found.proof == found.front[2].comparison
    assert found.proof.auc.loss_bound <= found.limits.auc == 0.0005
    assert found.proof.logloss.loss_bound <= found.limits.logloss


def test_a_form_that_passes_after_a_failure_is_not_released(data: Path) -> None:
    found = released(data, 0.0, 3.0, 0.0, 3.0, 0.0)
    assert found.form.budget == "1/8"
    assert [row.passes for row in found.front] == [True, False, True, False]


def test_a_form_that_orders_rows_rightly_fails_by_its_logloss(data: Path) -> None:
    found = released(data, 0.0, 0.0, 0.0, 0.0, shift=(0.0, 0.001, 0.5, 0.5))
    assert found.form.budget == "1/20"
    assert [row.failed for row in found.front] == [(), (), ("logloss",), ("logloss",)]
    assert [row.comparison.auc.loss_bound for row in found.front] == [0.0] * 4
    assert found.limits.logloss == pytest.approx(0.001 * found.proof.logloss.reference)
    assert released(data, 0.0, 0.0, shift=(0.0, 0.5), max_logloss_increase=0.2).form.budget == "1/20"


def test_a_form_fails_by_its_auc_alone(data: Path) -> None:
    found = released(data, 0.0, 0.3, 0.3, max_logloss_increase=1.0)
    assert [row.failed for row in found.front] == [(), ("auc",), ("auc",)]
    assert "above the limit of auc" in found.front[1].verdict


def test_the_refusal_names_the_limit_of_logloss_alone(data: Path) -> None:
    with pytest.raises(GateError) as refused:
        released(data, 0.0, shift=(0.5,), budget="1/8", max_auc_loss=0.001, max_logloss_increase=0.003)
    said = str(refused.value)
    assert "has a logloss increase bound of 0." in said
    assert "above --max-logloss-increase 0.003" in said
    assert "--max-auc-loss" not in said


def test_calibration_is_the_mean_prediction_over_the_mean_label(data: Path) -> None:
    found = released(data, 0.0, shift=(0.5,), budget="1/8")
    forms = PlannedForms(data, {}, {})
    clicks, logits = forms.trained.labels.mean(), forms.trained.logits
    wanted = [float(torch.sigmoid(logits + shift).mean() / clicks) for shift in (0.0, 0.5)]
    assert found.proof.to_json()["calibration"] == pytest.approx(
        dict(zip(("reference", "candidate"), wanted, strict=True))
    )
    assert f"calibration {wanted[1]:.4f}, trained {wanted[0]:.4f}" in found.sentence


def test_the_chance_of_a_release_beyond_a_limit_is_5_percent() -> None:
    """A form whose true increase of logloss is the limit passes in 5 of 100 splits, however good its AUC is."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(300, 2000, generator=generator, dtype=torch.float64)
    labels = (torch.rand(300, 2000, generator=generator, dtype=torch.float64) < torch.sigmoid(logits)).double()
    true = torch.sigmoid(logits)
    costs = [-(true * F.logsigmoid(x) + (1 - true) * F.logsigmoid(-x)).mean() for x in (logits, logits + 0.2)]
    limits = Limits(auc=0.0005, logloss=float(costs[1] - costs[0]))
    pairs = [compare(SplitScores(x, y), SplitScores(x + 0.2, y)) for x, y in zip(logits, labels, strict=True)]
    passed = sum(not limits.exceeded(pair) for pair in pairs)
    assert 4 <= passed <= 30  # 15 expected; each end is more than 3 standard errors away


def test_the_search_ends_where_tables_cannot_be_smaller(data: Path) -> None:
    found = released(data, 0.0, 0.0)
    assert (found.form.budget, len(found.front)) == ("1/20", 2)


def test_nothing_is_released_where_nothing_passes(data: Path) -> None:
    with pytest.raises(GateError, match=r"no form is proved to be within the limits: the best, of 1/20 of") as refused:
        released(data, 3.0, 2.0, 0.0)
    assert len(refused.value.front) == 2
    assert "AUC loss bound of 0." in str(refused.value)
    assert "logloss increase bound of 0." in str(refused.value)
    assert "raise --max-auc-loss and --max-logloss-increase" in str(refused.value)


def test_a_split_that_is_too_small_says_how_many_rows_it_takes(data: Path) -> None:
    with pytest.raises(GateError, match=r"takes about [\d,]+: prepare with more") as refused:
        released(data, 0.02, 0.03, max_auc_loss=0.0001)
    assert refused.value.front[0].comparison.auc.loss < 0.0001


def test_a_budget_has_a_limit_only_if_one_is_given(data: Path) -> None:
    found = released(data, 3.0, budget="1/8")
    assert found.limits == Limits()
    assert [row.passes for row in found.front] == [None]
    with pytest.raises(GateError, match="give a larger --budget"):
        released(data, 3.0, budget="1/8", max_auc_loss=0.01)
    with pytest.raises(ConfigError, match="too small"):
        released(data, 3.0, budget="1/999")
    with pytest.raises(ConfigError, match="--max-auc-loss must be 0 or more"):
        released(data, 3.0, max_auc_loss=float("nan"))
    with pytest.raises(ConfigError, match="--max-logloss-increase must be 0 or more"):
        released(data, 3.0, max_logloss_increase=-0.1)
    with pytest.raises(ConfigError, match="--polish must be 0 epochs or more"):
        released(data, 3.0, polish_epochs=-1)


def test_the_result_is_a_sentence(data: Path) -> None:
    found = released(data, 0.0, 0.01, budget="1/20")
    assert found.sentence.startswith("1/20 of the table bytes; AUC 0.")
    assert "with 95% confidence it loses at most 0.0" in found.sentence
    same = released(data, 0.0, budget="1/8").proof.bound_text
    assert same == "loses at most 0.00000 AUC and its logloss rises by at most 0.00000"


def test_halves_are_random_and_all(data: Path) -> None:
    first, second = halves(10_000)
    assert bool((first ^ second).all())
    assert abs(int(first.sum()) - 5000) < 200
    assert abs(int(first[::2].sum()) - 2500) < 200  # no pattern that rows of implicit data could have too
