"""Figures of the comparison of table methods: test AUC against bytes, one for each set, light and dark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.card import ROOT
from benchmarks.methods_release import POLISHED, PRECISION
from benchmarks.methods_sides import AUTO, COUNTED, DENSE, FOLDING
from holdall.report.svg import DARK, LIGHT, Panel, chart

IMAGES = ROOT / "docs" / "images"
TITLES = {
    "criteo": "Criteo sample",
    "planted": "planted clicks",
    "bookcrossing": "Book-Crossing",
    "avazu": "Avazu sample",
    "taobao": "Taobao sample",
}
FORMS = {
    PRECISION: "precision, after training",
    POLISHED: "polished, after training",
    "clustered": "clustered, after training",
    FOLDING: "folding, after training",
}
SIDES = {COUNTED: "auto with counts", FOLDING: "folding", AUTO: "auto without counts"}
DEPTH = 0.04
"""AUC below dense that a figure shows."""
TICKS = (1 / 4, 1 / 20, 1 / 50, 1 / 100, 1 / 300, 1 / 1000)

Row = Mapping[str, Any]


def draw(card: Path) -> None:
    """Draw the figures of a card."""
    results = json.loads(card.read_text(encoding="utf-8"))["results"]
    for name in results["samples"]:
        from_start = [row for row in results["from_start"] if row["set"] == name]
        released = [row for row in results["released"] if row["set"] == name]
        dense = [row for row in from_start if row["side"] == DENSE]
        if dense and released:
            panel = _panel(from_start, released, dense[0]["auc"])
            title = f"Test AUC at equal bytes: {TITLES[name]}"
            about = (
                f"mean, least and greatest of {dense[0]['seeds']} seeds; grey: other methods from the start; down to "
                f"{DEPTH:.2f} below dense"
            )
            for theme, suffix in ((LIGHT, "light"), (DARK, "dark")):
                chart(
                    IMAGES / f"methods-{name}-{suffix}.svg",
                    [panel],
                    title=title,
                    subtitle=about,
                    x_label="share of the dense bytes",
                    x_format=share,
                    x_ticks=TICKS,
                    falling_x=True,
                    theme=theme,
                )


def _panel(from_start: Sequence[Row], released: Sequence[Row], dense: float) -> Panel:
    rows: dict[str, list[Row]] = {}
    for kind, labels, found in (("form", FORMS, released), ("side", SIDES, from_start)):
        for key, label in labels.items():
            shown = [row for row in found if row[kind] == key and row["auc_low"] >= dense - DEPTH]
            if shown:
                rows[label] = sorted(shown, key=lambda row: -row["share"])
    low = min(row["auc_low"] for of_line in rows.values() for row in of_line)
    high = max(row["auc_high"] for of_line in rows.values() for row in of_line)
    others: dict[str, list[tuple[float, float]]] = {}
    for row in from_start:
        if row["side"] not in SIDES and row["side"] != DENSE and row["auc"] >= low:
            others.setdefault(row["side"], []).append((row["share"], row["auc"]))
            high = max(high, row["auc"])
    margin = 0.05 * (high - low)
    return Panel(
        lines={label: [(row["share"], row["auc"]) for row in of_line] for label, of_line in rows.items()},
        spreads={
            label: [(row["share"], row["auc_low"], row["auc_high"]) for row in of_line]
            for label, of_line in rows.items()
        },
        y_label="test AUC",
        y_format="{:.3f}".format,
        y_range=(low - margin, max(high, dense) + margin),
        levels={DENSE: dense},
        background=[sorted(points, reverse=True) for points in others.values()],
        markers=True,
    )


def share(x: float) -> str:
    """0.05 -> `1/20`."""
    return f"1/{1 / x:.0f}"
