"""MLflow and Weights & Biases: what they are told, with stand-ins whose calls fit the real libraries."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import holdall
from holdall import cli
from holdall.common.errors import MissingDependencyError
from holdall.integrations.trackers import MLflow, WandB
from holdall.training.callbacks import Callback, CallbackError
from holdall.training.config import TrainConfig

SMALL = TrainConfig.of(dim=4, bottom=(4,), top=(4,), batch_size=128, log_every=5, steps=10)
Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


def recording(calls: Calls, name: str, result: Any = None) -> Callable[..., Any]:
    def call(*values: Any, **options: Any) -> Any:
        calls.append((name, values, options))
        return result

    return call


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls of a stand-in for MLflow."""
    calls: Calls = []
    module: Any = ModuleType("mlflow")
    module.start_run = recording(calls, "start_run", SimpleNamespace(info=SimpleNamespace(run_id="a1b2")))
    for name in ("log_params", "log_metrics", "set_tags", "end_run"):
        setattr(module, name, recording(calls, name))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return calls


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls of a stand-in for Weights & Biases; those of its run are `run.log` and so on."""
    calls: Calls = []
    run = SimpleNamespace(
        id="c3d4",
        log=recording(calls, "run.log"),
        finish=recording(calls, "run.finish"),
        summary=SimpleNamespace(update=recording(calls, "run.summary.update")),
    )
    module: Any = ModuleType("wandb")
    module.init = recording(calls, "init", run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def train(data: Path, out: Path, *callbacks: Callback, **settings: Any) -> dict[str, Any]:
    resume = settings.pop("resume", False)
    return holdall.train(data, out, SMALL.replace(**settings), quiet=True, resume=resume, callbacks=callbacks)


def test_mlflow_has_settings_and_metrics_and_goes_on_after_a_resume(data: Path, tmp_path: Path, mlflow: Calls) -> None:
    result = train(data, tmp_path / "run", MLflow())
    assert [name for name, *_ in mlflow] == [
        "start_run", "log_params", "set_tags", "log_metrics", "log_metrics", "log_metrics", "log_metrics", "end_run"
    ]  # fmt: skip
    assert mlflow[0][2] == {"run_id": None, "run_name": "run", "nested": True}
    params = mlflow[1][1][0]
    assert (params["batch_size"], params["data"]) == (128, str(data))
    assert None not in params.values()
    metrics = [(values[0], options["step"]) for name, values, options in mlflow if name == "log_metrics"]
    assert [step for _, step in metrics] == [5, 10, 10, 10]
    assert metrics[2][0]["valid/auc"] == metrics[3][0]["kept/auc"] == result["valid"]["auc"]
    assert mlflow[-1][1] == ("FINISHED",)

    mlflow.clear()
    train(data, tmp_path / "run", MLflow(), steps=15, resume=True)
    assert mlflow[0][2]["run_id"] == "a1b2"
    assert "log_params" not in [name for name, *_ in mlflow]


def test_names_and_values_that_mlflow_refuses(mlflow: Calls) -> None:
    MLflow().on_evaluation(3, {"ndcg@10": 0.5, "auc": math.nan, "note": "text"})
    assert mlflow == [("log_metrics", ({"valid/ndcg_at_10": 0.5},), {"step": 3})]


def test_wandb_has_settings_and_metrics_and_goes_on_after_a_resume(data: Path, tmp_path: Path, wandb: Calls) -> None:
    result = train(data, tmp_path / "run", WandB(project="clicks"))
    name, _, options = wandb[0]
    assert (name, options["project"], options["name"], options["id"]) == ("init", "clicks", "run", None)
    assert options["config"]["batch_size"] == 128
    logged = [(values[0], options["step"]) for name, values, options in wandb if name == "run.log"]
    assert [step for _, step in logged] == [5, 10, 10]
    assert "train/loss" in logged[0][0]
    assert wandb[-2] == ("run.summary.update", ({f"kept/{k}": v for k, v in result["valid"].items()},), {})
    assert wandb[-1] == ("run.finish", (), {})

    wandb.clear()
    train(data, tmp_path / "run", WandB(), steps=15, resume=True)
    assert (wandb[0][2]["id"], wandb[0][2]["resume"]) == ("c3d4", "allow")


class Fails(Callback):
    def __init__(self, error: BaseException):
        self.error = error

    def on_log(self, step: int, values: dict[str, Any]) -> None:
        raise self.error


@pytest.mark.parametrize(("error", "status"), [(KeyError("x"), "FAILED"), (KeyboardInterrupt(), "KILLED")])
def test_a_run_that_fails_is_marked(
    error: BaseException, status: str, data: Path, tmp_path: Path, mlflow: Calls, wandb: Calls
) -> None:
    with pytest.raises((CallbackError, KeyboardInterrupt)):
        train(data, tmp_path / "run", MLflow(), WandB(), Fails(error))
    assert mlflow[-1] == ("end_run", (status,), {})
    assert wandb[-1] == ("run.finish", (), {"exit_code": 1})


def test_a_tracker_that_did_not_start_ends_no_run(
    data: Path, tmp_path: Path, mlflow: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The active run may be the caller's."""

    def refuse(**_: Any) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(sys.modules["mlflow"], "start_run", refuse)
    with pytest.raises(CallbackError, match="callback MLflow failed in on_start at step 0"):
        train(data, tmp_path / "run", MLflow())
    assert mlflow == []


def test_the_command_line_starts_a_tracker(data: Path, tmp_path: Path, mlflow: Calls) -> None:
    words = ["--dim", "4", "--bottom", "4", "--top", "4", "--batch-size", "512", "--steps", "2", "--track", "mlflow"]
    cli.main(["train", str(data), "--out", str(tmp_path / "run"), *words])
    assert mlflow[-1] == ("end_run", ("FINISHED",), {})
    assert json.loads((tmp_path / "run" / "mlflow.json").read_text())["run_id"] == "a1b2"


@pytest.mark.parametrize(("tracker", "name"), [(MLflow, "mlflow"), (WandB, "wandb")])
def test_without_the_library_its_extra_is_named(tracker: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'holdall\[{name}\]'"):
        tracker()


def test_the_calls_fit_the_real_mlflow(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("mlflow", reason="needs MLflow: pip install 'holdall[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    library.set_tracking_uri((tmp_path / "mlruns").as_uri())
    train(data, tmp_path / "run", MLflow())
    result = train(data, tmp_path / "run", MLflow(), steps=15, resume=True)
    run_id = json.loads((tmp_path / "run" / "mlflow.json").read_text())["run_id"]
    stored = library.get_run(run_id)
    assert stored.info.status == "FINISHED"
    assert stored.data.params["batch_size"] == "128"
    assert stored.data.metrics["kept/auc"] == result["valid"]["auc"]
    steps = [metric.step for metric in library.MlflowClient().get_metric_history(run_id, "train/loss")]
    assert steps == [5, 10, 15]


def test_the_calls_fit_the_real_wandb(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("wandb", reason="needs Weights & Biases: pip install 'holdall[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(data, tmp_path / "run", WandB(project="clicks"))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert "dir" in inspect.signature(library.init).parameters
