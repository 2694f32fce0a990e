"""The doctor finds planted faults, names them, and is content with a sound set."""

from __future__ import annotations

import shutil
from pathlib import Path

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


def write_table(folder: Path, rows: list[str]) -> Path:
    """A prepared set of columns label, price, color; the last fifth is the test split."""
    (folder / "log.csv").write_text("label,price,color\n" + "\n".join(rows) + "\n")
    (folder / "schema.toml").write_text('label = "label"\ndense = ["price"]\ncategorical = ["color"]\n')
    config = PrepareConfig(format="table", schema=str(folder / "schema.toml"), valid=0.1, test=0.2, dense="none")
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
    assert "of the ids of 'color' in 'test' were never seen in training" in found(examination.findings, "note")


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
