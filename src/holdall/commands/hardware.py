"""The command `holdall hardware`: the measurement of this machine with its progress, and the file that remembers it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdall.common.errors import ConfigError
from holdall.planning.machine.check_rates import rates_are_off
from holdall.planning.machine.hardware import Hardware, default_path, device_kind
from holdall.planning.machine.measure import Note, time_limit
from holdall.planning.plan import Plan


def measure_machine(device: str = "auto", disk: Path = Path("."), *, quick: bool = False) -> Hardware:
    """Rates of this machine, with progress on stderr."""
    from holdall.planning.machine import measure

    with _progress(time_limit(device_kind(device), quick=quick)) as note:
        return measure.hardware(device, folder=disk, quick=quick, note=note)


@contextmanager
def _progress(limit: float) -> Iterator[Note]:
    """Function that prints each stage with the seconds gone by: one line on a terminal, one for each elsewhere."""
    started, on_terminal = time.monotonic(), sys.stderr.isatty()

    def note(stage: str) -> None:
        line = f"measuring {stage}: {time.monotonic() - started:.0f} s of at most {limit:.0f} s"
        print(f"\r{line}\033[K" if on_terminal else line, end="" if on_terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield note
    finally:
        if on_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def load_or_measure(given: Path | None) -> Hardware:
    """The rates in a file, or this machine's own: measured now and remembered if they never were, else checked."""
    if given is not None:
        return Hardware.load(given)
    path = default_path()
    if path.exists():
        remembered = Hardware.load(path)
        if (off := rates_are_off(remembered)) is not None:
            print(off, file=sys.stderr)
        return remembered
    print(
        f"this machine was not measured yet: its rates are measured now, once, and remembered in {path}; "
        f"`holdall hardware` measures them anew, and without the file they are forgotten",
        file=sys.stderr,
    )
    measured = measure_machine()
    save_rates(measured, path)
    return measured


def save_rates(measured: Hardware, path: Path) -> None:
    """Write rates to a file; a ConfigError names it where it cannot be written."""
    try:
        measured.save(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): name another file with --out") from None


def check_plan_rates(plan: Path) -> str | None:
    """A sentence on this machine's remembered rates if `plan` was made with them and they are off now; None if not."""
    path = default_path()
    made = Plan.load(plan)
    if made.forecast is None or not path.exists():
        return None
    rates = Hardware.load(path)
    return rates_are_off(rates) if made.forecast.hardware == rates.machine.get("id") else None
