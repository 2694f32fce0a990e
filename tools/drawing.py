"""Drawings of the documentation as SVG files, one for light pages and one for dark ones.

    python tools/drawing.py           write docs/images/data-flow-{light,dark}.svg

Text and shapes only: no font is embedded, no script, no link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
SANS = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

PALETTES = {
    "light": {
        "text": "#1f2328", "faint": "#59636e", "line": "#818b98", "box": "#f6f8fa", "edge": "#d1d9e0",
        "hot": "#e8590c", "cold": "#4c8dd6", "hot box": "#fff1e8", "cold box": "#ecf4fd",
    },
    "dark": {
        "text": "#f0f6fc", "faint": "#9198a1", "line": "#7d8590", "box": "#161b22", "edge": "#3d444d",
        "hot": "#ff922b", "cold": "#58a6ff", "hot box": "#2d1c10", "cold box": "#0f2238",
    },
}  # fmt: skip
"""Colours by theme, close to those of the pages that show the drawings."""


@dataclass
class Drawing:
    """An SVG file in the making, in the colours of one theme."""

    theme: str
    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)

    def colour(self, name: str) -> str:
        return PALETTES[self.theme][name]

    def text(
        self, x: float, y: float, words: str, *, size: float = 14, colour: str = "text", anchor: str = "start",
        bold: bool = False, mono: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{self.colour(colour)}" text-anchor="{anchor}"'
            f'{weight} font-family="{MONO if mono else SANS}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, *,
        fill: str = "box", edge: str = "edge", radius: float = 8,
    ) -> None:  # fmt: skip
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{self.colour(fill)}" stroke="{self.colour(edge)}"/>'
        )

    def path(self, points: str, *, colour: str = "line", fill: str | None = None, width: float = 1.5) -> None:
        inside = "none" if fill is None else self.colour(fill)
        self.shapes.append(
            f'<path d="{points}" fill="{inside}" stroke="{self.colour(colour)}" stroke-width="{width:g}" '
            f'stroke-linejoin="round"/>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through the points, horizontal or vertical at its end, with a head there."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        self.path("M" + " L".join(f"{a:g},{b:g}" for a, b in [*points[:-1], (x - 6 * dx, y - 6 * dy)]))
        left, right = (x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx)
        head = f"M{x:g},{y:g} L{left[0]:g},{left[1]:g} L{right[0]:g},{right[1]:g} Z"
        self.path(head, fill="line", width=1)

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                *self.shapes,
                "</svg>",
                "",
            ]
        )


def data_flow(theme: str) -> str:
    """From raw logs to a measured model: commands as arrows, artifacts as boxes; below, one table in its parts."""
    drawing = Drawing(theme, 920, 412, "Data flow: raw logs, data set folder, run folder, metrics")
    artifacts = [
        (10, 146, "raw logs", "TSV, CSV, Parquet"),
        (252, 176, "data set folder", "ids in popularity order"),
        (514, 152, "run folder", "checkpoints, curves"),
        (764, 146, "metrics", "AUC, logloss, HR@K"),
    ]
    for x, width, name, what in artifacts:
        drawing.box(x, 24, width, 62)
        drawing.text(x + width / 2, 50, name, size=15, anchor="middle", bold=True)
        drawing.text(x + width / 2, 71, what, size=12.5, colour="faint", anchor="middle")
    for start, stop, command in ((156, 252, "prepare"), (428, 514, "train"), (666, 764, "evaluate")):
        drawing.arrow((start + 4, 55), (stop - 4, 55))
        drawing.text((start + stop) / 2, 45, command, size=13, colour="hot", anchor="middle", mono=True)

    for x, width, name in ((160, 146, "popularity.json"), (419, 104, "plan.json"), (584, 132, "hardware.json")):
        drawing.box(x, 138, width, 34)
        drawing.text(x + width / 2, 160, name, size=13, anchor="middle", mono=True)
    drawing.box(800, 138, 110, 34)
    drawing.text(855, 160, "this machine", size=13.5, anchor="middle", bold=True)
    drawing.arrow((276, 90), (276, 134))
    drawing.text(268, 116, "profile", size=13, colour="hot", anchor="end", mono=True)
    drawing.arrow((310, 155), (415, 155))
    drawing.text(362, 146, "plan", size=13, colour="hot", anchor="middle", mono=True)
    drawing.arrow((580, 155), (527, 155))
    drawing.arrow((796, 155), (720, 155))
    drawing.text(758, 146, "hardware", size=13, colour="hot", anchor="middle", mono=True)
    drawing.arrow((471, 134), (471, 62))

    _one_table(drawing, top=204)
    return drawing.svg()


def _one_table(drawing: Drawing, top: float) -> None:
    """A table in popularity order: how often each id is looked up, and where its row may live."""
    left, right, cut = 24.0, 896.0, 232.0
    drawing.box(10, top, 900, 196)
    drawing.text(left, top + 25, "One embedding table, its ids in popularity order", size=14, bold=True)
    drawing.text(right, top + 25, "id 0 is the most frequent", size=12.5, colour="faint", anchor="end")
    base, height = top + 112.0, 72.0
    points = [(x, base - height * 30 / (30 + x - left)) for x in (left + 4 * k for k in range(219))]
    hot = [point for point in points if point[0] <= cut]
    tail = [hot[-1], *[point for point in points if point[0] > cut]]
    for part, colour in ((hot, "hot"), (tail, "cold")):
        line = " L".join(f"{x:g},{y:.1f}" for x, y in part)
        drawing.path(f"M{part[0][0]:g},{base:g} L{line} L{part[-1][0]:g},{base:g} Z", colour=colour, fill=colour)
    drawing.text(cut + 14, base - 34, "lookups per id", size=12.5, colour="faint")
    drawing.box(left, base + 8, cut - left - 4, 64, fill="hot box", edge="hot", radius=6)
    drawing.text(left + 12, base + 32, "hot rows", bold=True)
    drawing.text(left + 12, base + 54, "exact, on the device", size=12.5)
    drawing.box(cut + 4, base + 8, right - cut - 4, 64, fill="cold box", edge="cold", radius=6)
    drawing.text(cut + 16, base + 32, "tail", bold=True)
    places = "in host memory or on disk, fetched ahead of the step; or compressed; or sharded over processes"
    drawing.text(cut + 16, base + 54, places, size=12.5)


def write(name: str, draw: object) -> None:
    """Write `docs/images/<name>-<theme>.svg` for both themes."""
    assert callable(draw)
    IMAGES.mkdir(parents=True, exist_ok=True)
    for theme in PALETTES:
        (IMAGES / f"{name}-{theme}.svg").write_text(draw(theme), encoding="utf-8")


if __name__ == "__main__":
    write("data-flow", data_flow)
