"""Summary of a training run on the console: the kept model and the last one, times, and the bytes of every table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from holdall.common.console import make_console, table
from holdall.common.sizes import readable_bytes

DENSE = "Dense()"


def show_training(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what a run did: its result is that of the kept model."""
    console = console or make_console()
    console.print(_title(result), style="bold")
    for line in notes(result):
        console.print(line)
    _show_metrics(result, console)
    show_tables(result["tables"], console)


def _title(result: Mapping[str, Any]) -> str:
    if not result["trained_steps"]:
        ended = "stopped early" if result["stopped_early"] else "finished"
        return f"the run had {ended} at step {result['steps']:,}, and nothing was trained: raise --epochs or --steps"
    seconds = ", ".join(f"{result[f'{name}_seconds']:.1f} s of {name}" for name in ("training", "evaluation", "saving"))
    threads = f", {result['threads']} thread{'s' * (result['threads'] > 1)}" if "threads" in result else ""
    return (
        f"trained {result['steps']:,} steps, {result['samples']:,} samples, at {result['samples_per_second']:,.0f} "
        f"samples/s ({seconds}{threads})"
    )


def notes(result: Mapping[str, Any]) -> list[str]:
    """Sentences about the kept model: why it is not the last one, and whether the run stopped early."""
    found = []
    kept, last = result["kept_step"], result["last_step"]
    if result.get("stopped_by"):
        found.append(f"stopped by a callback at step {result['steps']:,}: {result['stopped_by']}")
    if result["stopped_early"] and result["trained_steps"]:
        found.append(f"stopped early: no better {result['best_by']} on the validation split since step {kept or 0:,}")
    if kept is not None and kept != last:
        name = result["best_by"]
        before, after = result["valid"][name], result["last_valid"][name]
        found.append(
            f"kept the model of step {kept:,}, the best on the validation split: {name} was {before:.5g} there and is "
            f"{after:.5g} at step {last:,}, so training on overfits (--no-keep-best keeps the last one)"
        )
    return found


def _show_metrics(result: Mapping[str, Any], console: Console) -> None:
    valid, last = result["valid"], result["last_valid"]
    if not valid:
        return
    differ = result["kept_step"] != result["last_step"]
    last_head = f"step {result['last_step']:,}"
    heads = [f"kept, step {result['kept_step']:,}", f"last, {last_head}"] if differ else [last_head]
    shown = table("metric", *heads)
    for name, value in valid.items():
        values = [value, last.get(name)] if differ else [value]
        shown.add_row(name, *("" if v is None else f"{v:,}" if isinstance(v, int) else f"{v:.6g}" for v in values))
    console.print(shown)


def show_tables(sizes: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print method, bytes and compression of every table; one line if all are dense."""
    stored, dense = (sum(size[kind] for size in sizes.values()) for kind in ("bytes", "dense_bytes"))
    if all(size["stored_as"] == DENSE for size in sizes.values()):
        console.print(f"tables: {len(sizes)}, all dense, {readable_bytes(stored)}")
        return
    shown = table("table", "rows", "stored as", "bytes", "of dense")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]["dense_bytes"]):
        shown.add_row(name, f"{size['rows']:,}", size["stored_as"], readable_bytes(size["bytes"]), _share(**size))
    shown.add_row("all", "", "", readable_bytes(stored), _share(bytes=stored, dense_bytes=dense))
    console.print(shown)


def _share(*, bytes: int, dense_bytes: int, **_: Any) -> str:
    return "1" if bytes >= dense_bytes else f"1/{dense_bytes / max(bytes, 1):.3g}"
