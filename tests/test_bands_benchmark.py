"""The benchmark of tables in bands at a small scale: bands within their share, both sides measured, a card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import bands, card
from holdall.tables.method import total_bytes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("share", [0.01, 0.02])
def test_bands_fill_their_share(share: float) -> None:
    case = bands.Case("rmc2", [5, 1_000, 3_000_000], 16, 8, "cpu", 1)
    methods = bands.banded(case, share)
    size = total_bytes([(method, case.rows[name], 16) for name, method in methods.items()], torch.float32)
    dense = 4 * 16 * sum(case.cardinalities)
    assert 0.95 * share * dense < size <= share * dense
    assert [type(method).__name__ for _, method in methods["C3"].bands] == [
        "Quantized", "Quantized", "Codes", "Codes", "Shared"
    ]  # fmt: skip


def test_a_small_run_writes_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "RESULTS", tmp_path)
    sizes = ["--scale", "0.002", "--share", "0.05", "--batch-size", "512", "--repeats", "2"]
    bands.main(["--device", "cpu", *sizes, "--card", "small"])
    results = json.loads((tmp_path / "small.json").read_text())["results"]
    (lookup,) = results["lookups"]
    assert lookup["relative difference"] < 1e-6
    assert lookup["bands MB stored"] <= 0.05 * lookup["dense MB stored"] * 1.01
    assert lookup["bands MB touched"] < lookup["dense MB touched"]
    assert lookup["bands of dense"] == pytest.approx(lookup["bands ms"] / lookup["dense ms"])
    assert results["step"]["bands ms"] > 0
