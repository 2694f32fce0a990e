"""Tables of a run under a budget: cut by the counts of its data folder, and kept in run.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import holdall
from holdall import TrainConfig
from holdall.commands.inspect import inspect, show
from holdall.common.files import write_json
from holdall.data.dataset import DataSet
from holdall.data.schema import Schema
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.planning.table_settings import TableUsage
from holdall.popularity.choose_hot_rows import count_lookups
from holdall.popularity.table_counts import stored_counts
from holdall.tables import Bands, Dense, Method, MixedDimension, Shared
from holdall.tables.popular_rows import CODED
from holdall.training.evaluate_run import load_model
from holdall.training.tracking import RUN_FILE, read_metrics, read_run

FAST: dict[str, Any] = {"bottom": (8,), "top": (8,), "dim": 16, "device": "cpu", "batch_size": 64, "log_every": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget") / "data"
    write_prepared(SyntheticConfig(rows=3000, cardinalities=(2000, 500, 6), seed=1), folder)
    return folder


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget") / "run"
    holdall.train(data, folder, TrainConfig.of(budget="1/40", steps=6, save_every=3, **FAST), quiet=True)
    return folder


def methods_of(run: Path) -> dict[str, Method]:
    model, *_ = load_model(run)
    return {name: model.bags.table(name).method for name in model.bags.features}


def bands_in(methods: dict[str, Method]) -> set[Method]:
    """Methods of all bands of all tables."""
    return {band for method in methods.values() if isinstance(method, Bands) for _, band in method.bands}


def test_popular_rows_are_kept_as_codes_and_the_next_as_narrow_ones(run: Path) -> None:
    methods = methods_of(run)
    assert bands_in(methods) == {CODED, MixedDimension(4, bits=8, trainable=True), Shared(1)}
    assert {name: method.to_json() for name, method in methods.items()} == read_run(run)["tables"]


def test_tables_and_row_state_take_the_share(run: Path) -> None:
    taken = json.loads((run / RUN_FILE).read_text())["peak_bytes"]
    assert taken["tables"] <= taken["dense_tables"] / 40
    assert taken["dense_total"] / 40 - 68 < taken["total"] <= taken["dense_total"] / 40


def test_id_maps_have_the_counts_of_the_training_split(data: Path, tmp_path: Path) -> None:
    counted = {name: counts.tolist() for name, counts in count_lookups(DataSet(data, "train")).items()}
    assert {name: counts.tolist() for name, counts in stored_counts(DataSet(data)).items()} == counted
    bare = Path(shutil.copytree(data, tmp_path / "bare"))
    shutil.rmtree(bare / "ids")
    document = json.loads((bare / "schema.json").read_text())
    document["files"] = {name: file for name, file in document["files"].items() if not name.startswith("ids/")}
    write_json(bare / "schema.json", {key: value for key, value in document.items() if key != "sha256"}, hashed=True)
    assert {name: counts.tolist() for name, counts in stored_counts(DataSet(bare)).items()} == counted


def test_a_resumed_run_keeps_its_tables(data: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = tmp_path / "half"
    holdall.train(data, half, TrainConfig.of(budget="1/40", steps=3, **FAST), quiet=True)

    def no_counts(data: DataSet) -> None:
        raise AssertionError("a run that is resumed counts nothing")

    monkeypatch.setattr("holdall.planning.inputs.stored_counts", no_counts)
    holdall.train(data, half, TrainConfig.of(budget="1/40", steps=6, **FAST), resume=True, quiet=True)
    losses = [[row["loss"] for row in read_metrics(folder) if row["split"] == "train"] for folder in (half, run)]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


def test_a_run_without_methods_in_run_json_has_those_of_its_settings(data: Path, tmp_path: Path) -> None:
    config = TrainConfig.of(budget="1/20", method="hashed", steps=1, **FAST)
    expected = config.table_methods(Schema.load(data))
    holdall.train(data, tmp_path / "run", config, quiet=True)
    assert methods_of(tmp_path / "run") == expected
    document = json.loads((tmp_path / "run" / RUN_FILE).read_text())
    older = {key: value for key, value in document.items() if key not in ("tables", "data_set", "sha256")}
    write_json(tmp_path / "run" / RUN_FILE, older, hashed=True)
    assert methods_of(tmp_path / "run") == expected
    auto = TrainConfig.of(budget="1/20", **FAST).table_methods(Schema.load(data))
    assert auto is not None
    assert bands_in(auto) == set()


def test_a_method_that_is_not_known_is_refused(run: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(run, tmp_path / "run"))
    document = json.loads((broken / RUN_FILE).read_text())
    document["tables"]["C1"] = {"method": "bonds"}
    write_json(broken / RUN_FILE, {key: value for key, value in document.items() if key != "sha256"}, hashed=True)
    with pytest.raises(holdall.HoldallError, match=r"run.json has a table by no known method .*did you mean 'bands'"):
        load_model(broken)


def test_rows_of_another_type(data: Path, tmp_path: Path) -> None:
    config = TrainConfig.of(budget="1/2", table_dtype="bf16", steps=1, **FAST)
    holdall.train(data, tmp_path / "run", config, quiet=True)
    assert bands_in(methods_of(tmp_path / "run")) == {Dense("bfloat16"), Shared(1)}


def test_inspect_and_train_have_the_same_words(data: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = inspect(run)["tables"]["C1"]
    assert words.startswith("8-bit ")
    assert words.endswith(", 1 row for the rest")
    holdall.train(data, run.with_name("again"), TrainConfig.of(budget="1/40", steps=1, **FAST))
    assert f"tables: C1 in {words}; " in capsys.readouterr().err
    show(inspect(run))
    assert words in capsys.readouterr().out


def test_dense_runs_have_no_methods(data: Path, tmp_path: Path) -> None:
    holdall.train(data, tmp_path / "run", TrainConfig.of(steps=1, **FAST), quiet=True)
    assert "tables" not in read_run(tmp_path / "run")
    assert inspect(tmp_path / "run")["tables"] == {}


def test_rows_that_several_processes_keep_are_dense(data: Path) -> None:
    usage = TableUsage(counts=stored_counts(DataSet(data)), codes_train=False)
    methods = TrainConfig.of(budget="1/40", **FAST).table_methods(Schema.load(data), usage)
    assert methods is not None
    assert bands_in(methods) == {Dense(), Shared(1)}
