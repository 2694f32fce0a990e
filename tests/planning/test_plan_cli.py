"""The commands `holdall plan` and `holdall hardware`: output, files and errors."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from holdall.cli import main
from holdall.planning.plan import Caps, Plan
from tests.planning.made_up_hardware import ELSEWHERE, hardware

MODEL = ["--dim", "4", "--bottom", "8", "--top", "8", "--batch-size", "128"]


@pytest.fixture
def rates(tmp_path: Path) -> str:
    hardware().save(tmp_path / "hardware.json")
    return str(tmp_path / "hardware.json")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main([*arguments])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_a_plan_is_printed_and_written(
    data: Path, rates: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = str(tmp_path / "plan.json")
    plan = ["plan", str(data), "--hardware", rates, "--preset", "el-rec", "--device-memory", "70kb", *MODEL]
    shown = said(capsys, *plan, "--out", out, "--explain", "C3")
    for words in ("C3", "host", "samples/s", "limited by:", "its next hot row would save", "all of it on the device"):
        assert words in shown
    made = Plan.load(out)
    assert made.forecast is not None
    assert made.caps.device == 70_000
    document = json.loads(Path(out).read_text())
    document["tables"]["C3"]["hot_rows"] = 5
    Path(out).write_text(json.dumps(document))
    assert "without a forecast" in _inspected(Plan.load(out), capsys)
    again = str(tmp_path / "again.json")
    said(capsys, "plan", str(data), "--hardware", rates, "--edited", out, "--out", again)
    edited = Plan.load(again)
    assert edited.table("C3").hot_rows == 5
    assert edited.forecast is not None
    assert edited.forecast.seconds["fetch"] > made.forecast.seconds["fetch"]
    assert json.loads(said(capsys, *plan, "--json"))["strategy"] == "split"


def _inspected(plan: Plan, capsys: pytest.CaptureFixture[str]) -> str:
    from holdall.planning.render import show

    show(plan)
    return capsys.readouterr().out


def test_mistakes(data: Path, rates: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", str(data), "--hardware", rates, *MODEL]
    assert "--device-memory: '-1' is not a size" in refused(capsys, *plan, "--device-memory", "-1")
    assert "--host-memory: '4 gigs' is not a size" in refused(capsys, *plan, "--host-memory", "4 gigs")
    assert "did you mean 'fae'" in refused(capsys, *plan, "--preset", "fea")
    assert "no table 'C33' (did you mean 'C3'?)" in refused(capsys, *plan, "--explain", "C33")
    assert "make it with `holdall hardware" in refused(capsys, "plan", str(data), "--hardware", "absent.json")
    assert "does not fit" in refused(capsys, *plan, "--preset", "device", "--device-memory", "50KB")
    (tmp_path / "other.json").write_text('{"format": "holdall-run", "version": 1}')
    assert "is not a holdall-plan document" in refused(capsys, *plan, "--edited", str(tmp_path / "other.json"))


def test_mistakes_with_files(data: Path, rates: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", str(data), "--hardware", rates]
    assert "is a folder: name the file to write" in refused(capsys, *plan, *MODEL, "--out", str(tmp_path))
    assert "absent.json does not exist: make it with `holdall profile" in refused(
        capsys, *plan, "--profile", str(tmp_path / "absent.json")
    )
    out = str(tmp_path / "plan.json")
    said(capsys, *plan, *MODEL, "--out", out)
    both = refused(capsys, *plan, "--edited", out, "--device-memory", "1GB")
    assert f"--device-memory does not go with --edited: change it in {out}" in both
    made = Plan.load(out)
    tables = tuple(replace(table, hot_rows=0, tail="host") for table in made.tables)
    replace(made, tables=tables, strategy="split", caps=Caps(host=100), forecast=None).save(out)
    short = refused(capsys, *plan, "--edited", out)
    assert "the edited plan does not fit: it takes" in short
    assert "raise its caps: host " in short


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"layers": ()}, "layers"),
        ({"interactions": ()}, "interactions"),
        ({"gather": {}}, "gather, host"),
        ({"stack": {}}, "stack, forward"),
        ({"dense_update": {}}, "dense_update, sgd"),
    ],
)
def test_rates_that_are_not_whole(
    changes: dict[str, object], missing: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware(**changes).save(tmp_path / "part.json")
    shown = refused(capsys, "plan", str(data), "--hardware", str(tmp_path / "part.json"), *MODEL)
    assert f"has no rates for {missing}: measure again with `holdall hardware`" in shown


def test_what_a_plan_for_several_processes_covers(data: Path, rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(said(capsys, "plan", str(data), "--hardware", rates, *MODEL, "--world-size", "4").split())
    assert "those of one of 4 processes" in shown
    assert "measured between 2 over gloo" in shown
    assert "torchrun --nproc-per-node 4 -m holdall train ... --plan follows it" in shown


def test_rates_of_another_machine_are_a_note(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hardware(machine=ELSEWHERE).save(tmp_path / "other.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = said(capsys, "plan", str(data), "--hardware", str(tmp_path / "other.json"), *MODEL)
    assert "measured on another machine" in " ".join(shown.split())


def test_a_machine_that_was_measured_is_remembered(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def measure(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        return hardware()

    monkeypatch.setattr("holdall.planning.machine.measure.hardware", measure)
    monkeypatch.setattr("holdall.planning.machine.check_rates.checks", lambda rates: {})
    main(["plan", str(data), *MODEL])
    path = tmp_path / "holdall" / "hardware.json"
    assert f"measured now, once, and remembered in {path}; `holdall hardware` measures" in capsys.readouterr().err
    main(["plan", str(data), *MODEL])
    assert capsys.readouterr().err == ""
    assert len(calls) == 1
    shown = said(capsys, "hardware", "--out", str(tmp_path / "mine.json"))
    assert "random rows, M rows/s" in shown
    assert "memory in order 10.0 GB/s" in shown
    assert (tmp_path / "mine.json").exists()
    assert json.loads(said(capsys, "hardware", "--json"))["device"] == "cpu"
