"""Console and plain tables for the terminal. Names are printed as they are: brackets in them are no markup."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text


def make_console(*, soft_wrap: bool = False) -> Console:
    """Console on stdout that interprets nothing in what it prints; `styled` gives text a style."""
    return Console(markup=False, emoji=False, soft_wrap=soft_wrap)


def styled(text: str, style: str) -> Text:
    return Text(text, style=style)


def table(*columns: str) -> RichTable:
    """Table without lines; the first column is text, the others are numbers."""
    made = RichTable(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    return made
