"""A run knows its data set by content: other data in its folder, and parts of other runs, are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdall.cli import main
from holdall.commands.inspect import inspect
from holdall.common.checked_files import FileCheck
from holdall.common.errors import CheckpointError, DataError, IdError
from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from holdall.distributed.processes import Processes
from holdall.training import data_check
from holdall.training.config import TrainConfig
from holdall.training.data_check import DataCheck
from holdall.training.evaluate_run import evaluate, load_model
from holdall.training.tracking import read_metrics
from holdall.training.train import train
from tests.data.raw_files import criteo_line, write_lines
from tests.edits import edit_json, flip_bit, swap

CONFIG = TrainConfig.of(
    dim=8, bottom=(16,), top=(16,), batch_size=40, steps=20, save_every=5, lr=0.02, table_lr=0.1, device="cpu"
)


def prepare_rows(folder: Path, values: str = "ab", flipped: bool = False, test: str = "ab") -> Path:
    """A data set of one feature, whose first value is that of the clicks; the last 200 rows are the test split."""
    raw = folder.parent
    raw.mkdir(parents=True, exist_ok=True)
    for name, known in (("train.tsv", values), ("test.tsv", test)):
        lines = [criteo_line(int(row % 2 == flipped), values=[known[row % 2]]) for row in range(200)]
        write_lines(raw / name, [*lines, criteo_line(0, values=[values[0]])] if name == "train.tsv" else lines)
    config = PrepareConfig(test_from_last_file=True, overwrite=True)
    prepare([raw / "train.tsv", raw / "test.tsv"], folder, config)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set `data` and a run `run` on it."""
    folder = tmp_path_factory.mktemp("trained")
    train(prepare_rows(folder / "data"), folder / "run", CONFIG, quiet=True)
    return folder


