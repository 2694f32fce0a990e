"""The doctor finds planted faults, names them, and is content with a sound set."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall.cli import main
from holdall.commands.doctor import Finding, doctor
from holdall.data.prepare import PrepareConfig, prepare
from holdall.planning.config import PlanConfig
from holdall.planning.planner import plan
from tests.edits import edit_json, flip_bit
from tests.planning.made_up_hardware import hardware


def found(findings: list[Finding], level: str) -> str:
    return "\n".join(f"{finding.what}: {finding.cure}" for finding in findings if finding.level == level)


def write_table(folder: Path, rows: list[str], **options: Any) -> Path:
    """A prepared set of columns label, price, color; the last fifth is the test split."""
    (folder / "log.csv").write_text("label,price,color\n" + "\n".join(rows) + "\n")
    (folder / "schema.toml").write_text('label = "label"\ndense = ["price"]\ncategorical = ["color"]\n')
    options = {"valid": 0.1, "test": 0.2, "dense": "none", "rare_below": 1, **options}
    config = PrepareConfig(format="table", schema=folder / "schema.toml", **options)
    prepare([str(folder / "log.csv")], folder / "data", config)
    return folder / "data"


def test_a_sound_set_has_no_problems(data: Path) -> None:
    examination = doctor(data, verify=True)
    assert examination.problems == 0
    assert "positive labels" in found(examination.findings, "fine")


def test_planted_faults_are_named(tmp_path: Path) -> None:
    rows = [f"{i % 2},{1e6 if i % 2 else 3},{'red' if i < 60 else 'green'}" for i in range(100)]
    examination = doctor(write_table(tmp_path, rows))
    assert "'price' reaches from 3 to 1e+06" in found(examination.findings, "note")


def test_labels_of_one_kind_and_constant_columns(tmp_path: Path) -> None:
    examination = doctor(write_table(tmp_path, [f"1,5,{'red' if i % 3 else 'blue'}" for i in range(100)]))
    notes = found(examination.findings, "note")
    assert "labels of split 'train' are 1" in notes
    assert "'price' is 5 everywhere" in notes


def test_values_unseen_in_training(tmp_path: Path) -> None:
    examination = doctor(write_table(tmp_path, [f"{i % 2},{i},color-{i}" for i in range(200)]))
    notes = [finding for finding in examination.findings if "'color'" in finding.what]
    assert len(notes) == 1  # one line for all splits
    assert notes[0].what.startswith("ids of 'color' that share its unseen row: 100% in 'valid' and 100% in 'test'")
    assert notes[0].cure.startswith("prepare with --rare-below 2")


@pytest.mark.parametrize(("rare_below", "level", "cure"), [(2, "fine", ""), (9, "note", "--rare-below of less than 9")])
def test_values_unseen_in_training_where_the_unseen_row_is_trained(
    rare_below: int, level: str, cure: str, tmp_path: Path
) -> None:
    rows = [f"{i // 2 % 2},{i},color-{i if i % 2 else i % 8}" for i in range(200)]
    examination = doctor(write_table(tmp_path, rows, rare_below=rare_below))
    (finding,) = [finding for finding in examination.findings if "'color'" in finding.what]
    assert finding.level == level
    assert cure in finding.cure


def planted_rows(leak: str) -> list[str]:
    """Random rows; `leak` has the label in the price, in the color, or in neither."""
    rng = np.random.default_rng(0)
    label, price, color = rng.integers(2, size=600), rng.random(600), rng.integers(40, size=600)
    if leak == "price":
        price = np.where(label, 100.0, 3.0) + price
    if leak == "color":
        color = 2 * (color % 10) + label
    return [f"{a},{b:.4f},color-{c}" for a, b, c in zip(label, price, color, strict=True)]


@pytest.mark.parametrize(
    ("leak", "name", "key"), [("price", "dense column 'price'", "dense"), ("color", "feature 'color'", "categorical")]
)
def test_a_column_that_gives_the_label_away_is_named(leak: str, name: str, key: str, tmp_path: Path) -> None:
    examination = doctor(write_table(tmp_path, planted_rows(leak)))
    (finding,) = [finding for finding in examination.findings if "predicts the label alone" in finding.what]
    assert finding.what.startswith(f"{name} predicts the label alone (AUC ")
    assert finding.cure.startswith(f"if not, remove it from `{key}` in the file of --schema")


def test_random_columns_give_nothing_away(tmp_path: Path) -> None:
    examination = doctor(write_table(tmp_path, planted_rows("neither")))
    assert not [finding for finding in examination.findings if "predicts" in finding.what or "sorted" in finding.what]
    assert "neighbouring rows do not resemble each other" in found(examination.findings, "fine")


@pytest.mark.parametrize(("column", "name"), [(0, "label"), (2, "color")])
def test_sorted_rows_are_named(column: int, name: str, tmp_path: Path) -> None:
    rows = sorted(planted_rows("neither"), key=lambda row: row.split(",")[column])
    examination = doctor(write_table(tmp_path, rows))
    (finding,) = [finding for finding in examination.findings if finding.what.startswith("rows are sorted")]
    assert f"'{name}' is equal in" in finding.what
    assert "--shuffle auto" in finding.cure


def test_a_bag_that_gives_the_label_away_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{i % 2},yes-{i % 2}|{word}" for i, word in enumerate(rng.integers(500, size=900))]
    (tmp_path / "log.csv").write_text("label,tags\n" + "\n".join(rows) + "\n")
    schema = tmp_path / "schema.toml"
    schema.write_text('label = "label"\n[[bag]]\nname = "tags"\nseparator = "|"\n')
    prepare([tmp_path / "log.csv"], tmp_path / "data", PrepareConfig(format="table", schema=schema))
    notes = found(doctor(tmp_path / "data").findings, "note")
    assert "feature 'tags' predicts the label alone" in notes
    assert "remove it from `bag`" in notes


def test_a_damaged_file_is_a_problem(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    file = next(folder.glob("train-*.arrow"))
    file.write_bytes(file.read_bytes()[:-100])
    examination = doctor(folder)
    assert examination.problems == 1
    assert "truncated" in found(examination.findings, "problem")


def test_a_damaged_id_map_is_a_problem_and_no_hash_a_note(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    flip_bit(folder / "ids" / "C1.arrow")
    assert "C1.arrow was changed" in found(doctor(folder).findings, "problem")
    edit_json(folder / "schema.json", lambda document: document.pop("files"))
    assert "its id maps, items and ranking cases have no hashes" in found(doctor(folder).findings, "note")


def test_a_plan_says_memory_and_time(data: Path, bag_data: Path, tmp_path: Path) -> None:
    plan(data, PlanConfig.of(dim=4, batch_size=128, preset="device"), hardware=hardware()).save(tmp_path / "plan.json")
    examination = doctor(data, tmp_path / "plan.json")
    fine = found(examination.findings, "fine")
    assert "an epoch of 25 steps should take" in fine
    assert "device:" in fine
    other = doctor(bag_data, tmp_path / "plan.json")
    assert other.problems == 1
    assert "the plan" in found(other.findings, "problem")


def test_the_command_ends_with_1_when_something_is_wrong(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", str(data)])
    assert "positive labels" in capsys.readouterr().out
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        main(["doctor", str(data), str(tmp_path / "plan.json"), "--json"])
    assert stop.value.code == 1
    assert '"problems": 1' in capsys.readouterr().out
