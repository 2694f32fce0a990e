"""Report of `compress`: tables that were replaced, and tables that were left alone with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table as RichTable

from holdall.common.sizes import readable_bytes
from holdall.common.summary import Summarised, Summary
from holdall.tables import Method
from holdall.tables.describe import describe_method


@dataclass(frozen=True)
class CompressedTable:
    """Table that was replaced: one line of a compression report."""

    name: str
    rows: int
    dim: int
    method: Method
    bytes_before: int
    bytes_after: int
    error: float | None
    """Relative error of the fitted rows, each counted as often as it is looked up if that is known; None when the table
    starts afresh."""
    other_names: tuple[str, ...] = ()
    """Other places of the same module, which have the same new table."""


@dataclass(frozen=True)
class LeftTable:
    """Table that was left alone: one line of a compression report."""

    name: str
    rows: int
    dim: int
    num_bytes: int
    reason: str
    counted: bool
    """Whether the budget counts it: False for tables that are excluded or that cannot be compressed."""
    other_names: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class CompressionReport(Summarised):
    """Report of `compress`: `print` shows every table, `repr` the largest."""

    tables: list[CompressedTable] = field(default_factory=list)
    left_alone: list[LeftTable] = field(default_factory=list)
    choice: str | None = None
    """Line on what `auto` took for fitted rows, with the errors of all candidates; None where it did not choose."""

    @property
    def bytes_before(self) -> int:
        """Bytes that the tables which the budget counts took before, each module once."""
        return sum(line.bytes_before for line in self.tables) + self._counted_left

    @property
    def bytes_after(self) -> int:
        """Bytes that the tables which the budget counts take now: the replaced ones, and those that stayed dense."""
        return sum(line.bytes_after for line in self.tables) + self._counted_left

    @property
    def _counted_left(self) -> int:
        return sum(line.num_bytes for line in self.left_alone if line.counted)

    def _summary(self) -> Summary:
        sizes = f"{readable_bytes(self.bytes_before)} -> {readable_bytes(self.bytes_after)}"
        title = f"CompressionReport: {len(self.tables)} tables compressed, {len(self.left_alone)} left alone, {sizes}"
        largest = sorted(self.tables, key=lambda line: -line.bytes_before)
        rows = [
            (
                line.name,
                describe_method(line.method, line.rows),
                line.rows,
                readable_bytes(line.bytes_after),
                line.error,
            )
            for line in largest
        ]
        return Summary(title, ("table", "method", "rows", "bytes", "error"), rows, text_columns=2)

    def __str__(self) -> str:
        parts = []
        if self.tables:
            parts.append(_printed(self._compressed_lines()))
        if self.left_alone:
            parts.append(_printed(self._left_lines()))
        counted = len(self.tables) + sum(line.counted for line in self.left_alone)
        ratio = self.bytes_before / max(self.bytes_after, 1)
        total = f"{readable_bytes(self.bytes_before)} -> {readable_bytes(self.bytes_after)} ({ratio:,.1f} times less)"
        parts.append(f"{len(self.tables)} of {counted} tables compressed: {total}")
        if self.choice is not None:
            parts.append(self.choice)
        if uncounted := [line for line in self.left_alone if not line.counted]:
            size = readable_bytes(sum(line.num_bytes for line in uncounted))
            tables = "1 table" if len(uncounted) == 1 else f"{len(uncounted)} tables"
            parts.append(f"not counted, because left out or not compressible: {tables}, {size}")
        return "\n".join(parts)

    def _compressed_lines(self) -> RichTable:
        shown = _columns("compressed", "method", "rows", "dim", "before", "after", "error", text=2)
        for line in self.tables:
            error = "" if line.error is None else f"{line.error:.4f}"
            sizes = (readable_bytes(line.bytes_before), readable_bytes(line.bytes_after))
            method = describe_method(line.method, line.rows)
            shown.add_row(_names(line.name, line.other_names), method, f"{line.rows:,}", str(line.dim), *sizes, error)
        return shown

    def _left_lines(self) -> RichTable:
        shown = _columns("left alone", "because", "rows", "dim", "bytes", text=2)
        for line in self.left_alone:
            size = readable_bytes(line.num_bytes)
            names = _names(line.name, line.other_names)
            shown.add_row(names, line.reason, f"{line.rows:,}", str(line.dim), size)
        return shown


def _columns(*names: str, text: int) -> RichTable:
    shown = RichTable(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(names):
        shown.add_column(name, justify="left" if i < text else "right")
    return shown


def _names(name: str, others: tuple[str, ...]) -> str:
    return name + "".join(f"\n= {other}" for other in others)


def _printed(shown: RichTable) -> str:
    console = Console(width=140, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n")) + "\n"
