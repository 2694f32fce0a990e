"""Polish of a smaller form: its stored numbers are trained on for a while, and kept if they are better.

Codes stay as they were fitted. Codewords, shared rows, exact rows and the dense part are trained in float32 with the
run's optimizer, at its rates or a share of them, then rounded to the types that they are stored in. Training longer
overfits soon, so logloss on rows that are kept for this decides: which rate, when to stop, and whether to keep any of
it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.evaluation.evaluate_model import score_split
from holdall.models import Model
from holdall.models.loss import logloss, squared_length
from holdall.optim.optimizers import Optimizers
from holdall.serving.forms import Forms

RATES = (1.0, 1 / 3, 1 / 10)
"""Shares of the run's learning rates that are tried. On validation rows of two samples at 1/100 of the bytes, a tenth
was best on Avazu, whose dense model overfits after one epoch, and the whole on Taobao, whose model is still learning
then."""
EVALUATIONS = 4
"""Evaluations in an epoch."""
PATIENCE = 2
"""Evaluations without a better logloss after which a rate is given up."""


@dataclass(frozen=True)
class Polish:
    """Result of a polish."""

    rate: float | None
    """Share of the run's learning rates that was best; None if none was better than no polish."""
    steps: int
    logloss_before: float
    logloss: float
    """Logloss on the rows that it was chosen by."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def polish(forms: Forms, model: Model, epochs: int, rows: Tensor) -> tuple[Model, Polish]:
    """The form `model` after at most `epochs` epochs at each rate, or itself; chosen by validation rows [n] bool."""
    if forms.config.model.model_config().in_batch_negatives:
        raise ConfigError(
            f"a polish is chosen by logloss, and the scores of {forms.config.model.model} are no probabilities: leave "
            f"--polish out"
        )
    before = chosen_logloss(forms, model, rows)
    found, best = model, Polish(None, 0, before, before)
    for rate in RATES:
        lowest, without_gain = before, 0
        for steps, candidate in _trained_on(forms, model, epochs, rate):
            value = chosen_logloss(forms, candidate, rows)
            if value < best.logloss:
                found, best = copy.deepcopy(candidate), Polish(rate, steps, before, value)
            without_gain = 0 if value < lowest else without_gain + 1
            lowest = min(lowest, value) if math.isfinite(value) else lowest
            if without_gain == PATIENCE or not math.isfinite(value):
                break
    return found, best


def chosen_logloss(forms: Forms, model: Model, rows: Tensor) -> float:
    """Mean logloss of a model on some validation rows [n] bool."""
    scores = score_split(model, DataSet(forms.data, "valid"))
    logits, labels = scores.logits[rows].double(), scores.labels[rows].double()
    return float(F.binary_cross_entropy_with_logits(logits, labels))


def _trained_on(forms: Forms, model: Model, epochs: int, rate: float) -> Iterator[tuple[int, Model]]:
    """Steps so far and the form as it would be stored, `EVALUATIONS` times an epoch; one model, which is changed."""
    stored, trained = copy.deepcopy(model), copy.deepcopy(model).float().train()
    config = forms.config.optimizer_config()
    table_lr = None if config.table_lr is None else config.table_lr * rate
    optimizers = Optimizers(trained, replace(config, lr=config.lr * rate, table_lr=table_lr, stochastic_seed=None))
    loader = forms.loader()
    pause = max(1, loader.num_batches // EVALUATIONS)
    steps = 0
    for epoch in range(epochs):
        for batch in loader.epoch(forms.config.epochs + epoch):
            _step(forms, trained, optimizers, batch)
            steps += 1
            if steps % pause == 0:
                with torch.no_grad():
                    for target, source in zip(stored.parameters(), trained.parameters(), strict=True):
                        target.copy_(source)
                yield steps, stored


def _step(forms: Forms, model: Model, optimizers: Optimizers, batch: Batch) -> None:
    """One training step, with the loss of the run."""
    settings = forms.config.optimizer
    model.check(batch.ids)
    moved = batch.to(forms.device)
    looked_up = model.lookup(moved)
    loss = logloss(model.score(moved.dense, looked_up), moved.label, moved.weight)
    if settings.l2:
        loss = loss + settings.l2 * squared_length(looked_up) / len(moved)
    loss.backward()
    if settings.clip_norm is not None:
        optimizers.clip(settings.clip_norm)
    optimizers.step()
