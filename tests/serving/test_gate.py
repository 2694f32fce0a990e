"""The gate of a release: forms are tested in order, and the smallest before the first failure is released."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.evaluation.evaluate_model import SplitScores
from holdall.models import Model
from holdall.serving.forms import Form, Forms
from holdall.serving.gate import LADDER, GateError, release_model
from holdall.serving.proof import Comparison, compare, halves


class PlannedForms:
    """Forms whose scores are those of the trained model, and for some budgets its scores spoilt by noise."""

    def __init__(self, data: Path, noise: dict[str, float], num_rows: int = 4000):
        self.data, self.noise = data, noise
        self.precision = SimpleNamespace(dense_bytes=10**6)
        generator = torch.Generator().manual_seed(0)
        labels = (torch.rand(num_rows, generator=generator) < 0.3).float()
        self.trained = SplitScores(labels + torch.randn(num_rows, generator=generator), labels)
        self.random = torch.randn(num_rows, generator=generator)

    def fit(self, budget: str) -> Form:
        if budget not in self.noise:
            raise ConfigError("a budget that is too small")
        return Form(budget, cast(Model, budget), int(1e6 * eval(budget)))

    def compare(self, model: Any, split: str = "valid", rows: Any = None) -> Comparison:
        spoilt = self.trained.logits + self.noise[model] * self.random
        return compare(self.trained, SplitScores(spoilt, self.trained.labels), rows)


def released(data: Path, *noise: float, **options: Any) -> Any:
    forms = PlannedForms(data, dict(zip(LADDER, noise, strict=False)))
    return release_model(cast(Forms, forms), **options)


def test_the_smallest_before_the_first_failure_is_released(data: Path) -> None:
    found = released(data, 0.0, 0.001, 0.002, 3.0, 3.0, 0.0)
    assert found.form.budget == "1/50"
    assert [row.passes for row in found.front] == [True, True, True, False, False]
    assert found.proof == found.front[2].comparison
    assert found.proof.loss_bound <= found.limit == 0.0005


def test_a_form_that_passes_after_a_failure_is_not_released(data: Path) -> None:
    found = released(data, 0.0, 3.0, 0.0, 3.0, 0.0)
    assert found.form.budget == "1/8"
    assert [row.passes for row in found.front] == [True, False, True, False]


def test_the_search_ends_where_tables_cannot_be_smaller(data: Path) -> None:
    found = released(data, 0.0, 0.0)
    assert (found.form.budget, len(found.front)) == ("1/20", 2)


def test_nothing_is_released_where_nothing_passes(data: Path) -> None:
    with pytest.raises(GateError, match=r"no form is proved to lose at most 0.0005 AUC: the best bound is") as refused:
        released(data, 3.0, 2.0, 0.0)
    assert len(refused.value.front) == 2
    assert "of 1/20 of the table bytes" in str(refused.value)


def test_a_split_that_is_too_small_says_how_many_rows_it_takes(data: Path) -> None:
    with pytest.raises(GateError, match=r"takes about [\d,]+ rows: prepare with more") as refused:
        released(data, 0.02, 0.03, max_auc_loss=0.0001)
    assert refused.value.front[0].comparison.auc.loss < 0.0001


def test_a_budget_has_a_limit_only_if_one_is_given(data: Path) -> None:
    found = released(data, 3.0, budget="1/8")
    assert found.limit is None
    assert [row.passes for row in found.front] == [None]
    with pytest.raises(GateError, match="give a larger --budget"):
        released(data, 3.0, budget="1/8", max_auc_loss=0.01)
    with pytest.raises(ConfigError, match="too small"):
        released(data, 3.0, budget="1/999")
    with pytest.raises(ConfigError, match="--max-auc-loss must be 0 or more"):
        released(data, 3.0, max_auc_loss=float("nan"))
    with pytest.raises(ConfigError, match="--polish must be 0 epochs or more"):
        released(data, 3.0, polish_epochs=-1)


def test_the_result_is_a_sentence(data: Path) -> None:
    found = released(data, 0.0, 0.01, budget="1/20")
    assert found.sentence.startswith("1/20 of the table bytes; AUC 0.")
    assert "with 95% confidence it loses at most 0.0" in found.sentence
    assert released(data, 0.0, budget="1/8").proof.bound_text == "loses at most 0.00000"


def test_halves_are_random_and_all(data: Path) -> None:
    first, second = halves(10_000)
    assert bool((first ^ second).all())
    assert abs(int(first.sum()) - 5000) < 200
    assert abs(int(first[::2].sum()) - 2500) < 200  # no pattern that rows of implicit data could have too
