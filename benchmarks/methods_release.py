"""Forms of a trained dense model: its tables stored in fewer bytes, and what that loses on the same rows.

`precision` and `polished` are what `holdall release` makes, without and with `--polish 1`. The others are fitted with
the counts of training where their fit can use them. Differences are paired: see `evaluation.paired`. Polishing decides
by one half of the validation rows, so a polished form is compared on the other half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.accuracy_runs import OPTIMIZER, RULES, Job
from benchmarks.methods_sides import FOLDING, counts_of, fold
from holdall.common.errors import ConfigError
from holdall.evaluation.paired import PairedDifference
from holdall.models import Model, ModelConfig, configuration
from holdall.planning.model_settings import ModelSettings
from holdall.serving.forms import Forms
from holdall.serving.polish import polish
from holdall.serving.proof import halves
from holdall.tables import Method
from holdall.tables.budget import suggest
from holdall.tables.fit_tables import fit_tables
from holdall.training.config import TrainConfig

PRECISION, POLISHED = "precision", "polished"
BUDGETS = ("1/20", "1/50", "1/100", "1/200", "1/300", "1/1000")
POLISHED_AT = ("1/20", "1/100", "1/300")
OTHERS = {FOLDING: BUDGETS, "clustered": BUDGETS, "quantized": ("1/4",)}
"""Forms of other methods, and their budgets; rows of 4 bits take a quarter."""


def release_forms(model: Model, job: Job, data: Path) -> Iterator[dict[str, Any]]:
    """All forms of a trained dense model without an optimizer, at all budgets that they can keep."""
    forms = Forms(model, train_config(job), data)
    choosing, others = halves(len(forms.scores("valid").labels))
    for budget in BUDGETS:
        try:
            form = forms.fit(budget)
        except ConfigError:  # tables cannot be smaller
            break
        yield scored(forms, PRECISION, budget, form.model)
        if budget in POLISHED_AT:
            polished, how = polish(forms, form.model, 1, choosing)
            yield {**scored(forms, POLISHED, budget, polished, others), "polish": how.to_json()}
    yield from _other_forms(forms, job)


def _other_forms(forms: Forms, job: Job) -> Iterator[dict[str, Any]]:
    counts, weights = counts_of(job.set, forms.data), dict(forms.precision.weights)
    dim = forms.model.bags.dim
    rows = {table: len(weight) for table, weight in weights.items()}
    for form, budgets in OTHERS.items():
        for budget in budgets:
            methods: dict[str, Method]
            try:
                methods = fold(counts, dim, budget)[0] if form == FOLDING else suggest(rows, dim, budget, form)
            except ConfigError:
                continue
            forms.scores("test")  # of the trained tables, before others take their place
            forms.model.bags.replace_tables(fit_tables(weights, methods, counts))
            yield scored(forms, form, budget, forms.model)


def scored(forms: Forms, form: str, budget: str, model: Model, valid_rows: Tensor | None = None) -> dict[str, Any]:
    """What a form scores, and loses to the trained model; on some of the validation rows [n] bool."""
    found: dict[str, Any] = {"form": form, "budget": budget, "bytes": model.bags.num_bytes()}
    for split, rows in (("valid", valid_rows), ("test", None)):
        comparison = forms.compare(model, split, rows)
        for difference in (comparison.auc, comparison.logloss):
            found |= {f"{split}_{difference.metric}{name}": x for name, x in _numbers(difference).items()}
    return found


def _numbers(difference: PairedDifference) -> dict[str, float]:
    return {"": difference.candidate, "_loss": difference.loss, "_loss_bound": difference.loss_bound}


def train_config(job: Job) -> TrainConfig:
    """The settings of `holdall train` that a run of a job stands for."""
    rules = RULES[job.set]
    lr, table_lr = job.setting
    config = TrainConfig(
        epochs=rules.epochs,
        batch_size=rules.batch_size,
        shuffle="rows",
        negatives=rules.negatives,
        seed=job.seed,
        model=model_settings(rules.model),
    ).replace(optimizer=OPTIMIZER, lr=lr, table_lr=table_lr)
    assert config.model.model_config() == rules.model
    return config


def model_settings(config: ModelConfig) -> ModelSettings:
    """The settings of `holdall train` for a model."""
    named = configuration(config.family)
    given: dict[str, Any] = {name: getattr(config, name) for name in ("dim", "bottom", "top")}
    other = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in given}  # type: ignore[arg-type]
    pairs = [
        f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in other.items()
        if value != getattr(named, name)
    ]
    return ModelSettings(model=config.family, model_setting=tuple(pairs), **given)
