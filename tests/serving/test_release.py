"""`holdall release`: the model of a run as a bundle, proved to be as good as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import holdall
from holdall.cli import main
from holdall.common.errors import CheckpointError, ConfigError, HoldallError
from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.evaluation.evaluate_model import score_split
from holdall.serving.bundle import open_bundle
from holdall.serving.forms import Forms
from holdall.serving.gate import FrontRow
from holdall.serving.proof import compare
from holdall.serving.release import release
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import load_model
from holdall.training.train import train
from tests.serving.made_up import implicit_files

SMALL = {"dim": 8, "bottom": (8,), "top": (8,), "batch_size": 256, "device": "cpu"}


def trained(data: Path, out: Path, **settings: Any) -> Path:
    train(data, out, TrainConfig.of(**{**SMALL, **settings}))
    return out


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(data, tmp_path_factory.mktemp("runs") / "run")


def equal_scores(run: Path, bundle: Path, data: Path) -> bool:
    rows = DataSet(data, "test")
    model = load_model(run, device="cpu")[0]
    return torch.equal(score_split(open_bundle(bundle).model(), rows).logits, score_split(model, rows).logits)


# --- tables as they were trained -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "tensor_train", "rank": 2, "min_rows": 40},
        {"method": "hashed", "setting": ("buckets=20",), "min_rows": 40},
        {"method": "quantized", "min_rows": 40},
        {"table_dtype": "bf16"},
        {"model": "dcn", "top": (8,)},
        {"model": "deepfm", "bottom": None, "top": (8,)},
        {"strategy": "split", "hot_bytes": "1KB", "tail": "disk"},
    ],
    ids=str,
)
def test_tables_as_trained_score_as_the_run_does(settings: dict[str, Any], data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", **settings)
    report = release(run, tmp_path / "bundle", as_trained=True, device="cpu")
    assert equal_scores(run, tmp_path / "bundle", data)
    assert report.quality.proof is None
    assert [metric.name for metric in report.quality.metrics] == ["auc", "logloss"]


def test_a_bundle_says_where_it_comes_from(run: Path, data: Path, tmp_path: Path) -> None:
    release(run, tmp_path / "bundle", as_trained=True)
    record = open_bundle(tmp_path / "bundle").record
    assert record.origin.checkpoint == f"step-{record.origin.step:08d}"
    assert record.origin.run is not None
    assert record.data_set["fingerprint"] == DataSet(data).fingerprint
    assert record.holdall == holdall.__version__
    assert (
        record.quality.table_bytes
        == record.quality.dense_bytes
        == 4 * 8 * sum(DataSet(data).schema.cardinalities.values())
    )


def test_the_commands_read_a_bundle(run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "bundle")
    main(["release", str(run), "--out", out, "--as-trained"])
    shown = capsys.readouterr().out
    assert shown.startswith("bundle")
    assert "1/1 of their" in shown
    main(["inspect", out, "--json"])
    assert json.loads(capsys.readouterr().out)["kind"] == "bundle"
    main(["evaluate", str(run), "--json"])
    expected = json.loads(capsys.readouterr().out)
    main(["evaluate", out, "--data", str(data), "--json"])
    assert json.loads(capsys.readouterr().out) == expected
    main(["evaluate", out, "--data", str(data)])
    assert "test split" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="a bundle, which has no rows"):
        holdall.evaluate(out)


def test_a_bundle_is_not_measured_on_other_ids(run: Path, tmp_path: Path) -> None:
    release(run, tmp_path / "bundle", as_trained=True)
    write_prepared(SyntheticConfig(rows=400, cardinalities=(40, 7, 400), num_dense=3), tmp_path / "other")
    with pytest.raises(CheckpointError, match="is not the one this model was trained on"):
        holdall.evaluate(tmp_path / "bundle", data=tmp_path / "other")


def test_an_output_that_is_taken_is_refused_first(run: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(HoldallError, match="exists already"):
        release(run, data, as_trained=True)
    with pytest.raises(HoldallError, match="is not a bundle folder"):
        release(run, data, as_trained=True, overwrite=True)
    with pytest.raises(ConfigError, match="is itself an input"):
        release(run, run, as_trained=True, overwrite=True)


def test_implicit_data_is_released(tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare([str(implicit_files(tmp_path / "raw"))], data, PrepareConfig(format="taobao", valid=0.1))
    run = trained(data, tmp_path / "run", model="tbsm", bottom=None, top=None, dim=None)
    release(run, tmp_path / "bundle", as_trained=True)
    assert equal_scores(run, tmp_path / "bundle", data)
    assert "ndcg@10" in holdall.evaluate(tmp_path / "bundle", data=data)
    report = release(run, tmp_path / "small", budget="1/2")
    assert report.quality.proof is not None
    assert "ndcg@10" in holdall.evaluate(tmp_path / "small", data=data)


# --- smaller forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "tensor_train", "rank": 2, "min_rows": 40},
        {"table_dtype": "bf16"},
        {"strategy": "split", "hot_bytes": "1KB", "tail": "disk"},
    ],
    ids=str,
)
def test_a_smaller_form_takes_its_budget(settings: dict[str, Any], data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", **settings)
    report = release(run, tmp_path / "bundle", budget="1/5", device="cpu")
    dense = 4 * 8 * sum(DataSet(data).schema.cardinalities.values())
    assert report.quality.dense_bytes == dense
    assert report.quality.table_bytes <= dense / 5
    model = open_bundle(tmp_path / "bundle").model()
    assert model.bags.num_bytes() == report.quality.table_bytes


def test_the_bundle_has_the_form_that_was_proved(run: Path, data: Path, tmp_path: Path) -> None:
    seen: list[FrontRow] = []
    report = release(
        run, tmp_path / "bundle", max_auc_loss=0.2, max_logloss_increase=0.1, device="cpu", note=seen.append
    )
    assert report.quality.front == [row.to_json() for row in seen]
    proof = report.quality.proof
    assert proof is not None
    assert proof["auc"]["loss_bound"] <= proof["max_auc_loss"] == 0.2
    reference, rows = load_model(run, device="cpu")[0], DataSet(data, "valid")
    loaded = open_bundle(tmp_path / "bundle")
    assert loaded.record.quality == report.quality
    again = compare(score_split(reference, rows), score_split(loaded.model(), rows))
    assert proof["logloss"]["loss_bound"] <= proof["max_logloss_increase"] == 0.1
    assert again.to_json() == {name: proof[name] for name in ("auc", "logloss", "calibration")}
    assert proof["auc"]["rows"] == len(rows)


def test_forms_are_made_and_measured_in_memory(run: Path, data: Path) -> None:
    model, config, _, _ = load_model(run, device="cpu")
    forms = Forms(model, config, data)
    small, smaller = forms.fit("1/4"), forms.fit("1/20")
    assert smaller.num_bytes < small.num_bytes
    assert forms.compare(model, "test").auc.difference == 0.0
    assert abs(forms.compare(small.model, "test").auc.loss) < abs(forms.compare(smaller.model, "test").auc.loss) + 0.02
    assert forms.compare(small.model).auc.rows == len(DataSet(data, "valid"))


def test_a_refused_release_writes_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["release", str(run), "--out", str(tmp_path / "bundle"), "--max-auc-loss", "1e-9"])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert "fails" in said.out
    assert "above --max-auc-loss 1e-09" in said.err
    assert list(tmp_path.iterdir()) == []


def test_the_command_shows_the_proof(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["release", str(run), "--out", str(tmp_path / "bundle"), "--budget", "1/10"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "with 95% confidence it loses at most" in shown
    assert "budget bytes AUC loss bound logloss bound calibration verdict" in shown


def test_what_cannot_be_released_is_refused(run: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"too small for these 3 tables: one row for all ids of every table takes"):
        release(run, tmp_path / "bundle", budget=10)
    with pytest.raises(ConfigError, match="leave --budget out"):
        release(run, tmp_path / "bundle", budget="1/10", as_trained=True)
    with pytest.raises(ConfigError, match="leave --max-logloss-increase out"):
        release(run, tmp_path / "bundle", max_logloss_increase=0.1, as_trained=True)
    write_prepared(SyntheticConfig(rows=400, cardinalities=(50, 7), num_dense=3), tmp_path / "data", valid=0.0)
    other = trained(tmp_path / "data", tmp_path / "run")
    with pytest.raises(ConfigError, match="is proved on the validation split"):
        release(other, tmp_path / "bundle")
    release(other, tmp_path / "bundle", as_trained=True)
    assert open_bundle(tmp_path / "bundle").record.quality.metrics == ()
