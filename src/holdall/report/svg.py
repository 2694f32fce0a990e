"""Line charts as small SVG files that a README can show, made without a library and without scripts inside.

Lines have their name at their right end. Lines of the background are thin and grey, without a name. The x axis is
logarithmic. `DARK` is the theme for pages with a dark background.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

WIDTH = 820
LEFT, TOP, BOTTOM = 82, 64, 58
MARGIN = 30  # at the right, without names
LETTER = 7.2  # greatest width of a letter in the names of lines
GAP = 34
LABEL_STEP = 15
COLOURS = (
    "#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6",
    "#dd4477", "#66aa00", "#b82e2e", "#316395", "#994499", "#22aa99",
)  # fmt: skip


@dataclass(frozen=True)
class Theme:
    """Colours of a chart besides those of its lines."""

    paper: str = "white"
    ink: str = "#222"
    soft: str = "#666"
    grid: str = "#e6e6e6"
    grey: str = "#c4c8cd"


LIGHT = Theme()
DARK = Theme(paper="#0d1117", ink="#e6edf3", soft="#9aa4af", grid="#252b33", grey="#4a525c")

Points = Sequence[tuple[float, float]]
Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot of a chart: lines by name over the x axis that all panels share."""

    lines: Mapping[str, Points]
    y_label: str
    y_format: Format
    log_y: bool = False
    y_range: tuple[float, float] | None = None
    """Bottom and top; the range of the lines with a margin when None."""
    levels: Mapping[str, float] = field(default_factory=dict)
    """Horizontal reference lines by name."""
    background: Sequence[Points] = ()
    """Lines for comparison: thin, grey, without a name."""
    markers: bool = False
    spreads: Mapping[str, Sequence[tuple[float, float, float]]] = field(default_factory=dict)
    """Bars (x, low, high) by the name of a line."""


