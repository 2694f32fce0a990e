"""Short displays of objects, in a shell and in a notebook: a title and a few rows, never all of them.

A class derives from `Summarised`, and its `_summary` reads nothing but what is in memory already.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MAX_ROWS = 12
"""Rows that are shown; with title and heads they fit a terminal of 24 lines."""
MAX_WIDTH = 40
"""Characters of a value that are shown, unless a summary says otherwise."""


@dataclass(frozen=True)
class Summary:
    """Title, heads and rows of a display. The first `text_columns` are text, the others numbers."""

    title: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    text_columns: int = 1
    width: int = MAX_WIDTH

    def lines(self) -> tuple[list[list[str]], str]:
        """Heads and rows that are shown, and a sentence about the others."""
        found = [[_cell(value, self.width) for value in row] for row in (self.heads, *self.rows[:MAX_ROWS]) if row]
        left = len(self.rows) - MAX_ROWS
        return found, f"... and {left:,} more" if left > 0 else ""

    def text(self) -> str:
        lines, more = self.lines()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(
                cell.ljust(width) if place < self.text_columns else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([_cell(self.title, 200), *shown, *([more] if more else [])])

    def html(self) -> str:
        lines, more = self.lines()
        rows = "".join(
            f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in line)}</tr>"
            for tag, line in zip(["th", *["td"] * len(lines)], lines, strict=False)
        )
        table = f"<table>{rows}</table>" if rows else ""
        return f"<div><b>{escape(_cell(self.title, 200))}</b>{table}{escape(more)}</div>"


class Summarised:
    """Base of classes that are shown by their summary."""

    @abstractmethod
    def _summary(self) -> Summary: ...

    def __repr__(self) -> str:
        return self._summary().text()

    def _repr_html_(self) -> str:
        return self._summary().html()


def _cell(value: object, width: int) -> str:
    """A value on one line, without control characters, cut to a width."""
    if isinstance(value, bool) or value is None:
        text = "-" if value is None else str(value).lower()
    elif isinstance(value, int):
        text = f"{value:,}"
    elif isinstance(value, float):
        text = f"{value:.4g}"
    else:
        text = str(value)
    text = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)
    return text if len(text) <= width else f"{text[: width - 3]}..."
