"""Start of a fresh model: it predicts the base rate of the training labels, whatever its family or strategy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from holdall.data.dataset import DataSet
from holdall.data.items import ItemTable
from holdall.data.negatives import positive_rate
from holdall.data.schema import Schema, Split
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.models import CONFIGURATIONS
from holdall.models.model import evaluating
from holdall.training.config import TrainConfig
from holdall.training.tracking import read_metrics
from holdall.training.train import train
from holdall.training.trainer import Trainer
from tests.models.made_up import HISTORY_FAMILIES, click_batch, history_batch
from tests.models.test_configurations import schema_for
from tests.training.test_train_models import NUM_CATEGORIES, NUM_ITEMS, write_events

SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128, log_every=1, deterministic=True)


def entropy(rate: float) -> float:
    """Logloss of predicting the base rate."""
    return -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)


@pytest.mark.parametrize("name", [name for name, one in CONFIGURATIONS.items() if not one.in_batch_negatives])
@pytest.mark.parametrize("rate", [0.0017, 0.5])
def test_every_configuration_starts_at_the_rate(name: str, rate: float) -> None:
    config = TrainConfig.of(model=name, model_scale=1 / 8)
    family = config.model.model_config().family
    schema = schema_for(family)
    batch = history_batch(schema, [2] * 6) if family in HISTORY_FAMILIES else click_batch(schema)
    torch.manual_seed(0)
    model = config.build_model(schema)
    model.start_at_rate(rate)
    with evaluating(model):
        torch.testing.assert_close(model(batch).sigmoid(), torch.full((6,), rate), rtol=0.5, atol=0)


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clicks of which few are positive."""
    out = tmp_path_factory.mktemp("data") / "rare"
    write_prepared(SyntheticConfig(rows=4000, cardinalities=(50, 7, 400), num_dense=3, base_rate=0.02), out)
    return out


@pytest.mark.parametrize("options", [{}, {"strategy": "host"}, {"strategy": "split", "hot_bytes": "1KB"}])
def test_the_first_loss_is_that_of_the_base_rate(rare: Path, tmp_path: Path, options: dict[str, str]) -> None:
    split = DataSet(rare).schema.splits["train"]
    assert split.positives < 0.1 * split.rows
    train(rare, tmp_path / "run", SMALL.replace(steps=1, batch_size=split.rows, **options), quiet=True)
    first = read_metrics(tmp_path / "run")[0]
    assert first["loss"] == pytest.approx(entropy(split.positives / split.rows), rel=0.02)


def test_strategies_start_with_the_same_values(rare: Path, tmp_path: Path) -> None:
    plain = Trainer(rare, tmp_path / "plain", SMALL, quiet=True)
    split = Trainer(rare, tmp_path / "split", SMALL.replace(strategy="split", hot_bytes="1KB"), quiet=True)
    for trainer in (plain, split):
        assert trainer.rows.log is not None
        trainer.rows.log.close()
    assert plain.model.output_layer is not None
    assert split.model.output_layer is not None
    assert torch.equal(plain.model.output_layer.weight, split.model.output_layer.weight)
    assert torch.equal(plain.model.output_layer.bias, split.model.output_layer.bias)


def test_drawn_negatives_count(tmp_path: Path) -> None:
    folder = write_events(tmp_path)
    data = DataSet(folder)
    assert positive_rate(data) == pytest.approx(float(data.labels().mean()), abs=1e-3)
    ItemTable(Schema.load(folder), "item", {"category": np.arange(NUM_ITEMS) % NUM_CATEGORIES}).save(folder)
    assert positive_rate(data, num_negatives=3) == 0.25


@pytest.mark.parametrize("positives", [0, 100])
def test_a_split_of_one_label_has_a_finite_start(data: Path, positives: int) -> None:
    rows = DataSet(data)
    rows.schema = replace(rows.schema, splits={"train": Split(rows=100, positives=positives, files=())})
    model = SMALL.build_model(rows.schema)
    model.start_at_rate(positive_rate(rows))
    assert model.output_layer is not None
    assert torch.isfinite(model.output_layer.bias).all()
