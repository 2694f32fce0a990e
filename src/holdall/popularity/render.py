"""Tables of a profile on the terminal."""

from __future__ import annotations

import numpy as np
from rich.console import Console

from holdall.common.console import make_console, styled, table
from holdall.common.sizes import readable_bytes
from holdall.popularity.profile import FeatureProfile, Profile
from holdall.popularity.thresholds import hot_bytes

SHARES = (0.5, 0.9, 0.99)


def show(profile: Profile, dim: int = 16, console: Console | None = None) -> None:
    """Print a profile; `dim` is the width of a float32 row, for the bytes of hot rows."""
    console = console or make_console()
    source = profile.source
    console.print(styled("popularity", "bold"), f"of {source.name}, split {source.split}: {how_counted(profile)}")
    prepared = source.kind == "prepared"
    heads = ["distinct", "once", *(f"for {share:.0%}" for share in SHARES), "moved", "LRU 1%"]
    shown = table("feature", *(["rows"] if prepared else []), *heads)
    shown.columns[0].no_wrap = True
    for feature in profile.features:
        shown.add_row(
            feature.name,
            *([f"{feature.num_rows:,}"] if prepared else []),
            f"{feature.distinct:,}",
            f"{feature.singletons:,}",
            *(_rows_for(profile, feature, share) for share in SHARES),
            "-" if feature.drift is None else f"{feature.drift.lost:.1%}",
            "-" if feature.lru is None else f"{profile.miss_ratio(feature.name, max(1, feature.distinct / 100)):.1%}",
        )
    console.print(shown)
    console.print(_legend(profile), style="dim")
    sizes = hot_bytes({name: np.array(rows) for name, rows in profile.hot.rows.items()}, dim * 4)
    inputs = table("hot from, lookups an input", "hot rows", f"bytes at dim {dim}", "fully hot inputs")
    for place in _decades(profile):
        share = f"{profile.hot.inputs[place]:.2%}"
        if profile.hot.high[place] > profile.hot.low[place]:
            share += f" ({profile.hot.low[place]:.2%} to {profile.hot.high[place]:.2%})"
        inputs.add_row(
            f"{profile.hot.threshold[place]:.3g}",
            f"{sum(rows[place] for rows in profile.hot.rows.values()):,}",
            readable_bytes(int(sizes[place])),
            share,
        )
    console.print(inputs)


def _rows_for(profile: Profile, feature: FeatureProfile, share: float) -> str:
    if feature.coverage.share[-1] < share:  # a sample does not know the ids that it does not have
        return f"> {feature.coverage.k[-1]:,}"
    return f"{profile.rows_for_coverage(feature.name, share):,}"


def how_counted(profile: Profile) -> str:
    """The rows a profile was counted from, and whether they are a sample."""
    if profile.sample is not None:
        return f"{profile.rows_read:,} rows, a sample of {profile.sample.share:.3g}"
    return f"{profile.rows_read:,} rows" + ("" if profile.method == "exact" else ", counted as a stream")


def _legend(profile: Profile) -> str:
    parts = ["once: ids looked up once", "for 90%: most popular ids that take 90% of the lookups"]
    if profile.order == "time":
        parts.append(f"moved: hot lookups that the hot set of the window before misses, over {profile.windows} windows")
    else:
        parts.append("moved: not measured, since the rows of this set are in no order of time")
    if profile.sample is not None:
        parts.append("LRU 1%: not measured on a sample; ranges are 95% intervals")
    else:
        parts.append("LRU 1%: misses of a cache of 1% of the distinct ids")
    return "; ".join(parts)


def _decades(profile: Profile) -> list[int]:
    """Places of the thresholds to print: one a decade, two of the last decade, and the last."""
    last = len(profile.hot.threshold) - 1
    return sorted({*range(0, last + 1, 4), max(0, last - 2), last})
