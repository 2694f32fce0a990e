"""`holdall profile` on the command line: its output and figures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

import holdall
from holdall import Profile, ProfileConfig
from holdall.cli import main
from holdall.popularity.render import show


def test_writes_shows_and_draws(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = tmp_path / "popularity.json", tmp_path / "figures"
    main(["profile", str(data), "--out", str(out), "--figures", str(figures), "--dim", "8"])
    captured = capsys.readouterr()
    for words in (
        "3,200 rows",
        "distinct",
        "90% of",
        "fully hot inputs",
        "bytes at dim 8",
        "100.00%",
        "no order of time",
    ):
        assert words in " ".join(captured.out.split()), words
    assert captured.err.count("wrote") == 3
    assert Profile.load(out).rows_read > 3000
    for name in ("coverage.svg", "thresholds.svg", "hot-bytes.svg"):
        drawing = ET.fromstring((figures / name).read_text())
        assert drawing.tag.endswith("svg")
        assert len(drawing.findall(".//{*}polyline")) >= 1
        assert all("nan" not in line.attrib["points"] for line in drawing.findall(".//{*}polyline"))
    labels = {text.text for text in ET.fromstring((figures / "coverage.svg").read_text()).findall(".//{*}text")}
    assert "Lookups that the most popular rows take" in labels
    assert any(label and label.startswith("C3: 90% by") for label in labels)


def test_json_and_a_sample(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "popularity.json")
    main(["profile", str(data), "--out", out, "--sample", "0.2", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "holdall-popularity"
    assert document["sample"]["share"] == 0.2


def test_intervals_are_shown(data: Path) -> None:
    console = Console(record=True, width=160, file=None, quiet=False)
    with console.capture() as shown:
        show(holdall.profile(data, config=ProfileConfig(sample=0.2)), console=console)
    assert "95% intervals" in shown.get()
    assert " to " in shown.get()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sample", "1.5"], "sample is 1.5, but must be above 0 and at most 1"),
        (["--dim", "0"], "dim is 0"),
        (["--split", "valid", "--format", "criteo"], "--format and --schema go with raw files"),
    ],
)
def test_errors_are_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["profile", str(data), "--out", str(tmp_path / "p.json"), *arguments])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert message in " ".join((captured.err + captured.out).split())
    assert "Traceback" not in captured.err
    assert not (tmp_path / "p.json").exists()