def chart(
    path: Path,
    panels: Sequence[Panel],
    *,
    title: str,
    x_label: str,
    x_format: Format,
    subtitle: str = "",
    x_ticks: Sequence[float] | None = None,
    height: int = 440,
    falling_x: bool = False,
    theme: Theme = LIGHT,
) -> None:
    """Write panels, one below the other, over one logarithmic x axis; `falling_x` puts the largest x at the left."""
    everything = [line for panel in panels for line in (*panel.lines.values(), *panel.background)]
    xs = [x for line in everything for x, _ in line]
    longest = max((len(name) for panel in panels for name in panel.lines), default=0)
    right = WIDTH - (round(longest * LETTER) + 44 if longest else MARGIN)
    x_axis = _Axis(min(xs), max(xs), LEFT, right, log=True, falling=falling_x)
    each = (height - TOP - BOTTOM - GAP * (len(panels) - 1)) / len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="{theme.paper}"/>',
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="600" fill="{theme.ink}">{escape(title)}</text>',
        f'<text x="{LEFT}" y="45" fill="{theme.soft}">{escape(subtitle)}</text>',
    ]
    for number, panel in enumerate(panels):
        top = TOP + number * (each + GAP)
        ticks = x_axis.ticks() if x_ticks is None else list(x_ticks)
        parts += _panel(panel, x_axis, ticks, (top, top + each), right, theme)
    for tick in x_axis.ticks() if x_ticks is None else x_ticks:
        parts.append(_text(x_axis(tick), height - BOTTOM + 20, x_format(tick), anchor="middle", fill=theme.soft))
    parts.append(_text((LEFT + right) / 2, height - 14, x_label, anchor="middle", fill=theme.ink))
    parts.append("</svg>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


class _Axis:
    """Mapping from values to positions on the page."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool, falling: bool = False):
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
        self.low, self.high, self.log = low, high, log
        self.start, self.end = (end, start) if falling else (start, end)

    def __call__(self, value: float) -> float:
        if self.log:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Powers of ten, or every second or third of them when there are many; round values on a linear axis."""
        if not self.log:
            return round_values(self.low, self.high)
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        step = 1 + (last - first) // 8
        powers = [10.0**power for power in range(first, last + 1, step)]
        return powers if len(powers) > 1 else [self.low, self.high]


def _panel(
    panel: Panel, x_axis: _Axis, x_ticks: Sequence[float], place: tuple[float, float], right: int, theme: Theme
) -> list[str]:
    top, bottom = place
    ys = [y for line in (*panel.lines.values(), *panel.background) for _, y in line] + list(panel.levels.values())
    ys += [y for bars in panel.spreads.values() for _, *ends in bars for y in ends]
    low, high = panel.y_range or _with_margin(min(ys), max(ys), panel.log_y)
    y_axis = _Axis(low, high, bottom, top, log=panel.log_y)
    parts = []
    for tick in y_axis.ticks():
        y = y_axis(tick)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{theme.grid}"/>')
        parts.append(_text(LEFT - 8, y + 4, panel.y_format(tick), anchor="end", fill=theme.soft))
    for tick in x_ticks:
        x = x_axis(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{bottom + 4:.1f}" stroke="{theme.soft}"/>')
    parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{bottom:.1f}" y2="{bottom:.1f}" stroke="{theme.soft}"/>')
    middle = (top + bottom) / 2
    parts.append(
        f'<text x="20" y="{middle:.1f}" text-anchor="middle" fill="{theme.ink}" '
        f'transform="rotate(-90 20 {middle:.1f})">{escape(panel.y_label)}</text>'
    )
    for name, level in panel.levels.items():
        y = y_axis(level)
        parts.append(
            f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{theme.ink}" stroke-dasharray="5 4"/>'
        )
        parts.append(_text(LEFT + 6, y - 5, f"{name} {panel.y_format(level)}", fill=theme.ink))
    parts += [_polyline(points, x_axis, y_axis, theme.grey, 1.0) for points in panel.background]
    ends: list[tuple[float, float, str, str]] = []  # lines that end at one height are named from left to right
    for number, (name, points) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(_polyline(points, x_axis, y_axis, colour, 2.0))
        if panel.markers:
            parts += [f'<circle cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        parts += [_bar(*bar, x_axis, y_axis, colour) for bar in panel.spreads.get(name, ())]
        x, y = max(points, key=lambda point: x_axis(point[0]))
        ends.append((y_axis(y), x_axis(x), name, colour))
    return parts + _end_labels(ends, bottom, right)


def _end_labels(ends: Sequence[tuple[float, float, str, str]], bottom: float, right: int) -> list[str]:
    """Names at the right, each as close to the end of its line as the other names allow."""
    ordered = sorted(end for end in ends if end[2])
    places = [end[0] for end in ordered]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + LABEL_STEP)
    if places and places[-1] > bottom:  # push back up from the bottom
        places[-1] = bottom
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - LABEL_STEP)
    parts = []
    for (_, _, name, colour), place in zip(ordered, places, strict=True):
        parts.append(
            f'<line x1="{right + 8}" x2="{right + 20}" y1="{place:.1f}" y2="{place:.1f}" stroke="{colour}" '
            f'stroke-width="2"/>'
        )
        parts.append(_text(right + 26, place + 4, name, fill=colour))
    return parts


def _polyline(points: Points, x_axis: _Axis, y_axis: _Axis, colour: str, width: float) -> str:
    path = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'


def _bar(x: float, low: float, high: float, x_axis: _Axis, y_axis: _Axis, colour: str) -> str:
    """A vertical bar over a point, with ends."""
    at, bottom, top = x_axis(x), y_axis(low), y_axis(high)
    path = f"M{at - 4:.1f} {bottom:.1f}h8M{at - 4:.1f} {top:.1f}h8M{at:.1f} {bottom:.1f}V{top:.1f}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.2"/>'


def _text(x: float, y: float, text: str, fill: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'


def _with_margin(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return low, high * 1.3
    margin = 0.06 * (high - low or 1.0)
    return low - margin, high + margin


def round_values(low: float, high: float) -> list[float]:
    """Five to ten round values between two numbers."""
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [step * k for k in range(first, math.floor(high / step + 1e-9) + 1)]
