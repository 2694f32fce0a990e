"""Release of a trained run: its model in a small form that is proved to be as good, written as a bundle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdall.common.errors import ConfigError
from holdall.common.output_folder import check_output
from holdall.data.dataset import DataSet
from holdall.data.schema import Schema
from holdall.evaluation.evaluate_model import evaluate_model
from holdall.models import Model
from holdall.serving.bundle import BUNDLE, Metric, Origin, Quality, Record, write_bundle
from holdall.serving.bundle_model import table_names
from holdall.serving.forms import Forms
from holdall.serving.gate import FrontRow, Released, release_model
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import load_model
from holdall.training.same_data import refuse_other_data, refuse_replaced_data, run_fingerprint
from holdall.training.tracking import read_run


@dataclass(frozen=True)
class ReleaseReport:
    """Bundle that was written, and what is known about its model."""

    path: Path
    record: Record

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


def release(
    run: str | Path,
    out: str | Path,
    *,
    budget: str | int | float | None = None,
    max_auc_loss: float | None = None,
    max_logloss_increase: float | None = None,
    polish: int = 0,
    as_trained: bool = False,
    data: str | Path | None = None,
    device: str = "auto",
    overwrite: bool = False,
    note: Callable[[FrontRow], None] = lambda _: None,
) -> ReleaseReport:
    """Write the model of a run as a bundle, in a smaller form that is proved on the validation split.

    With `budget` (`1/100` of the bytes of its tables, `16MB`) the tables take at most that. Without, the form is the
    smallest whose AUC is at most `max_auc_loss` (0.0005 if None) below that of the trained model, and whose logloss is
    at most `max_logloss_increase` (a thousandth of the trained model's if None) above, with 95% confidence; if there is
    none, a `GateError` says so and nothing is written. With a budget and limits, its form must stay within these.
    `polish` trains forms on for at most so many epochs, where that is better. `as_trained` keeps the tables
    as they are. `note` is called with every form that is looked at.

    The run's best checkpoint is read. `data` is its data set folder, or another one with the same ids, for id maps,
    training and validation rows.
    """
    out = Path(out)
    given = {
        "--budget": budget,
        "--max-auc-loss": max_auc_loss,
        "--max-logloss-increase": max_logloss_increase,
        "--polish": polish or None,
    }
    if as_trained and any(value is not None for value in given.values()):
        named = next(name for name, value in given.items() if value is not None)
        raise ConfigError(f"--as-trained keeps the tables as they are: leave {named} out")
    check_output(out, BUNDLE, overwrite=overwrite, inputs=[Path(run)])
    trained = TrainedRun.load(Path(run), None if data is None else Path(data), device)
    if as_trained:
        model, quality = trained.model, quality_as_trained(trained.model, trained.data)
    else:
        forms = Forms(trained.model, trained.config, trained.data)
        released = release_model(
            forms,
            budget=budget,
            max_auc_loss=max_auc_loss,
            max_logloss_increase=max_logloss_increase,
            polish_epochs=polish,
            note=note,
        )
        model, quality = released.form.model, quality_released(released)
    record = write_bundle(
        out,
        model,
        trained.config.model.model_config(),
        trained.schema,
        trained.data,
        trained.origin,
        quality,
        overwrite=overwrite,
        inputs=[trained.run],
    )
    return ReleaseReport(out, record)


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
