"""The classifier with scikit-learn's methods, alone and inside scikit-learn."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from holdall import HoldallClassifier
from holdall.common.errors import ConfigError, DataError
from holdall.training.config import TrainConfig
from tests.commands.test_fit import ratings

QUICK = TrainConfig.of(epochs=4, batch_size=64, lr=0.05, dim=4, bottom=(8,), top=(16,))
COLUMNS = {"categorical": ["user_id", "item_id"], "dense": ["price"]}


def split(count: int, seed: int) -> tuple[pl.DataFrame, np.ndarray]:
    frame = ratings(count, seed)
    return frame.drop("opinion"), frame["opinion"].to_numpy()


def test_classes_come_back_as_they_were_given() -> None:
    X, y = split(1500, 0)
    model = HoldallClassifier(config=QUICK, **COLUMNS).fit(X, y)
    assert model.classes_.tolist() == ["bad", "good"]
    other, truth = split(300, 1)
    found = model.predict_proba(other)
    assert found.shape == (300, 2)
    assert np.allclose(found.sum(axis=1), 1)
    assert set(model.predict(other)) == {"bad", "good"}
    assert model.score(other, truth) == np.mean(model.predict(other) == truth) > 0.7
    assert model.n_features_in_ == 3
    assert np.array_equal(model.predict_proba(other.to_pandas()), found)


def numbers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """A number that decides the class, and an id from 0 to 4 that does not."""
    draw = np.random.default_rng(0)
    X = np.stack([draw.normal(size=count), draw.integers(5, size=count)], axis=1)
    return X, X[:, 0] > 0


def test_an_array_and_a_column_named_label() -> None:
    X, y = numbers(400)
    model = HoldallClassifier(config=QUICK, dense=["x0"], categorical=["x1"]).fit(X, y)
    assert model.classes_.tolist() == [False, True]
    assert model.score(X, y) > 0.8
    frame = pl.DataFrame({"label": X[:, 0], "x1": X[:, 1]})
    assert HoldallClassifier(config=QUICK, dense=["label"], categorical=["x1"]).fit(frame, y).score(frame, y) > 0.8


def test_parameters() -> None:
    model = HoldallClassifier(seed=3, **COLUMNS)
    assert model.get_params()["seed"] == 3
    assert model.set_params(seed=4).seed == 4
    assert repr(model) == "HoldallClassifier(categorical=['user_id', 'item_id'], dense=['price'], seed=4)"
    with pytest.raises(ConfigError, match=r"no parameter 'sed' \(did you mean 'seed'\?\)"):
        model.set_params(sed=4)
    with pytest.raises(ConfigError, match="not fitted yet"):
        model.predict(ratings(3, 0))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.zeros(4), r"y has shape \[4\], but X has 3 rows"),
        (np.zeros(3), r"y has 1 classes, not two: \[0.0\]"),
        (np.arange(3), "y has 3 classes, not two"),
    ],
)
def test_wrong_labels_are_refused(y: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        HoldallClassifier().fit(ratings(3, 0).drop("opinion"), y)


def test_inside_scikit_learn() -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn, which Holdall does without")
    from sklearn.base import clone, is_classifier
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    X, y = split(3000, 0)
    model = HoldallClassifier(config=QUICK.replace(epochs=8), **COLUMNS)
    assert is_classifier(model)
    assert clone(model).get_params() == model.get_params()
    scores = cross_val_score(model, X.to_pandas(), y == "good", cv=3, scoring="roc_auc")
    assert scores.min() > 0.7
    piped = make_pipeline(FunctionTransformer(lambda frame: frame), model)
    assert piped.fit(X.to_pandas(), y).score(X.to_pandas(), y) > 0.7
    rows, positive = numbers(300)
    as_it_is = make_pipeline(FunctionTransformer(), HoldallClassifier(config=QUICK, dense=["x0"], categorical=["x1"]))
    assert as_it_is.fit(rows, positive).score(rows, positive) > 0.8
    search = GridSearchCV(model, {"seed": [0, 1]}, cv=2).fit(X.to_pandas(), y)
    assert search.best_params_["seed"] in (0, 1)
