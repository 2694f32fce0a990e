"""Callbacks that send the rows of a run to MLflow or to Weights & Biases.

Both keep the id of their run in the run folder, so that a resumed run goes on there. Metrics have the names of
TensorBoard's: `train/loss`, `valid/auc`; those of the kept model are `kept/auc`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from holdall.common.errors import MissingDependencyError
from holdall.common.files import read_json, write_json
from holdall.training.callbacks import Callback

FORMAT = "holdall-tracker"
VERSION = 1


class MLflow(Callback):
    """Run of MLflow with the settings as parameters and all metrics.

    Server and experiment are those of MLflow's variables (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`) or calls.
    Needs `holdall[mlflow]`.
    """

    def __init__(self, *, run_name: str | None = None):
        self.library = _library("mlflow", "mlflow", "tracking with MLflow")
        self.run_name = run_name
        self._started = False

    def on_start(self, run: Path, settings: dict[str, Any], step: int) -> None:
        run_id = _stored_id(run / "mlflow.json") if step else None
        active = self.library.start_run(run_id=run_id, run_name=self.run_name or run.name, nested=True)
        self._started = True
        if run_id is None:
            _store_id(run / "mlflow.json", active.info.run_id)
            self.library.log_params({name: value for name, value in settings.items() if value is not None})
            self.library.set_tags({"holdall.run": str(run.resolve())})

    def on_log(self, step: int, values: dict[str, Any]) -> None:
        self.library.log_metrics(self._metrics("train", values), step=step)

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        self.library.log_metrics(self._metrics("valid", metrics), step=step)

    def on_end(self, result: dict[str, Any]) -> None:
        if result["valid"]:
            self.library.log_metrics(self._metrics("kept", result["valid"]), step=result["steps"])
        self.library.end_run("FINISHED")

    def on_error(self, error: BaseException) -> None:
        if self._started:  # else the active run is not ours
            self.library.end_run("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")

    @staticmethod
    def _metrics(split: str, values: Mapping[str, Any]) -> dict[str, float]:
        """Values under names that MLflow takes: `ndcg@10` is `ndcg_at_10`."""
        return {name.replace("@", "_at_"): value for name, value in _numbers(split, values).items()}


class WandB(Callback):
    """Run of Weights & Biases with the settings as its config and all metrics; its files are in the run folder.

    Project and mode are those of its variables (`WANDB_PROJECT`, `WANDB_MODE=offline`), where `project` is not given.
    Needs `holdall[wandb]`.
    """

    def __init__(self, *, project: str | None = None, name: str | None = None):
        self.library = _library("wandb", "wandb", "tracking with Weights & Biases")
        self.project, self.name = project, name
        self._run: Any = None

    def on_start(self, run: Path, settings: dict[str, Any], step: int) -> None:
        stored = _stored_id(run / "wandb.json") if step else None
        self._run = self.library.init(
            project=self.project,
            name=self.name or run.name,
            id=stored,
            resume=None if stored is None else "allow",
            config=settings,
            dir=str(run),
        )
        _store_id(run / "wandb.json", self._run.id)

    def on_log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log(_numbers("train", values), step=step)

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        self._run.log(_numbers("valid", metrics), step=step)

    def on_end(self, result: dict[str, Any]) -> None:
        self._run.summary.update(_numbers("kept", result["valid"] or {}))
        self._run.finish()

    def on_error(self, error: BaseException) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)


TRACKERS: dict[str, type[MLflow] | type[WandB]] = {"mlflow": MLflow, "wandb": WandB}
"""Trackers by the names of `holdall train --track`."""


def _library(name: str, extra: str, purpose: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingDependencyError(name, extra, purpose) from None


def _numbers(split: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of a row, by `split/name`."""
    return {
        f"{split}/{name}": value
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


@dataclass(frozen=True)
class _TrackedRun:
    """Content of `mlflow.json` and `wandb.json` in a run folder."""

    run_id: str


def _store_id(file: Path, run_id: str) -> None:
    write_json(file, {"format": FORMAT, "version": VERSION, "run_id": run_id})


def _stored_id(file: Path) -> str | None:
    """The id that an earlier start of the run has left."""
    if not file.exists():
        return None
    cure = "delete it, and a new run of the tracker is started"
    return read_json(file, _TrackedRun, format=FORMAT, version=VERSION, cure=cure).run_id
