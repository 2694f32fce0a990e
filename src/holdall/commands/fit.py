"""From a frame to a model that predicts: prepare, train with early stopping, and score, in one call.

model = holdall.fit(frame, label="click")
model.predict(other_frame)       # probabilities [R]
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from holdall.common.errors import ConfigError, DataError
from holdall.data.formats.frame import Entries, as_arrow, is_frame
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.evaluation.metrics import BinaryMetrics
from holdall.serving.evaluate import evaluate
from holdall.serving.release import release
from holdall.serving.scorer import Scorer, load
from holdall.training.callbacks import Callback
from holdall.training.config import TrainConfig
from holdall.training.train import train

MAX_EPOCHS = 10
"""Epochs after which training ends even if the validation split still gets better."""
EVALUATIONS_AN_EPOCH = 2
PATIENCE = 2
"""Evaluations without a better logloss after which training stops."""
STEPS_AN_EPOCH = 100
"""Steps that a small frame is cut into: with batches of 2,048 rows it would be a few."""
BATCH_SIZES = (32, 2048)
"""Smallest and largest batch that is chosen."""
BATCH_ROWS = 4096
"""Rows that are scored at once."""


class FittedModel:
    """Model that was trained on a frame, in a folder with its data set (`data`) and its run (`run`)."""

    def __init__(self, folder: Path, temporary: tempfile.TemporaryDirectory[str] | None, result: dict[str, Any]):
        self.folder = folder
        self.data, self.run = folder / "data", folder / "run"
        self.result = result
        """Results of `train`."""
        self._temporary = temporary  # removed with the model

    @cached_property
    def scorer(self) -> Scorer:
        """Scorer of the model: `rank`, `explain_row` and `vectors` beside `score`."""
        return load(self.run)

    @property
    def schema(self) -> Schema:
        """Columns that the model reads, and those of its label and transforms."""
        return self.scorer.schema

    def predict(self, rows: Any) -> npt.NDArray[np.float32]:
        """Probabilities [R] of the rows of a frame, or in any other form that `Scorer.score` takes."""
        return self.scorer.score(self._named(as_arrow(rows)) if is_frame(rows) else rows)

    def _named(self, table: pa.Table) -> pa.Table:
        """A frame with the columns of the one that was fitted, under the names of the schema."""
        for name, column in self.scorer.encoder.columns.items():
            if name != column and column in table.column_names:
                others = table.drop_columns([name]) if name in table.column_names else table
                table = others.append_column(name, table[column])
        return table

    def evaluate(self, frame: Any = None) -> dict[str, Any]:
        """Metrics on a frame with labels; without one, on the rows that `fit` held out for early stopping."""
        if frame is None:
            return evaluate(self.run, "valid")
        table = self._named(as_arrow(frame))
        encoder = self.scorer.encoder
        if self.schema.label not in table.column_names:
            raise DataError(f"the frame has no column '{self.schema.label}': metrics need labels; or use predict")
        label = torch.from_numpy(encoder.labels(table)).float()
        weights = encoder.weights(table)
        weight = None if weights is None else torch.from_numpy(weights)
        batch, metrics = self.scorer.encode(table), BinaryMetrics()
        for start in range(0, len(batch), BATCH_ROWS):
            stop = min(start + BATCH_ROWS, len(batch))
            own = None if weight is None else weight[start:stop]
            metrics.update(self.scorer.logits(batch.slice(start, stop)).cpu(), label[start:stop], own)
        return metrics.compute(allow_one_class=True)

    def save(self, out: str | Path, *, overwrite: bool = False) -> Path:
        """Write the model as a bundle, which `holdall.load`, `score` and `serve` take; its path."""
        release(self.run, out, as_trained=True, overwrite=overwrite)
        return Path(out)

    def __repr__(self) -> str:
        schema = self.schema
        what = f"label={schema.label!r}, dense={len(schema.dense)}, features={len(schema.features)}"
        return f"FittedModel({what}, folder={str(self.folder)!r})"


def fit(
    frame: Any,
    *,
    label: str | Mapping[str, Any],
    weight: str | None = None,
    categorical: Entries | None = None,
    dense: Entries | None = None,
    bag: Entries | None = None,
    valid: float = 0.1,
    config: TrainConfig | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    seed: int = 0,
    quiet: bool = True,
    callbacks: Sequence[Callback] = (),
) -> FittedModel:
    """Train a model on a pandas, polars or Arrow frame.

    Columns are named as in `prepare`, and `weight` that of the weights of rows; without lists of columns these are
    guessed as `holdall schema infer` does. The share `valid` of the rows is held out: training stops when it gets no
    better on them, and the best model is kept. `config` has other settings of training, and `callbacks` are those of
    `train`. Data set and run are written to the folder `out`, or to a temporary one, which goes with the model.
    """
    if not 0 < valid < 1:
        raise ConfigError(f"valid is {valid}, but early stopping needs a share of the rows: above 0 and below 1")
    temporary = tempfile.TemporaryDirectory(prefix="holdall-") if out is None else None
    folder = Path(temporary.name if out is None else out)  # type: ignore[union-attr]
    settings = PrepareConfig(valid=valid, test=0.0, seed=seed, overwrite=overwrite)
    schema = prepare(
        frame, folder / "data", settings, label=label, weight=weight, categorical=categorical, dense=dense, bag=bag
    )
    config = config or training_config(schema.splits["train"].rows, seed)
    result = train(folder / "data", folder / "run", config, overwrite=overwrite, quiet=quiet, callbacks=callbacks)
    return FittedModel(folder, temporary, result)


def training_config(num_rows: int, seed: int = 0) -> TrainConfig:
    """Settings for a frame of this size: small batches for few rows, and early stopping."""
    least, most = BATCH_SIZES
    batch_size = min(most, max(least, 2 ** round(np.log2(max(num_rows / STEPS_AN_EPOCH, 1)))))
    steps = -(-num_rows // batch_size)
    return TrainConfig.of(
        epochs=MAX_EPOCHS,
        batch_size=batch_size,
        seed=seed,
        evaluate_every=max(1, steps // EVALUATIONS_AN_EPOCH),
        early_stopping=PATIENCE,
    )
