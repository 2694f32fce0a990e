"""Trained run with everything that it was made from, and the quality of a model as a bundle keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from holdall.common.sizes import readable_bytes
from holdall.common.summary import Summarised, Summary
from holdall.data.dataset import DataSet
from holdall.data.schema import Schema
from holdall.evaluation.evaluate_model import evaluate_model
from holdall.models import Model
from holdall.serving.bundle import Metric, Origin, Quality, Record
from holdall.serving.bundle_model import table_names
from holdall.serving.gate import Released
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import load_model
from holdall.training.same_data import refuse_other_data, refuse_replaced_data, run_fingerprint
from holdall.training.tracking import read_run


@dataclass(frozen=True, repr=False)
class ReleaseReport(Summarised):
    """Bundle or delta that was written, and what is known about its model."""

    path: Path
    record: Record
    """Description of the bundle, or of the one that the delta leads to."""
    num_unknown: int = 0
    """Values to withdraw that no id map has."""
    without_rows: tuple[str, ...] = ()
    """Tables with withdrawn values that have no rows of their own, so that nothing was overwritten there."""

    def _summary(self) -> Summary:
        tables = self.record.tables
        sizes = (readable_bytes(self.quality.table_bytes), readable_bytes(self.quality.dense_bytes))
        metrics = "".join(f", {one.split} {one.name} {one.value:.5g}" for one in self.quality.metrics)
        title = f"ReleaseReport: {str(self.path)!r}, {len(tables)} tables in {sizes[0]} ({sizes[1]} dense){metrics}"
        largest = sorted(tables.items(), key=lambda item: -item[1].rows)
        rows = [(name, table.rows, table.method["method"]) for name, table in largest]
        return Summary(title, ("table", "rows", "stored as"), rows)

    @property
    def quality(self) -> Quality:
        return self.record.quality


@dataclass(frozen=True)
class TrainedRun:
    """Model of a run with everything that it was made from."""

    run: Path
    model: Model
    config: TrainConfig
    schema: Schema
    data: Path
    origin: Origin

    @classmethod
    def load(cls, run: Path, data: Path | None = None, device: str = "auto") -> TrainedRun:
        """The best checkpoint of a run, and its data set folder or another one with the same ids."""
        document = read_run(run)
        model, config, schema, checkpoint = load_model(run, device=device)
        assert isinstance(model, Model)
        folder = Path(document["config"]["data"]) if data is None else data
        found = DataSet(folder, "train", check=False).schema
        refuse_other_data(found, schema, folder)
        if data is None:
            refuse_replaced_data(found, schema, folder, run)
        step = int(checkpoint.name.removesuffix(".replaced").rpartition("-")[2])
        origin = Origin(run=run_fingerprint(document), checkpoint=checkpoint.name, step=step)
        return cls(run, model, config, found, folder, origin)


def quality_released(released: Released) -> Quality:
    """Size, metrics, proof and front of a form, as the bundle has them."""
    auc, logloss = released.proof.auc, released.proof.logloss
    return Quality(
        table_bytes=released.form.num_bytes,
        dense_bytes=released.dense_bytes,
        metrics=tuple(Metric(name=one.metric, split="valid", value=one.candidate) for one in (auc, logloss)),
        proof={**released.limits.to_json(), "sentence": released.sentence, **released.proof.to_json()},
        front=[row.to_json() for row in released.front],
    )


def quality_as_trained(model: Model, data: Path) -> Quality:
    """Size and validation metrics of a model whose tables stay as they are: nothing is left to prove."""
    return Quality(
        table_bytes=table_bytes(model), dense_bytes=dense_bytes(model), metrics=validation_metrics(model, data)
    )


def validation_metrics(model: Model, data: Path) -> tuple[Metric, ...]:
    """AUC and logloss on the validation split, where it has rows of both classes; AUC is the metric of record."""
    schema = Schema.load(data)
    if "valid" not in schema.splits or not schema.splits["valid"].rows:
        return ()
    found = evaluate_model(model, DataSet(data, "valid"), allow_one_class=True)
    return tuple(
        Metric(name=name, split="valid", value=found[name])
        for name in ("auc", "logloss")
        if not math.isnan(found[name])
    )


def dense_bytes(model: Model) -> int:
    """Bytes of all tables of a model as float32 rows."""
    return sum(4 * model.bags.table(name).num_rows * model.bags.dim for name in table_names(model))


def table_bytes(model: Model) -> int:
    """Bytes of all tables of a model as they are stored."""
    return model.bags.num_bytes()
