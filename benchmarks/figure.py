"""Line charts as small SVG files that show in a README: no library, no script inside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 820, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 44, 56
COLOURS = (
    "#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6",
    "#dd4477", "#66aa00", "#b82e2e", "#316395", "#994499", "#22aa99",
)  # fmt: skip


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
    levels = levels or {}
    xs = sorted({x for points in lines.values() for x, _ in points})
    ys = [y for points in lines.values() for _, y in points] + list(levels.values())
    low, high = min(ys), max(ys)
    margin = 0.06 * (high - low or 1.0)
    low, high = low - margin, high + margin

    def x_at(x: float) -> float:
        span = math.log(xs[-1] / xs[0]) or 1.0
        return LEFT + 20 + math.log(x / xs[0]) / span * (WIDTH - LEFT - RIGHT - 40)

    def y_at(y: float) -> float:
        return TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="600">{escape(title)}</text>',
    ]
    for tick in _ticks(low, high):
        y = y_at(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tick:.3f}</text>')
    for x in xs:
        label = f"1/{1 / x:.0f}" if x < 1 else "1"
        parts.append(
            f'<text x="{x_at(x):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" fill="#555">{label}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="18" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 18 {(TOP + HEIGHT - BOTTOM) / 2})">{escape(y_label)}</text>'
    )
    for name, level in levels.items():
        y = y_at(level)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#333" stroke-dasharray="5 4"/>'
        )
        parts.append(f'<text x="{LEFT + 6}" y="{y - 5:.1f}" fill="#333">{escape(name)} {level:.4f}</text>')
    ordered = sorted(lines.items(), key=lambda item: -max(y for _, y in item[1]))
    for i, (name, points) in enumerate(ordered):
        colour = COLOURS[i % len(COLOURS)]
        way = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        y = TOP + 14 + 20 * i
        parts.append(f'<rect x="{WIDTH - RIGHT + 16}" y="{y - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 36}" y="{y - 3}">{escape(name)}</text>')
    parts.append("</svg>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _ticks(low: float, high: float) -> list[float]:
    """Five to ten round values between two numbers."""
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step)
    return [step * k for k in range(first, math.floor(high / step) + 1)]
