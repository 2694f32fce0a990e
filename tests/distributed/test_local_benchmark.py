"""The benchmark of local tables runs, and its invariants are true in a run of few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.local import epochs_by_validation, figure, quality, stages
from holdall.data.synthetic import SyntheticConfig, write_prepared

pytestmark = pytest.mark.slow

STEPS = 8


@pytest.fixture
def data(tmp_path: Path) -> Path:
    config = SyntheticConfig(rows=400, cardinalities=(50, 20), num_dense=2, zipf=1.1)
    write_prepared(config, tmp_path / "data", valid=0.1, test=0.26)
    return tmp_path / "data"


def test_scores_and_differences(data: Path, tmp_path: Path) -> None:
    found = quality(data, tmp_path / "runs", 1, [2], 1, batch_size=32)
    lines = {line["side"]: line for line in found["lines"]}
    runs = {run["side"]: run for run in found["runs"]}
    assert runs["data-parallel"]["steps"] == STEPS
    assert runs["data-parallel"]["logloss"] == pytest.approx(runs["one process"]["logloss"], abs=1e-4)
    assert [runs[f"local, {name}"]["merges"] for name in ("every 1", "every 10", "never")] == [STEPS, 1, 1]
    assert runs["local, every 10"]["logloss"] == runs["local, never"]["logloss"], "neither merges in so few steps"
    assert runs["local, every 1"]["logloss"] != runs["local, never"]["logloss"]
    assert 0 < lines["local, every 1"]["difference, last"] < lines["local, never"]["difference, last"]
    first, second = runs["local, never"]["own_auc"]
    assert first != second
    assert len(set(runs["data-parallel"]["own_auc"])) == 1
    assert lines["data-parallel"]["over synchronous"] == 0
    assert lines["local, never"]["bytes a sample, rows"] < lines["data-parallel"]["bytes a sample, rows"]
    other = {
        **found,
        "epochs": 2,
        "lines": [{**line, "valid logloss": line["valid logloss"] + 1} for line in found["lines"]],
    }
    assert {line["epochs"] for line in epochs_by_validation([other, found])} == {1}
    figure(tmp_path / "local.svg", [found])
    drawn = (tmp_path / "local.svg").read_text()
    assert "2 processes" in drawn
    assert "never" in drawn


def test_times_by_stage(data: Path, tmp_path: Path) -> None:
    found = stages(data, tmp_path / "runs", 32, steps=24, rounds=1)
    lines = {line["side"]: line for line in found["lines"]}
    alone = {"read", "lookup", "dense", "backward", "update"}
    for name, line in lines.items():
        assert all(line[stage] > 0 for stage in alone)
        assert ("exchange" in line) == (name != "one process")
        assert ("merge" in line) == (name in ("local, every 1", "local, every 10"))
