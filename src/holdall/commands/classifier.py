"""Classifier with the methods of scikit-learn, over `fit`. Nothing of scikit-learn is imported unless it asks.

model = HoldallClassifier(categorical=["user", "item"]).fit(frame, clicked)
model.predict_proba(other_frame)[:, 1]
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdall.commands.fit import FittedModel, fit
from holdall.common.errors import ConfigError, DataError, did_you_mean
from holdall.data.formats.frame import Entries, as_arrow
from holdall.training.callbacks import Callback
from holdall.training.config import TrainConfig


class HoldallClassifier:
    """Estimator of two classes for `cross_val_score`, `Pipeline` and searches; parameters are those of `holdall.fit`.

    Rows are a pandas, polars or Arrow frame, or an array [R, N] of numbers, whose columns are x0, x1 and so on.
    """

    model_: FittedModel
    """The trained model, once `fit` was called."""
    classes_: npt.NDArray[Any]
    """Both classes, sorted; the second is the positive one."""
    n_features_in_: int
    """Columns of the rows that were fitted."""

    def __init__(
        self,
        *,
        categorical: Entries | None = None,
        dense: Entries | None = None,
        bag: Entries | None = None,
        valid: float = 0.1,
        config: TrainConfig | None = None,
        seed: int = 0,
        callbacks: Sequence[Callback] = (),
    ):
        self.categorical, self.dense, self.bag = categorical, dense, bag
        self.valid, self.config, self.seed, self.callbacks = valid, config, seed, callbacks

    def fit(self, X: Any, y: Any) -> Self:
        """Train on rows and their classes, in a temporary folder."""
        rows, labels = _rows(X), np.asarray(y)
        if labels.shape != (rows.num_rows,):
            raise DataError(f"y has shape {list(labels.shape)}, but X has {rows.num_rows:,} rows: give one class a row")
        self.classes_ = np.unique(labels)
        if len(self.classes_) != 2:
            raise DataError(f"y has {len(self.classes_)} classes, not two: {self.classes_[:5].tolist()}")
        name = "label"
        while name in rows.column_names:
            name += "_"
        table = rows.append_column(name, pa.array((labels == self.classes_[1]).astype(np.int8)))
        self.model_ = fit(table, label=name, **self.get_params())
        self.n_features_in_ = rows.num_columns
        return self

    def predict_proba(self, X: Any) -> npt.NDArray[np.float32]:
        """Probabilities [R, 2] of both classes."""
        if not hasattr(self, "model_"):
            raise ConfigError("the classifier is not fitted yet: call fit(X, y) first")
        positive = self.model_.predict(_rows(X))
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The more probable class [R] of each row."""
        positive = self.predict_proba(X)[:, 1] > 0.5
        found: npt.NDArray[Any] = self.classes_[positive.astype(int)]
        return found

    def score(self, X: Any, y: Any) -> float:
        """Share of rows whose class is predicted; `scoring="roc_auc"` and others are scikit-learn's."""
        return float(np.mean(self.predict(X) == np.asarray(y)))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Change parameters by name."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ConfigError(f"HoldallClassifier has no parameter '{name}'{did_you_mean(name, known)}")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        default = type(self)().get_params()
        changed = {name: value for name, value in self.get_params().items() if value != default[name]}
        return f"HoldallClassifier({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        """Description that scikit-learn asks for."""
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(multi_class=False),
            input_tags=InputTags(categorical=True, string=True, allow_nan=True),
        )


def _rows(X: Any) -> pa.Table:
    if isinstance(X, np.ndarray) and X.ndim == 2:
        return pa.table({f"x{column}": X[:, column] for column in range(X.shape[1])})
    return as_arrow(X)
