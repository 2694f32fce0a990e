"""Tables of metrics and stage times on the console."""

from __future__ import annotations

from typing import Any

from holdall.common.console import make_console, table


def show_metrics(title: str, metrics: dict[str, Any] | None) -> None:
    """Print a title and the numbers among `metrics`."""
    console = make_console()
    console.print(title, style="bold")
    if metrics:
        shown = table("metric", "value")
        for name, value in metrics.items():
            if isinstance(value, int | float):
                shown.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.6g}")
        console.print(shown)


def show_stages(stages: list[dict[str, Any]]) -> None:
    """Print predicted and measured milliseconds of each stage of a step."""
    shown = table("stage", "predicted ms", "measured ms")
    for row in stages:
        values = ["" if row[name] is None else f"{row[name] * 1e3:.3f}" for name in ("predicted", "measured")]
        shown.add_row(row["stage"], *values)
    make_console().print(shown)
