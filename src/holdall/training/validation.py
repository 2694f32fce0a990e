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

    def __init__(
        self,
        data: Path,
        schema: Schema,
        settings: EvaluationSettings,
        *,
        keeps_best: bool = True,
        has_probabilities: bool = True,
    ):
        """`has_probabilities`: whether the scores of the model are some, so that logloss can tell the best one."""
        self.settings, self.keeps_best, self.has_probabilities = settings, keeps_best, has_probabilities
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
        self.best_metrics: dict[str, float] = {}
        """Metrics of the best model so far."""
        self.last_step: int | None = None
        self.best_step: int | None = None
        """Steps of both evaluations; None if there was none, or a run of an earlier version does not tell."""
        self.best, self.evaluations_without_gain = -math.inf, 0
        """The best value of `best_by`; negative for logloss, so that more is better."""

    def _metric_of_the_best(self, data: Path, schema: Schema) -> str:
        """The metric, by its name in an evaluation, that decides which model is the best."""
        k, chosen = self.settings.rank_at, str(self.settings.best_by)
        if chosen == "auto":
            has_auc = self.split is not None and 0 < schema.splits["valid"].positives < len(self.split)
            of_rows = "auc" if has_auc and not self.has_probabilities else "logloss"
            chosen = "ndcg" if self.has_ranking else of_rows
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

    def record(self, metrics: dict[str, float], step: int, *, may_keep: bool = True) -> bool:
        """Keep the metrics of an evaluation; whether this model has to be kept, as the best so far.

        Early stopping counts every evaluation; without it, those with `may_keep` count.
        """
        self.last, self.last_step = metrics, step
        if self.settings.early_stopping is None and not (self.keeps_best and may_keep):
            return False
        found = -metrics[self.best_by] if self.best_by == "logloss" else metrics[self.best_by]
        if found > self.best:
            self.best, self.evaluations_without_gain = found, 0
            self.best_metrics, self.best_step = metrics, step
            return True
        self.evaluations_without_gain += 1
        return False

    @property
    def should_stop(self) -> bool:
        """Whether early stopping ends the run."""
        limit = self.settings.early_stopping
        return limit is not None and self.evaluations_without_gain >= limit

    @property
    def has_best(self) -> bool:
        """Whether an evaluation was the best so far."""
        return not math.isinf(self.best)

    def describe_last(self) -> str:
        """The last evaluation in one line."""
        shown = dict.fromkeys((self.best_by, "logloss", "auc", "calibration"))
        values = [f"{name} {self.last[name]:.5g}" for name in shown if not math.isnan(self.last.get(name, math.nan))]
        is_best = self.best_step is not None and self.best_step == self.last_step
        return f"valid {', '.join(values)}{' (best so far)' if is_best else ''}"

    def summary(self) -> dict[str, Any]:
        """Metrics of the kept model and of the last one, with their steps, for the result of a run."""
        keeps_best = self.best_step is not None
        return {
            "valid": (self.best_metrics if keeps_best else self.last) or None,
            "kept_step": self.best_step if keeps_best else self.last_step,
            "last_valid": self.last or None,
            "last_step": self.last_step,
            "best_by": self.best_by,
        }

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON."""
        return {
            "best": None if math.isinf(self.best) else self.best,
            "evaluations_without_gain": self.evaluations_without_gain,
            "last_evaluation": _without_nan(self.last),
            "last_step": self.last_step,
            "best_step": self.best_step,
            "best_evaluation": _without_nan(self.best_metrics),
        }

    def load_state(self, state: RunState) -> None:
        self.best = -math.inf if state["best"] is None else state["best"]
        self.evaluations_without_gain = state["evaluations_without_gain"]
        self.last, self.best_metrics = _with_nan(state["last_evaluation"]), _with_nan(state.get("best_evaluation", {}))
        self.last_step, self.best_step = state.get("last_step"), state.get("best_step")


def _without_nan(metrics: dict[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in metrics.items()}


def _with_nan(metrics: dict[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in metrics.items()}
