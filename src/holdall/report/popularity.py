"""Figures of a popularity profile, as SVG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdall.common.sizes import readable_bytes
from holdall.popularity.profile import FeatureProfile, Profile
from holdall.popularity.render import how_counted
from holdall.popularity.thresholds import hot_bytes
from holdall.report.svg import Panel, chart

NAMED = 8
"""Most lines of the coverage figure with a name and a colour: more cannot be distinguished."""


def figures(profile: Profile, folder: Path, dim: int = 16) -> list[Path]:
    """Write `coverage.svg`, `thresholds.svg` and `hot-bytes.svg` into a folder."""
    sizes = hot_bytes({name: np.array(rows) for name, rows in profile.hot.rows.items()}, dim * 4).tolist()
    made = [folder / "coverage.svg", folder / "thresholds.svg", folder / "hot-bytes.svg"]
    _coverage(profile, made[0])
    hot, how = profile.hot, how_counted(profile)
    inputs = list(zip(hot.threshold, hot.inputs, strict=True))
    filled = [(threshold, size) for threshold, size in zip(hot.threshold, sizes, strict=True) if size]
    chart(
        made[1],
        [
            Panel(lines={"": inputs}, y_label="fully hot inputs", y_format=percent, y_range=(0.0, 1.0)),
            Panel(
                lines={"": filled}, y_label=f"hot rows, bytes at dim {dim}", y_format=readable_bytes_short, log_y=True
            ),
        ],
        title="A lower threshold makes more inputs fully hot, and takes more bytes",
        subtitle=f"{profile.source.name}, {how}",
        x_label="a row is hot from this many lookups an input on",
        x_format=power_of_ten,
        height=520,
        falling_x=True,
    )  # fmt: skip
    by_bytes = [(float(size), share) for size, share in zip(sizes, hot.inputs, strict=True) if size]
    chart(
        made[2],
        [Panel(lines={"": by_bytes}, y_label="fully hot inputs", y_format=percent, y_range=(0.0, 1.0), markers=True)],
        title="Inputs that touch hot rows alone",
        subtitle=f"{profile.source.name}, {how}, one threshold for all tables",
        x_label=f"bytes of hot rows over all tables (float32, dim {dim})",
        x_format=readable_bytes_short,
    )
    return made


def _coverage(profile: Profile, path: Path) -> None:
    largest = sorted(profile.features, key=lambda feature: -feature.distinct)
    named, others = largest[:NAMED], largest[NAMED:]
    note = f"; the {len(others)} features with fewer ids in grey" if others else ""
    chart(
        path,
        [
            Panel(
                lines={_name(profile, feature): _points(feature) for feature in named},
                background=[_points(feature) for feature in others],
                y_label="share of the feature's lookups",
                y_format=percent,
                y_range=(0.0, 1.0),
            )
        ],
        title="Lookups that the most popular rows take",
        subtitle=f"{profile.source.name}, {how_counted(profile)}{note}",
        x_label="most popular rows (k)",
        x_format=short_count,
    )


def _points(feature: FeatureProfile) -> list[tuple[float, float]]:
    """Points of the coverage curve, up to the one that reaches all lookups."""
    points = list(zip(map(float, feature.coverage.k), feature.coverage.share, strict=True))
    full = next((place for place, (_, share) in enumerate(points) if share >= 0.99999), len(points))
    return points[: full + 1]


def _name(profile: Profile, feature: FeatureProfile) -> str:
    if feature.coverage.share[-1] < 0.9:
        return feature.name
    return f"{feature.name}: 90% by {short_count(float(f'{profile.rows_for_coverage(feature.name, 0.9):.2g}'))}"


def percent(share: float) -> str:
    return f"{share:.0%}"


def short_count(number: float) -> str:
    """10,000 -> `10K`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


def readable_bytes_short(size: float) -> str:
    """1,000,000 -> `1 MB`."""
    return readable_bytes(round(size)).replace(".0 ", " ")


def power_of_ten(number: float) -> str:
    """0.001 as 1 in 1,000."""
    return f"1/{round(1 / number):,}"
