"""Charts: what is drawn where."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from holdall.report.svg import DARK, Panel, chart, round_values


def draw(path: Path, panels: list[Panel], **options: object) -> ET.Element:
    chart(path, panels, title="A <title> & more", x_label="x", x_format=str, **options)  # type: ignore[arg-type]
    return ET.fromstring(path.read_text())


def places(drawing: ET.Element) -> list[list[tuple[float, float]]]:
    lines = drawing.findall(".//{*}polyline")
    return [[tuple(map(float, point.split(","))) for point in line.attrib["points"].split()] for line in lines]  # type: ignore[misc]


def test_a_line_over_decades(tmp_path: Path) -> None:
    """Three decades are at equal distances, and larger is higher."""
    panel = Panel(lines={"a": [(1, 0.0), (10, 0.5), (100, 1.0)]}, y_label="y", y_format=str, y_range=(0.0, 1.0))
    drawing = draw(tmp_path / "x.svg", [panel])
    ((one, two, three),) = places(drawing)
    assert two[0] - one[0] == pytest.approx(three[0] - two[0], abs=0.2)
    assert one[1] - two[1] == pytest.approx(two[1] - three[1], abs=0.2)
    assert one[1] > three[1]
    texts = [text.text for text in drawing.findall(".//{*}text")]
    assert "A <title> & more" in texts
    assert "a" in texts


def test_falling_axis_and_panels(tmp_path: Path) -> None:
    top = Panel(lines={"": [(0.1, 1.0), (0.001, 2.0)]}, y_label="y", y_format=str)
    below = Panel(lines={"": [(0.1, 10.0), (0.001, 1000.0)]}, y_label="z", y_format=str, log_y=True)
    drawing = draw(tmp_path / "x.svg", [top, below], falling_x=True)
    upper, lower = places(drawing)
    assert upper[0][0] < upper[1][0]
    assert max(y for _, y in upper) < min(y for _, y in lower)


def test_names_do_not_overlap(tmp_path: Path) -> None:
    lines = {f"line {i}": [(1.0, 0.0), (10.0, 1.0)] for i in range(9)}
    panel = Panel(lines=lines, y_label="y", y_format=str, background=[[(1.0, 0.2), (10.0, 0.3)]])
    drawing = draw(tmp_path / "x.svg", [panel])
    heights = sorted(float(t.attrib["y"]) for t in drawing.findall(".//{*}text") if (t.text or "").startswith("line"))
    assert len(heights) == 9
    assert min(b - a for a, b in pairwise(heights)) >= 14


def test_one_point(tmp_path: Path) -> None:
    panel = Panel(lines={"a": [(5.0, 1.0)]}, y_label="y", y_format=str, markers=True)
    drawing = draw(tmp_path / "x.svg", [panel])
    assert len(drawing.findall(".//{*}circle")) == 1
    assert "nan" not in (tmp_path / "x.svg").read_text()


def test_round_values() -> None:
    assert round_values(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert round_values(0.73, 0.762) == pytest.approx([0.73, 0.74, 0.75, 0.76])


def test_bars_of_spread_reach_from_low_to_high_over_their_point(tmp_path: Path) -> None:
    lines = {"a": [(1.0, 1.0), (10.0, 3.0)]}
    panel = Panel(lines=lines, y_label="y", y_format=str, spreads={"a": [(10.0, 0.0, 5.0)]}, markers=True)
    drawing = draw(tmp_path / "x.svg", [panel])
    ((low, _), (x, y)) = places(drawing)[0]
    numbers = [float(number) for number in re.findall(r"[\d.]+", drawing.findall(".//{*}path")[0].attrib["d"])]
    bottom, top = numbers[1], numbers[-1]
    assert numbers[-3] == x != low
    assert top < y < bottom


def test_a_dark_chart_has_dark_paper_and_light_ink(tmp_path: Path) -> None:
    panel = Panel(lines={"a": [(1.0, 1.0), (2.0, 2.0)]}, y_label="y", y_format=str)
    drawing = draw(tmp_path / "x.svg", [panel], theme=DARK)
    assert drawing.findall(".//{*}rect")[0].attrib["fill"] == DARK.paper
    assert {text.attrib["fill"] for text in drawing.findall(".//{*}text")} >= {DARK.ink, DARK.soft}
    assert "#222" not in (tmp_path / "x.svg").read_text()
