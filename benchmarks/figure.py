"""Line charts of benchmarks: scores over shares of the bytes, such as 1/20."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from holdall.report.svg import Panel, chart


def line_chart(
    path: Path,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    levels: Mapping[str, float] | None = None,
) -> None:
    """Write a chart of `lines` (name -> points) over a logarithmic x axis, with horizontal `levels` for reference."""
    panel = Panel(lines=lines, y_label=y_label, y_format="{:.3f}".format, levels=levels or {}, markers=True)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    chart(path, [panel], title=title, x_label=x_label, x_format=share, x_ticks=ticks)


def share(x: float) -> str:
    """0.05 -> `1/20`."""
    return f"1/{1 / x:.0f}" if x < 1 else "1"
