"""Results of a run: those of the kept model, with samples, times and tables counted as they are."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from holdall import checkpoint
from holdall.commands.inspect import inspect, show
from holdall.commands.train_summary import notes, show_training
from holdall.data.dataset import DataSet
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import BEST, CHECKPOINTS, evaluate
from holdall.training.tracking import read_metrics, read_run
from holdall.training.train import train
from holdall.training.trainer import Trainer

SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(16,), batch_size=128, log_every=5, deterministic=True)
OVERFITS = SMALL.replace(epochs=8, lr=0.3)


def printed(result: dict[str, object]) -> str:
    text = StringIO()
    show_training(result, Console(file=text, width=200))
    return text.getvalue()


@pytest.fixture(scope="module")
def overfitted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, train(data, out, OVERFITS, quiet=True)


def test_the_result_is_that_of_the_kept_model(overfitted: tuple[Path, dict[str, object]]) -> None:
    out, result = overfitted
    rows = [row for row in read_metrics(out) if row["split"] == "valid"]
    best = min(rows, key=lambda row: row["logloss"])
    assert best["step"] < rows[-1]["step"], "the run was to overfit"
    assert (result["kept_step"], result["last_step"]) == (best["step"], rows[-1]["step"])
    assert result["valid"]["logloss"] == best["logloss"]
    assert result["last_valid"]["logloss"] == rows[-1]["logloss"]
    assert evaluate(out, "valid")["logloss"] == pytest.approx(best["logloss"], rel=1e-9)
    assert checkpoint.latest(out / CHECKPOINTS).name == f"step-{result['steps']:08d}"
    (note,) = notes(result)
    assert note.startswith(f"kept the model of step {best['step']:,}, the best on the validation split")
    text = printed(result)
    assert f"last, step {rows[-1]['step']:,}" in text
    assert "calibration" in text
    assert "tables: 3, all dense" in text


def test_a_finished_run_says_so(data: Path, overfitted: tuple[Path, dict[str, object]]) -> None:
    out, result = overfitted
    again = train(data, out, OVERFITS, quiet=True, resume=True)
    assert again["trained_steps"] == 0
    names = ("steps", "samples", "kept_step", "last_step", "valid", "last_valid")
    assert {name: again[name] for name in names} == {name: result[name] for name in names}
    assert "the run had finished at step 200, and nothing was trained" in printed(again)


def test_an_early_stop_stays_one(data: Path, tmp_path: Path) -> None:
    config = OVERFITS.replace(epochs=60, early_stopping=2)
    first = train(data, tmp_path / "run", config, quiet=True)
    again = train(data, tmp_path / "run", config, quiet=True, resume=True)
    assert first["stopped_early"]
    assert "stopped early: no better logloss" in printed(first)
    assert (again["steps"], again["trained_steps"]) == (first["steps"], 0)
    assert "the run had stopped early" in printed(again)


def test_the_last_model_is_kept_when_told_so(data: Path, tmp_path: Path) -> None:
    result = train(data, tmp_path / "run", OVERFITS.replace(keep_best=False), quiet=True)
    assert result["kept_step"] == result["last_step"] == 200
    assert not (tmp_path / "run" / BEST).exists()
    assert notes(result) == []


def test_the_best_at_the_end_is_not_written_twice(data: Path, tmp_path: Path) -> None:
    """It is kept as soon as the run goes on from there, and another model could be the last."""
    first = train(data, tmp_path / "run", OVERFITS.replace(epochs=1), quiet=True)
    assert first["kept_step"] == 25
    assert not (tmp_path / "run" / BEST).exists()
    result = train(data, tmp_path / "run", OVERFITS, quiet=True, resume=True)
    assert result["kept_step"] < 200
    found = evaluate(tmp_path / "run", "valid")
    assert found["logloss"] == pytest.approx(result["valid"]["logloss"], rel=1e-9)


def test_samples_are_counted(data: Path, tmp_path: Path) -> None:
    rows = len(DataSet(data))
    config = SMALL.replace(batch_size=120)
    assert rows % 120
    result = train(data, tmp_path / "run", config.replace(epochs=2), quiet=True)
    assert result["samples"] == 2 * rows
    assert [row["samples"] for row in read_metrics(tmp_path / "run") if row["split"] == "train"][-1] == 2 * rows
    more = train(data, tmp_path / "run", config.replace(epochs=3), quiet=True, resume=True)
    assert (more["samples"], more["trained_steps"]) == (3 * rows, 27)


def test_a_batch_larger_than_the_data(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = len(DataSet(data))
    trainer = Trainer(data, tmp_path / "run", SMALL.replace(batch_size=100_000, epochs=3))
    result = trainer.run()
    assert result["samples"] == trainer.progress.total == trainer.progress.done == 3 * rows
    shown = capsys.readouterr().err
    assert [f"step {step}: valid logloss" in shown for step in (1, 2, 3)] == [True] * 3


def test_times_are_told_apart(data: Path, tmp_path: Path) -> None:
    result = train(data, tmp_path / "run", SMALL, quiet=True)
    parts = [result[f"{name}_seconds"] for name in ("training", "evaluation", "saving")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(result["seconds"], abs=0.05)
    rate = result["samples"] / result["samples_per_second"]
    assert rate < result["seconds"]


def test_tables_of_a_run(data: Path, tmp_path: Path) -> None:
    result = train(
        data, tmp_path / "run", SMALL.replace(method="hashed", setting=("buckets=5",), min_rows=1), quiet=True
    )
    assert sum(size["bytes"] for size in result["tables"].values()) == result["table_bytes"]
    assert {size["rows"] for size in result["tables"].values()} == set(DataSet(data).schema.cardinalities.values())
    assert "Hashed(buckets=5)" in printed(result)
    found = inspect(tmp_path / "run")
    assert found["table_sizes"] == result["tables"]
    text = StringIO()
    show(found, Console(file=text, width=200))
    assert "of dense" in text.getvalue()


def test_default_rates_are_written_down_and_resumed(data: Path, tmp_path: Path) -> None:
    """A run keeps its rates, also one of an earlier version, whose default was 0.01 for everything."""
    train(data, tmp_path / "new", SMALL.replace(steps=2), quiet=True)
    train(data, tmp_path / "old", SMALL.replace(steps=2, lr=0.01), quiet=True)
    for name, expected in {"new": (0.001, 0.1), "old": (0.01, None)}.items():
        train(data, tmp_path / name, SMALL.replace(steps=5), quiet=True, resume=True)
        settings = read_run(tmp_path / name)["config"]["train"]
        assert (settings["lr"], settings["table_lr"]) == expected
        assert read_metrics(tmp_path / name)[-2]["lr"] == expected[0]
