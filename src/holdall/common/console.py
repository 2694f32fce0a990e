"""Plain tables for the terminal."""

from __future__ import annotations

from rich.table import Table as RichTable


def table(*columns: str) -> RichTable:
    """Table without lines; the first column is text, the others are numbers."""
    made = RichTable(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    return made
