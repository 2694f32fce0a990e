"""`fit`: from a frame to predictions, with a planted signal that the model has to find."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import holdall
from holdall.commands.fit import training_config
from holdall.common.errors import ConfigError, DataError
from holdall.training.config import TrainConfig


def ratings(count: int, seed: int) -> pl.DataFrame:
    """Users who like items of their own parity, nine times of ten; ids are floats, since some are missing."""
    draw = random.Random(seed)
    users = [draw.randrange(20) for _ in range(count)]
    items = [draw.randrange(30) for _ in range(count)]
    liked = [
        (u + i) % 2 == 0 if draw.random() < 0.9 else draw.random() < 0.5 for u, i in zip(users, items, strict=True)
    ]
    return pl.DataFrame(
        {
            "opinion": ["good" if like else "bad" for like in liked],
            "user_id": [float(user) if draw.random() < 0.98 else None for user in users],
            "item_id": [f"item {item}" for item in items],
            "price": [draw.uniform(1, 90) for _ in range(count)],
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> holdall.FittedModel:
    label = {"column": "opinion", "positive": "== good"}
    config = TrainConfig.of(epochs=12, batch_size=64, early_stopping=3, lr=0.05, dim=4, bottom=(8,), top=(16,))
    out = tmp_path_factory.mktemp("fit") / "model"
    return holdall.fit(ratings(3000, 0), label=label, config=config, out=out)


def test_a_fitted_model_predicts_frames(model: holdall.FittedModel, tmp_path: Path) -> None:
    frame = ratings(500, 1)
    scores = model.predict(frame)
    assert scores.shape == (500,)
    found = model.evaluate(frame)
    assert found["auc"] > 0.8
    assert found["samples"] == 500
    assert model.evaluate()["split"] == "valid"
    good = (frame["opinion"] == "good").to_numpy()
    logloss = -np.log(np.where(good, scores, 1 - scores)).mean()
    assert found["logloss"] == pytest.approx(logloss, rel=1e-5)
    assert np.array_equal(model.predict(frame.drop("opinion").to_arrow()), scores)
    assert np.array_equal(holdall.load(model.save(tmp_path / "bundle")).score(frame), scores)
    assert [column.name for column in model.schema.dense] == ["price"]
    assert [feature.name for feature in model.schema.features] == ["user_id", "item_id"]
    assert "label='opinion', dense=1, features=2" in repr(model)


def test_metrics_need_labels(model: holdall.FittedModel) -> None:
    with pytest.raises(DataError, match="the frame has no column 'opinion': metrics need labels"):
        model.evaluate(ratings(5, 1).drop("opinion"))


def test_a_temporary_folder_goes_with_the_model() -> None:
    made = holdall.fit(
        ratings(300, 0).with_columns(y=pl.col("opinion") == "good"),
        label="y",
        categorical=["user_id", "item_id"],
        config=TrainConfig.of(epochs=1, early_stopping=1, dim=2, bottom=(2,), top=(2,)),
    )
    folder = made.folder
    assert (folder / "run" / "run.json").exists()
    assert made.predict([{"user_id": 3, "item_id": "item 4"}]).shape == (1,)
    del made
    assert not folder.exists()


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="valid is 0, but early stopping needs a share of the rows"):
        holdall.fit(ratings(9, 0), label="opinion", valid=0)
    with pytest.raises(DataError, match=r"is '(good|bad)' instead of 0 or 1; for another text set positive"):
        holdall.fit(ratings(300, 0), label="opinion", categorical=["user_id"])


def test_batches_fit_the_number_of_rows() -> None:
    sizes = {rows: training_config(rows).batch_size for rows in (1, 1000, 20_000, 10**7)}
    assert sizes == {1: 32, 1000: 32, 20_000: 256, 10**7: 2048}