@pytest.fixture
def work(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained`, whose run was trained on the copy's data."""
    folder = shutil.copytree(trained, tmp_path / "work")
    edit_json(folder / "run" / "run.json", lambda document: document["config"].update(data=str(folder / "data")))
    return folder


def test_a_run_stores_what_it_was_made_from(trained: Path) -> None:
    document = json.loads((trained / "run" / "run.json").read_text())
    data = DataSet(trained / "data")
    assert document["data_set"] == {"fingerprint": data.fingerprint, "ids_fingerprint": data.ids_fingerprint}
    assert document["plan"] is None


def test_inspect_shows_which_data_a_run_is_of(trained: Path) -> None:
    data, run = inspect(trained / "data"), inspect(trained / "run")
    assert run["data_set"] == {key: data[key] for key in ("fingerprint", "ids_fingerprint")}


def test_other_ids_in_the_folder_of_a_run_are_refused(work: Path) -> None:
    """As many rows, columns and values: only the content of the id map tells."""
    assert evaluate(work / "run", "test")["auc"] == 1.0
    before = DataSet(work / "data").schema
    prepare_rows(work / "data", values="ba")
    assert DataSet(work / "data").schema.features == before.features
    for data in (None, work / "data"):
        with pytest.raises(CheckpointError, match=r"not the one this model was trained on: other values .* of C1 \("):
            evaluate(work / "run", "test", data=data)
    with pytest.raises(CheckpointError, match=r"not the one this model was trained on: other values"):
        train(work / "data", work / "run", CONFIG.replace(steps=30), resume=True, quiet=True)


def test_other_rows_in_the_folder_of_a_run_are_refused_unless_named(work: Path) -> None:
    prepare_rows(work / "data", flipped=True)
    with pytest.raises(CheckpointError, match=r"holds another data set than .*run was trained on .*pass --data"):
        evaluate(work / "run", "test")
    assert evaluate(work / "run", "test", data=work / "data")["auc"] == 0.0
    with pytest.raises(CheckpointError, match=r"was trained on other rows than those of .*data: its train split"):
        train(work / "data", work / "run", CONFIG.replace(steps=30), resume=True, quiet=True)


def test_a_new_test_file_with_the_same_ids_is_evaluated(work: Path) -> None:
    prepare_rows(work / "other" / "data", test="ax")
    found = evaluate(work / "run", "test", data=work / "other" / "data")
    assert found["samples"] == 200
    prepare_rows(work / "data", test="ax")  # a run resumes, as its own rows are the same
    assert train(work / "data", work / "run", CONFIG.replace(steps=25), resume=True, quiet=True)["steps"] == 25


def test_the_command_ends_with_a_sentence(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_rows(work / "data", values="ba")
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", str(work / "run")])
    assert stopped.value.code == 2
    assert "other values are behind the ids of C1" in " ".join(capsys.readouterr().err.split())


def test_flipped_rows_are_not_trained_on(work: Path) -> None:
    flip_bit(next((work / "data").glob("train-*.arrow")), 0.4)
    with pytest.raises(DataError, match=r"train-00000\.arrow was changed"):
        train(work / "data", work / "new", CONFIG, quiet=True)
    with pytest.raises(DataError, match=r"train-00000\.arrow was changed"):
        train(work / "data", work / "run", CONFIG.replace(steps=30), resume=True, quiet=True)
    assert evaluate(work / "run", "test")["auc"] == 1.0
    flip_bit(next((work / "data").glob("test-*.arrow")), 0.4)
    with pytest.raises(DataError, match=r"test-00000\.arrow was changed"):
        evaluate(work / "run", "test")


@pytest.mark.parametrize("split", ["train", "valid"])
def test_rows_that_are_checked_while_training_give_no_result(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """The check ends when the training does: until then no row of the log and no checkpoint is written."""
    monkeypatch.setattr(data_check, "BYTES_AT_START", 0)
    monkeypatch.setattr(FileCheck, "done", False)
    config = CONFIG.replace(save_every=None, log_every=1)
    train(data, tmp_path / "run", config, quiet=True)
    assert [row["step"] for row in read_metrics(tmp_path / "run") if row["split"] == "train"] == list(range(1, 21))
    folder = shutil.copytree(data, tmp_path / "data")
    flip_bit(folder / f"{split}-00000.arrow")
    with pytest.raises(DataError, match=rf"{split}-00000\.arrow was changed"):
        train(folder, tmp_path / "damaged", config, quiet=True)
    assert read_metrics(tmp_path / "damaged") == []
    assert not list((tmp_path / "damaged").glob("*/step-*"))


def test_an_error_that_damage_causes_names_the_damage(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(data, tmp_path / "data")
    path = folder / "train-00000.arrow"
    columns = DataSet(data).columns(0, 1)
    content = bytearray(path.read_bytes())
    place = content.index(columns.ids.tobytes())
    content[place : place + 4] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(content)
    monkeypatch.setattr(data_check, "BYTES_AT_START", 0)
    with pytest.raises(DataError, match=r"train-00000\.arrow was changed") as raised:
        train(folder, tmp_path / "run", CONFIG.replace(shuffle="none"), quiet=True)
    assert isinstance(raised.value.__cause__, IdError)


def test_one_process_of_a_host_checks(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(data, tmp_path / "data")
    flip_bit(folder / "train-00000.arrow")
    split = DataSet(folder, check=False)
    monkeypatch.setattr(data_check, "on_all_ranks", lambda _, task: task())
    monkeypatch.setenv("LOCAL_RANK", "1")
    DataCheck(split, Processes(rank=1, world_size=2))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(DataError, match=r"train-00000\.arrow was changed"):
        DataCheck(split, Processes(rank=2, world_size=4))


@pytest.mark.parametrize("name", ["run.json", "schema.json"])
def test_files_of_another_run_are_refused(work: Path, name: str) -> None:
    prepare_rows(work / "other" / "data", values="ba")
    train(work / "other" / "data", work / "other" / "run", CONFIG, quiet=True)
    swap(work / "run" / name, work / "other" / "run" / name)
    with pytest.raises(CheckpointError, match=r"schema\.json is not the one that the run was trained with"):
        load_model(work / "run", device="cpu")
    with pytest.raises(CheckpointError, match=r"schema\.json is not the one that the run was trained with"):
        train(work / "data", work / "run", CONFIG.replace(steps=30), resume=True, quiet=True)


def test_a_checkpoint_of_another_run_is_refused(work: Path) -> None:
    """Of the same shapes, from other settings: a seed decides which rows a hashed table shares."""
    train(work / "data", work / "other", CONFIG.replace(seed=1), quiet=True)
    newest = sorted((work / "run" / "checkpoints").iterdir())[-1]
    swap(newest, work / "other" / "checkpoints" / newest.name)
    with pytest.raises(CheckpointError, match=r"step-00000020 was saved by another run"):
        evaluate(work / "run", "test")
    with pytest.raises(CheckpointError, match=r"step-00000020 was saved by another run"):
        train(work / "data", work / "run", CONFIG.replace(steps=30), resume=True, quiet=True)


def without_fingerprints(folder: Path) -> None:
    """Make a data or run folder one of an earlier version."""

    def remove(document: dict[str, Any]) -> None:
        for key in ("files", "ids", "data_set", "plan", "sha256"):
            document.pop(key, None)

    for path in folder.glob("*.json"):
        edit_json(path, remove)


def test_what_an_earlier_version_wrote_is_compared_as_far_as_it_goes(work: Path) -> None:
    without_fingerprints(work / "run")
    without_fingerprints(work / "data")
    assert evaluate(work / "run", "test")["auc"] == 1.0
    assert train(work / "data", work / "run", CONFIG.replace(steps=25), resume=True, quiet=True)["steps"] == 25
    prepare_rows(work / "data", values="ba")
    with pytest.raises(CheckpointError, match="holds another data set"), pytest.warns(match="no hashes of its id maps"):
        evaluate(work / "run", "test")
    with pytest.warns(UserWarning, match="no hashes of its id maps, as it was prepared by an earlier version"):
        evaluate(work / "run", "test", data=work / "data")
