"""Handling of rows that cannot be read: stop at the first, or leave them out and list them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, TextIO

from holdall.common.errors import DataError
from holdall.common.files import PARTIAL
from holdall.data.rows import Refused

BAD_ROWS_FILE = "bad_rows.tsv"
HEADER = "file\tline\treason\tcontent\n"
TAB = "\t"


def escaped(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r")


class BadRows:
    """Collector of refused rows: raises a DataError at the first, or appends each to `path` and counts it.

    A line of the list has the file, line number, reason and raw line, tab-separated; the raw line is last, since it may
    contain tabs. The file exists only when there are bad rows. Memory does not grow with them.
    """

    def __init__(self, path: Path, mode: Literal["stop", "skip"]):
        self.path = path
        self.mode = mode
        self.count = 0
        self._file: TextIO | None = None

    def add(self, source: Path, refused: Sequence[Refused]) -> None:
        """Raise for the first refused row of a file in mode `stop`, else list and count all of them."""
        if not refused:
            return
        if self.mode == "stop":
            raise DataError(
                f"{source}, line {refused[0].line}: {refused[0].reason} (correct it, or leave such rows out with "
                f"--bad-rows skip, which lists them in {self.path.name.removesuffix(PARTIAL)})"
            )
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8")
            self._file.write(HEADER)
        for row in refused:
            self._file.write(f"{source}\t{row.line}\t{escaped(row.reason).replace(TAB, ' ')}\t{escaped(row.raw)}\n")
        self.count += sum(row.num_rows for row in refused)

    def __enter__(self) -> BadRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
