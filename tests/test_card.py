"""Run cards and what they say about the machine."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import card
from holdall.common.environment import environment

pytestmark = pytest.mark.slow


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(card, "RESULTS", tmp_path)
    return tmp_path


def test_holds_what_regenerates_it(results: Path):
    path = card.write_card(
        "speed", {"p50": np.float64(1.5), "n": torch.tensor(3)}, notes="quiet", command="python -m x"
    )
    content = json.loads(path.read_text())
    assert path == results / "speed.json"
    assert list(content) == [
        "name", "command", "date", "commit", "dirty", "hardware", "versions", "results", "notes"
    ]  # fmt: skip
    assert content["results"] == {"p50": 1.5, "n": 3}
    assert content["command"] == "python -m x"
    assert content["date"].endswith("+00:00")
    assert content["versions"]["torch"] == torch.__version__
    assert content["versions"]["python"] == platform.python_version()
    assert {"cpu", "cores", "memory_gib", "gpu"} <= content["hardware"].keys()


@pytest.mark.parametrize("commit", [None, "def456"])
def test_takes_the_commit_it_is_told(results: Path, monkeypatch: pytest.MonkeyPatch, commit: str | None):
    monkeypatch.setattr(card, "environment", lambda: {**environment(), "commit": commit, "dirty": True})
    monkeypatch.setenv("HOLDALL_COMMIT", "abc123")
    written = json.loads(card.write_card("x", {}).read_text())
    assert (written["commit"], written["dirty"]) == ("abc123", False)


def test_tells_nothing_about_whose_machine_it_was(results: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "node", lambda: "secret-host")
    monkeypatch.setattr(sys, "argv", ["/home/ann/x.py", "--data", "/home/ann/data/train.tsv", "--rows=1000"])
    notes = f"on secret-host in /home/ann/work/run: 5 samples/s, 1 / 2, https://x.org/a {Path(card.__file__)}"
    text = card.write_card("x", {"file": Path("/mnt/disk/y.arrow"), "nested": [{"k": "/a/b/c"}]}, notes).read_text()
    assert "ann" not in text
    assert "secret-host" not in text
    content = json.loads(text)
    assert content["results"] == {"file": "y.arrow", "nested": [{"k": "c"}]}
    assert content["notes"] == "on host in run: 5 samples/s, 1 / 2, https://x.org/a ./benchmarks/card.py"
    assert content["command"].endswith("--data train.tsv --rows=1000")


def test_environment_names_no_place():
    text = json.dumps(environment())
    assert str(Path.home()) not in text
    assert str(Path(card.__file__).parent) not in text
    assert f'"{getpass.getuser()}"' not in text


def test_alternates_and_counts():
    order: list[str] = []
    times = card.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3, warmup=1)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert {side: len(seconds) for side, seconds in times.items()} == {"a": 3, "b": 3}
    assert all(second >= 0 for seconds in times.values() for second in seconds)


def test_summary():
    assert card.summary([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == {"p20": 2.0, "p50": 3.5, "p80": 5.0, "repeats": 6}


def test_table_shows_every_column(capsys: pytest.CaptureFixture[str]):
    card.print_table("Speed", [{"side": "ours", "samples/s": 123456.7}, {"side": "torch", "bytes": 2048}])
    shown = capsys.readouterr().out
    for part in ("Speed", "ours", "torch", "samples/s", "123,457", "bytes", "2,048"):
        assert part in shown


def test_benchmarks_are_listed_and_names_checked():
    listed = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--list"], capture_output=True, text=True, cwd=card.ROOT, check=True
    ).stdout.split()
    missing = [name for name in listed if not (card.ROOT / "benchmarks" / f"{name}.py").exists()]
    assert "checkpoint" in listed
    assert missing == []
    wrong = subprocess.run(
        [sys.executable, "-m", "benchmarks", "checkpont"], capture_output=True, text=True, cwd=card.ROOT
    )
    assert wrong.returncode == 2
    assert "did you mean 'checkpoint'" in wrong.stderr
