"""Data folders, runs, plans and hardware files of version 0.1.0 still load, and their runs go on as they would have.

`fixtures/v0.1.0` was written by the last commit before the packages were put in layers (026acf4); `expected.json` holds
what that commit's own `evaluate` and `train --resume` gave.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import holdall
from holdall.cli import main
from holdall.planning.render import show
from holdall.training.follow_plan import compare_with_plan

FIXTURES = Path(__file__).parent / "fixtures" / "v0.1.0"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
SETTINGS = [
    *["--dim", "4", "--bottom", "8", "--top", "8", "--batch-size", "32", "--steps", "10", "--save-every", "3"],
    *["--log-every", "1", "--deterministic", "--keep", "1"],
]


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the artifacts, in a folder of the name that their run settings mention."""
    shutil.copytree(FIXTURES, tmp_path / "v0.1.0")
    monkeypatch.chdir(tmp_path)
    return Path("v0.1.0")


@pytest.mark.parametrize("name", EXPECTED)
def test_an_old_run_evaluates_as_it_did(name: str, old: Path) -> None:
    found = holdall.evaluate(old / "runs" / name, split="test", data=old / "data")
    expected = EXPECTED[name]["test"]
    assert found["samples"] == expected["samples"]
    assert found["checkpoint"] == expected["checkpoint"]
    assert found["logloss"] == pytest.approx(expected["logloss"], rel=1e-5)
    assert found["auc"] == pytest.approx(expected["auc"], abs=1e-3)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_old_run_goes_on_to_the_same_losses(name: str, old: Path) -> None:
    run = old / "runs" / name
    main(["train", str(old / "data"), "--out", str(run), *SETTINGS, *EXPECTED[name]["settings"], "--resume"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = {str(row["step"]): row["loss"] for row in rows if row["split"] == "train"}
    assert losses == pytest.approx(EXPECTED[name]["losses"], rel=1e-4)


def test_old_plans_profiles_and_hardware_load(old: Path) -> None:
    plan = holdall.Plan.load(old / "plan.json")
    assert plan.forecast is not None
    document = json.loads((old / "plan.json").read_text(encoding="utf-8"))
    document["forecast"]["seconds"]["write_back"] = document["forecast"]["seconds"].pop("send_back")
    assert plan.to_json() == document
    assert holdall.Hardware.load(old / "hardware.json").copy
    profile = holdall.Profile.load(old / "popularity.json")
    profile.check(holdall.Schema.load(old / "data"))


def test_an_old_plan_is_shown_and_explained(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--edited", str(old / "plan.json"), "--hardware", str(old / "hardware.json"), "--explain", "C3"]
    main(["plan", str(old / "data"), *words])
    assert "limited by" in capsys.readouterr().out
    plan = holdall.Plan.load(old / "plan.json")
    show(plan)
    assert "limited by" in capsys.readouterr().out
    assert compare_with_plan(replace(plan, world_size=2), {"read": 1e-6, "lookup": 1e-6}, 1e-5)


def test_an_old_data_folder_is_read(old: Path) -> None:
    data = holdall.DataSet(old / "data", "train")
    batch = next(iter(holdall.Loader(data, batch_size=32, shuffle="none").epoch(0)))
    assert len(batch) == 32
    assert holdall.inspect(old / "data")["splits"]["train"]["rows"] == len(data)
