"""Progress display of long work: a bar on a terminal or in a notebook with ipywidgets, plain lines elsewhere."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


def shows_bar(console: Console) -> bool:
    """Whether a bar can be drawn again and again in its place; without ipywidgets a notebook would get a line each."""
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


class SampleProgress:
    """Samples done of `total`, samples/s, loss and time left, on stderr.

    A bar where `shows_bar`; elsewhere a plain line every `seconds`. The rate is that of the last few updates on the
    bar, and that since the line before elsewhere. Use as a context manager.
    """

    def __init__(self, total: int, *, done: int = 0, label: str = "train", seconds: float = 10.0, quiet: bool = False):
        self.total, self.done, self.label, self.seconds = total, done, label, seconds
        self._loss = ""
        self._line_done, self._line_time = done, monotonic()
        self._plain = not quiet
        self._bar: RichProgress | None = None
        console = Console(stderr=True)
        if shows_bar(console) and not quiet:
            self._plain = False
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                TextColumn("{task.fields[rate]}"),
                TextColumn("{task.fields[loss]}"),
                TimeRemainingColumn(),
            )
            self._bar = RichProgress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(label, total=total, completed=done, rate="", loss="")

    def update(self, samples: int, loss: float | None = None) -> None:
        """Count `samples` more as done, and show `loss` if given."""
        self.done += samples
        if loss is not None:
            self._loss = f"loss {loss:.4f}"
        if self._bar is not None:
            speed = self._bar.tasks[self._task].speed
            rate = f"{speed:,.0f} samples/s" if speed else ""
            self._bar.update(self._task, completed=self.done, rate=rate, loss=self._loss)
        elif self._plain and monotonic() - self._line_time >= self.seconds:
            self._print_line()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._plain:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose seconds do not count in the rate of the plain lines."""
        started = monotonic()
        try:
            yield
        finally:
            self._line_time += monotonic() - started

    def _print_line(self) -> None:
        now = monotonic()
        rate = (self.done - self._line_done) / max(now - self._line_time, 1e-9)
        left = f"{datetime.timedelta(seconds=round((self.total - self.done) / rate))} left" if rate > 0 else ""
        parts = [f"{self.label} {self.done:,}/{self.total:,}", f"{rate:,.0f} samples/s", self._loss, left]
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)
        self._line_done, self._line_time = self.done, now

    def __enter__(self) -> SampleProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
