"""Benchmark of the server: results are kept as they come, and a run with the same settings goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from benchmarks.serve import Kept


def test_kept_results_are_not_measured_again(tmp_path: Path) -> None:
    measured: list[str] = []

    def measure() -> dict[str, float]:
        measured.append("once")
        return {"rows/s": 1.5}

    file = tmp_path / "kept.jsonl"
    assert Kept(file, {"steps": 6}).get("ours, JSON", measure) == {"rows/s": 1.5}
    again = Kept(file, {"steps": 6})
    assert "ours, JSON" in again
    assert again.get("ours, JSON", measure) == {"rows/s": 1.5}
    assert measured == ["once"]
    assert "ours, JSON" not in Kept(file, {"steps": 7})
