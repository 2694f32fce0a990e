"""Run cards: what a benchmark measured, with everything needed to measure it again.

A card is `benchmarks/results/<name>.json`: name, command, date, commit, hardware, versions, results, notes, always in
this order. Host names, user names and absolute paths are replaced before it is written.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table

from holdall.common.environment import environment
from holdall.common.files import write_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# A slash at the start of a word, then two names or more. "samples/s", "1 / 2" and "https://x/y" are not paths.
_ABSOLUTE_PATH = re.compile(r"(?<![\w.~:/$)\]])(?:/[\w.@+-]+){2,}/?")


def write_card(name: str, results: dict[str, Any], notes: str = "", command: str | None = None) -> Path:
    """Write the run card `name` and return its path.

    `results` holds plain numbers, strings, lists and dicts (numpy and torch scalars are converted); `command` is
    worked out from how this process was started unless given. On a lent machine, whose files are a copy, the commit
    they are of is what the variable HOLDALL_COMMIT says.
    """
    surroundings = environment()
    if commit := os.environ.get("HOLDALL_COMMIT"):
        surroundings |= {"commit": commit, "dirty": False}
    card = {
        "name": name,
        "command": command or _command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": surroundings["commit"],
        "dirty": surroundings["dirty"],
        "hardware": surroundings["hardware"],
        "versions": surroundings["versions"],
        "results": results,
        "notes": notes,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_json(path, _plain(card))
    return path


def alternate(sides: Mapping[str, Callable[[], None]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of every side, `repeats` times each, taken in turn so that a slow spell of the machine meets all.

    Every other round goes through the sides backwards, so that none always runs behind the same neighbour. On a GPU
    the device is idle before the clock starts and before it stops.
    """
    assert repeats > 0
    assert sides
    for _ in range(warmup):
        for run in sides.values():
            run()
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in list(sides) if repeat % 2 == 0 else reversed(list(sides)):
            _wait_for_device()
            start = time.perf_counter()
            sides[side]()
            _wait_for_device()
            times[side].append(time.perf_counter() - start)
    return times


class OtherWork:
    """Context that measures how busy other processes keep the machine: a result is worth what this says.

    with OtherWork() as others: ...
    others.share            # of the CPU time of all cores; None where the system does not tell
    """

    share: float | None = None

    def __enter__(self) -> OtherWork:
        self._before = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None and (after := self._read()) is not None:
            total, busy, own = (new - old for new, old in zip(after, self._before, strict=True))
            self.share = max(0.0, busy - own) / max(total, 1e-9)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds of all cores, those that were not idle, and those of this process and its children that ended."""
        try:
            ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        total = sum(ticks) / os.sysconf("SC_CLK_TCK")
        return total, total - (ticks[3] + ticks[4]) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def summary(times: Sequence[float]) -> dict[str, float]:
    """`{"p20", "p50", "p80", "repeats"}` of some measurements, in their unit."""
    p20, p50, p80 = numpy.percentile(numpy.asarray(times, dtype=numpy.float64), [20, 50, 80])
    return {"p20": float(p20), "p50": float(p50), "p80": float(p80), "repeats": len(times)}


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table for people; columns in the order in which rows first name them."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=title, title_justify="left")
    for column in columns:
        numeric = any(isinstance(row.get(column), int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _command() -> str:
    """`python -m benchmarks.x arguments`, as this process was started."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec is not None else f"benchmarks.{Path(sys.argv[0]).stem}"
    return shlex.join(["python", "-m", module.removesuffix(".__main__"), *sys.argv[1:]])


def _plain(value: Any) -> Any:
    """The value as JSON can hold it, without anything that tells whose machine it was."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        return _plain(value.tolist())
    if isinstance(value, str | Path):
        return _anonymous(str(value))
    return value


def _anonymous(text: str) -> str:
    text = text.replace(str(ROOT), ".")
    text = _ABSOLUTE_PATH.sub(lambda match: Path(match.group()).name, text)
    host = platform.node()
    if len(host) > 3 and host != "localhost":
        text = re.sub(rf"\b{re.escape(host)}\b", "host", text)
    return text
