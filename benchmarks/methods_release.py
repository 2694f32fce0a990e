"""Forms of a trained dense model: its tables stored in fewer bytes, and what that loses on the same rows.

`precision` is `tables.precision.PrecisionFit` with the counts of training and the model's sensitivity; the others are
fitted with the counts where their fit can use them. Differences are paired: see `evaluation.paired`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.accuracy_runs import RULES
from benchmarks.methods_sides import FOLDING, counts_of, fold
from holdall.common.errors import ConfigError, HoldallError
from holdall.data.dataset import DataSet
from holdall.data.negatives import training_loader
from holdall.evaluation.evaluate_model import SplitScores, score_split
from holdall.evaluation.paired import PairedDifference, paired_auc, paired_logloss
from holdall.evaluation.sensitivity import sensitivity
from holdall.models import Model
from holdall.tables import Method, Table
from holdall.tables.budget import suggest
from holdall.tables.fit_tables import fit_tables
from holdall.tables.precision import PrecisionFit

PRECISION = "precision"
BUDGETS = ("1/20", "1/50", "1/100", "1/200", "1/300", "1/1000")
OTHERS = {FOLDING: BUDGETS, "clustered": BUDGETS, "quantized": ("1/4",)}
"""Forms besides `precision`, and their budgets; rows of 4 bits take a quarter."""
SPLITS = ("valid", "test")


@dataclass
class Trained:
    """A trained dense model, and what its forms are fitted and compared with."""

    name: str
    data: Path
    model: Model
    weights: dict[str, Tensor]
    counts: dict[str, Tensor]
    reference: dict[str, SplitScores]

    @classmethod
    def of(cls, name: str, data: Path, model: Model) -> Trained:
        """`model` must have no optimizer: its tables are replaced."""
        counts = counts_of(name, data)
        weights = {table: model.bags.table(table).materialize().float() for table in counts}
        reference = {split: score_split(model, DataSet(data, split)) for split in SPLITS}
        return cls(name, data, model, weights, counts, reference)

    def precision(self) -> PrecisionFit:
        rules = RULES[self.name]
        options: dict[str, Any] = {"num_negatives": rules.negatives, "shuffle": "rows", "seed": 0}
        loader = training_loader(DataSet(self.data), rules.batch_size, **options)
        return PrecisionFit(self.weights, self.counts, sensitivity(self.model, loader.epoch(0)))

    def scored(self, form: str, budget: str, tables: Mapping[str, Table]) -> dict[str, Any]:
        """What the model scores with `tables` in the place of its own, and loses by them."""
        self.model.bags.replace_tables(tables)
        return self.scored_model(form, budget, self.model)

    def scored_model(self, form: str, budget: str, model: Model) -> dict[str, Any]:
        """What a model scores, and loses to the dense one."""
        found: dict[str, Any] = {"form": form, "budget": budget, "bytes": model.bags.num_bytes()}
        for split, reference in self.reference.items():
            scores = score_split(model, DataSet(self.data, split))
            for compare in (paired_auc, paired_logloss):
                difference = compare(reference.logits, scores.logits, reference.labels)
                found |= {f"{split}_{difference.metric}{name}": x for name, x in _numbers(difference).items()}
        return found


def _numbers(difference: PairedDifference) -> dict[str, float]:
    return {
        "": difference.candidate,
        "_loss": difference.loss,
        "_loss_se": difference.standard_error,
        "_loss_bound": difference.loss_bound,
    }


def forms(trained: Trained) -> Iterator[dict[str, Any]]:
    """All forms at all budgets that they can keep."""
    fit = trained.precision()
    dim = trained.model.bags.dim
    rows = {table: len(weight) for table, weight in trained.weights.items()}
    for budget in BUDGETS:
        try:
            tables = fit.fit(fit.choose(budget))
        except ConfigError:
            continue
        yield trained.scored(PRECISION, budget, tables)
    for form, budgets in OTHERS.items():
        for budget in budgets:
            methods: dict[str, Method]
            try:
                methods = fold(trained.counts, dim, budget)[0] if form == FOLDING else suggest(rows, dim, budget, form)
            except ConfigError:
                continue
            yield trained.scored(form, budget, fit_tables(trained.weights, methods, trained.counts))


def polished_forms(trained: Trained) -> Iterator[dict[str, Any]]:
    """Forms by precision that are trained on for an epoch, where that is better on the validation split."""
    raise HoldallError(f"there is no training of released forms yet ({trained.name}): leave out --polish")
