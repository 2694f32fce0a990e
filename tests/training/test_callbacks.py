"""Callbacks of a run: what they are told, how they stop it, and what becomes of their errors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import holdall
from holdall import checkpoint
from holdall.commands.train_summary import notes
from holdall.common.errors import ConfigError, NonFiniteLossError
from holdall.training.callbacks import Callback, CallbackError, StopTraining
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import CHECKPOINTS
from holdall.training.tracking import read_metrics
from tests.training.test_trainer import curve, same_tensors

SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128, log_every=5, deterministic=True)


class Recorder(Callback):
    """Keeps every event; raises `error` at one of them."""

    def __init__(self, at: tuple[str, int] | None = None, error: Exception | None = None):
        self.events: list[tuple[Any, ...]] = []
        self.at, self.error = at, error

    def _record(self, event: str, step: int, *details: Any) -> None:
        self.events.append((event, step, *details))
        if self.at == (event, step):
            assert self.error is not None
            raise self.error

    def on_start(self, run: Path, settings: dict[str, Any], step: int) -> None:
        self._record("start", step, run, settings)

    def on_log(self, step: int, values: dict[str, Any]) -> None:
        self._record("log", step, values)

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        self._record("evaluation", step, metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        assert checkpoint.read(path).step == step
        self._record("checkpoint", step, path)

    def on_end(self, result: dict[str, Any]) -> None:
        self._record("end", result["steps"], result)

    def on_error(self, error: BaseException) -> None:
        self._record("error", -1, error)

    def names(self) -> list[tuple[str, int]]:
        return [(event, step) for event, step, *_ in self.events]


def train(data: Path, out: Path, config: TrainConfig, *callbacks: Callback, resume: bool = False) -> dict[str, Any]:
    return holdall.train(data, out, config, quiet=True, resume=resume, callbacks=callbacks)


def test_a_callback_is_told_everything_and_changes_nothing(data: Path, tmp_path: Path) -> None:
    config = SMALL.replace(steps=30, evaluate_every=15, save_every=10, save_in_background=False, keep=9)
    recorder = Recorder()
    result = train(data, tmp_path / "told", config, recorder)
    train(data, tmp_path / "plain", config)
    assert curve(tmp_path / "told") == curve(tmp_path / "plain")
    assert same_tensors(tmp_path / "told", tmp_path / "plain")

    names = recorder.names()
    assert names[0] == ("start", 0)
    assert names[-1] == ("end", 30)
    rows = read_metrics(tmp_path / "told")
    kinds = {"train": "log", "valid": "evaluation"}
    assert [name for name in names if name[0] in kinds.values()] == [(kinds[row["split"]], row["step"]) for row in rows]
    saved = [(step, path.parent.name) for event, step, path, *_ in recorder.events if event == "checkpoint"]
    assert [step for step, folder in saved if folder == CHECKPOINTS] == [10, 20, 30]
    settings = recorder.events[0][3]
    assert settings["data"] == str(data)
    assert settings["save_every"] == 10
    by_name = {(event, step): details for event, step, *details in recorder.events}
    assert by_name["log", 5] == [{k: v for k, v in rows[0].items() if k not in ("step", "split")}]
    assert by_name["evaluation", 30][0]["auc"] == result["last_valid"]["auc"]
    assert result["stopped_by"] is None


class Slow(Callback):
    def on_start(self, run: Path, settings: dict[str, Any], step: int) -> None:
        time.sleep(0.3)


def test_the_rate_is_of_training_without_callbacks(data: Path, tmp_path: Path) -> None:
    result = train(data, tmp_path / "run", SMALL.replace(steps=1), Slow())
    parts = ("training", "evaluation", "saving", "callbacks")
    assert result["callbacks_seconds"] >= 0.3
    assert result["seconds"] == pytest.approx(sum(result[f"{part}_seconds"] for part in parts), rel=0.05)


def test_checkpoints_in_the_background_are_told_once_each(data: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    train(data, tmp_path / "run", SMALL.replace(steps=12, save_every=3, log_every=1, keep=9), recorder)
    saved = [path for event, _, path, *_ in recorder.events if event == "checkpoint"]
    assert sorted(path.name for path in saved if path.parent.name == CHECKPOINTS) == [
        f"step-{step:08d}" for step in (3, 6, 9, 12)
    ]


@pytest.mark.parametrize("at", [("log", 10), ("evaluation", 10), ("checkpoint", 10)])
def test_a_callback_stops_the_run_which_can_be_resumed(at: tuple[str, int], data: Path, tmp_path: Path) -> None:
    config = SMALL.replace(steps=20, evaluate_every=10, save_every=10, save_in_background=False)
    recorder = Recorder(at, StopTraining("seen enough"))
    result = train(data, tmp_path / "run", config, recorder)
    assert (result["steps"], result["stopped_by"]) == (10, "seen enough")
    assert notes(result)[0] == "stopped by a callback at step 10: seen enough"
    assert recorder.names()[-1] == ("end", 10)
    resumed = Recorder()
    assert train(data, tmp_path / "run", config, resumed, resume=True)["steps"] == 20
    assert resumed.names()[0] == ("start", 10)
    train(data, tmp_path / "whole", config)
    assert same_tensors(tmp_path / "run", tmp_path / "whole")


def test_a_stop_before_the_first_step(data: Path, tmp_path: Path) -> None:
    result = train(data, tmp_path / "run", SMALL.replace(steps=5), Recorder(("start", 0), StopTraining()))
    assert (result["steps"], result["stopped_by"]) == (0, "Recorder.on_start")


@pytest.mark.parametrize(("at", "saved"), [(("start", 0), 0), (("log", 10), 10), (("end", 20), 20)])
def test_an_error_is_named_and_the_run_is_saved(at: tuple[str, int], saved: int, data: Path, tmp_path: Path) -> None:
    failing, other = Recorder(at, KeyError("no such chart")), Recorder()
    message = rf"callback Recorder failed in on_{at[0]} at step {saved} \(KeyError: 'no such chart'\); the run is saved"
    with pytest.raises(CallbackError, match=message) as caught:
        train(data, tmp_path / "run", SMALL.replace(steps=20), failing, other)
    assert isinstance(caught.value.__cause__, KeyError)
    assert other.events[-1] == ("error", -1, caught.value)
    newest = checkpoint.latest(tmp_path / "run" / CHECKPOINTS)
    assert newest is not None
    assert newest.name == f"step-{saved:08d}"
    assert train(data, tmp_path / "run", SMALL.replace(steps=20), resume=True)["steps"] == 20


def test_an_error_of_the_run_is_told(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing, recorder = Recorder(("error", -1), ValueError("again")), Recorder()
    with pytest.raises(NonFiniteLossError) as caught:
        train(data, tmp_path / "run", SMALL.replace(steps=20, lr=1e30, optimizer="sgd"), failing, recorder)
    assert recorder.events[-1] == ("error", -1, caught.value)
    assert "end" not in [event for event, *_ in recorder.events]
    assert "note: callback Recorder failed in on_error (ValueError: again)" in capsys.readouterr().err


def test_something_else_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"derived from holdall.Callback, not <class"):
        train(data, tmp_path / "run", SMALL, Recorder)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
