"""Validation of a run: metrics on the validation split, the best model so far, early stopping."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from holdall.common.errors import ConfigError
from holdall.data.dataset import DataSet
from holdall.data.ranking_cases import RankingCases, has_ranking_cases
from holdall.data.schema import Schema
from holdall.evaluation.evaluate_model import SplitShare, evaluate_model, rank_model
from holdall.models.model import Model
from holdall.training.run_checkpoints import RunState
from holdall.training.setting_groups import EvaluationSettings


class Validation:
    """Evaluations of a run on the validation split of `data`, if there is one. `DataCheck` compares its files."""

    def __init__(self, data: Path, schema: Schema, settings: EvaluationSettings):
        self.settings = settings
        has_rows = "valid" in schema.splits and schema.splits["valid"].rows > 0
        self.split = DataSet(data, "valid", check=False) if has_rows else None
        if settings.early_stopping is not None and self.split is None:
            raise ConfigError(f"--early-stopping needs a validation split, {data} has none: prepare with --valid 0.1")
        self.has_ranking = has_rows and settings.rank_at > 0 and has_ranking_cases(data, "valid", schema)
        if self.has_ranking:
            RankingCases.load(data, "valid")  # raises before anything is written to the run folder
        self.best_by = self._metric_of_the_best(data, schema)
        self.last: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.best, self.evaluations_without_gain = -math.inf, 0
        """The best value of `best_by`; negative for logloss, so that more is better."""

    def _metric_of_the_best(self, data: Path, schema: Schema) -> str:
        """The metric, by its name in an evaluation, that decides which model is the best."""
        k, chosen = self.settings.rank_at, self.settings.best_by
        if chosen == "auto":
            chosen = "ndcg" if self.has_ranking else "logloss"
        if chosen in ("ndcg", "hr") and not self.has_ranking:
            raise ConfigError(
                f"--best-by {chosen} needs ranking cases for the validation split, and {data} has none: they are "
                f"written for implicit data sets prepared with --valid"
            )
        if chosen == "auc" and self.split is not None and schema.splits["valid"].positives in (0, len(self.split)):
            raise ConfigError(f"--best-by auc needs both labels in the validation split, {data} has one there")
        return f"{chosen}@{k}" if chosen in ("ndcg", "hr") else chosen

    def measure(self, model: Model, share: SplitShare) -> dict[str, float]:
        """Metrics of the model, over the shares of all processes."""
        assert self.split is not None
        metrics = evaluate_model(model, self.split, allow_one_class=True, part=share)
        if self.has_ranking:
            metrics.update(rank_model(model, self.split, self.settings.rank_at, share))
        return metrics

    def record(self, metrics: dict[str, float]) -> bool:
        """Keep the metrics of an evaluation; whether early stopping has to keep this model, as the best so far."""
        self.last = metrics
        if self.settings.early_stopping is None:
            return False
        found = -metrics[self.best_by] if self.best_by == "logloss" else metrics[self.best_by]
        if found > self.best:
            self.best, self.evaluations_without_gain = found, 0
            return True
        self.evaluations_without_gain += 1
        return False

    @property
    def should_stop(self) -> bool:
        """Whether early stopping ends the run."""
        limit = self.settings.early_stopping
        return limit is not None and self.evaluations_without_gain >= limit

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON."""
        return {
            "best": None if math.isinf(self.best) else self.best,
            "evaluations_without_gain": self.evaluations_without_gain,
            "last_evaluation": {name: None if math.isnan(value) else value for name, value in self.last.items()},
        }

    def load_state(self, state: RunState) -> None:
        self.best = -math.inf if state["best"] is None else state["best"]
        self.evaluations_without_gain = state["evaluations_without_gain"]
        self.last = {name: math.nan if value is None else value for name, value in state["last_evaluation"].items()}
