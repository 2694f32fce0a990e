"""Text files of whole-number ids: columns of ids, lists of ids per line, and attributes per id.

Every line is read whole or refused with its number and the reason. The first kind is parsed by polars a block at a time
(MovieLens-25M); the others are small and parsed line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import DataError, did_you_mean
from holdall.data.blocks import TextBlock, read_blocks
from holdall.data.layout import MAX_VALUE_BYTES, TextFormat
from holdall.data.read_text import read_header, without_mark
from holdall.data.records import check_records
from holdall.data.rows import Refused, import_polars, too_long

Ints = npt.NDArray[np.int64]
STAND_IN = "\x1f"  # for separators of more than one character, which no CSV parser takes


def read_id_columns(
    path: Path, columns: Sequence[str], names: Sequence[str] = (), separator: str = "\t"
) -> Iterator[tuple[Ints, list[Refused]]]:
    """[R, C] values of the named columns, a block at a time, and the lines refused. Empty `names`: a header."""
    pl = import_polars()
    text = TextFormat(separator=separator if len(separator) == 1 else STAND_IN, header=not names, columns=tuple(names))
    blocks = without_mark(read_blocks(path), text)
    if text.header:
        names, blocks = read_header(path, blocks, text)
    for column in columns:
        if column not in names:
            raise DataError(
                f"{path} has no column '{column}'{did_you_mean(column, names)}: is it the file of this format?"
            )
    places = [list(names).index(column) for column in columns]
    for block in blocks:
        if len(separator) > 1:
            stand_in = STAND_IN.encode()
            data = block.data.replace(stand_in, stand_in * len(names))  # in the file itself: too many columns
            data = data.replace(separator.encode(), stand_in)
            block = TextBlock(data, block.first_line, block.position)
        records, refused = check_records(block, text, len(names))
        numbers = np.zeros((0, len(columns)), dtype=np.int64)
        if len(records):
            frame = pl.read_csv(
                records.data,
                has_header=False,
                separator=text.separator,
                quote_char=None,
                schema={f"column{place}": pl.String for place in range(len(names))},
                columns=sorted(places),
            ).select(pl.col(f"column{place}").cast(pl.Int64, strict=False) for place in places)
            good = frame.select(pl.all_horizontal(pl.all().is_not_null())).to_series().to_numpy()
            reason = f"{' or '.join(columns)} is not a whole number"
            for row in np.flatnonzero(~good).tolist():
                refused.append(Refused(int(records.lines[row]), reason, records.raw(row).decode()))
            numbers = frame.filter(good).to_numpy()  # without nulls, so that they stay integers
        if len(separator) > 1:
            refused = [spell(row, separator) for row in refused]
        yield numbers, sorted(refused, key=lambda row: row.line)


def spell(row: Refused, separator: str) -> Refused:
    """Refused row whose reason names the separator that the file should have."""
    reason = row.reason.replace(repr(STAND_IN), repr(separator))
    return replace(row, reason=reason, raw=row.raw.replace(STAND_IN, separator))


def read_id_lists(path: Path) -> Generator[list[Refused], None, tuple[Ints, Ints, int]]:
    """Lines `user item item ...`: yields the lines refused; returns [E] users, [E] items in order, and how many lines
    have no items."""
    users: list[int] = []
    items: list[int] = []
    first_line: dict[int, int] = {}
    num_empty = 0
    for lines, refused in text_lines(path):
        for line, raw in lines:
            fields = raw.split()
            bad = next((field for field in fields if not is_id(field)), None)
            if bad is not None:
                reason = f"{bad[:40]!r} is not a whole number: a line is a user and its items, separated by spaces"
                refused.append(Refused(line, reason, raw))
            elif not fields:
                refused.append(Refused(line, "an empty line", raw))
            elif (user := int(fields[0])) in first_line:
                refused.append(Refused(line, f"user {user} has line {first_line[user]} already", raw))
            else:
                first_line[user] = line
                num_empty += len(fields) == 1
                users += [user] * (len(fields) - 1)
                items += map(int, fields[1:])
        yield sorted(refused, key=lambda row: row.line)
    return np.array(users, dtype=np.int64), np.array(items, dtype=np.int64), num_empty


def read_attributes(
    path: Path,
    names: Sequence[str],
    split: Callable[[str], list[str]] = str.split,
    encoding: str = "utf-8",
    header: str = "",
    max_value_bytes: int = MAX_VALUE_BYTES,
) -> Generator[list[Refused], None, Any]:
    """Yields the lines refused; returns a frame with `id` (Int64) and one text column for each further name.

    `names` are those of all fields of a line; the first is the id. A first line that starts with `header` is skipped.
    """
    pl = import_polars()
    ids: dict[int, int] = {}
    rows: list[list[str]] = []
    for lines, refused in text_lines(path, encoding):
        for line, raw in lines:
            if header and line == 1 and raw.startswith(header):
                continue
            fields = split(raw)
            longest = max(range(len(fields)), key=lambda place: len(fields[place]), default=0)
            if len(fields) != len(names):
                found = f"{len(fields)} field{'s' if len(fields) != 1 else ''}"
                reason = f"{found} instead of {len(names)} ({', '.join(names)})"
            elif not is_id(fields[0]):
                reason = f"the {names[0]} {fields[0][:40]!r} is not a whole number"
            elif int(fields[0]) in ids:
                reason = f"{names[0]} {fields[0]} has line {ids[int(fields[0])]} already"
            elif (size := len(fields[longest].encode())) > max_value_bytes:
                reason = too_long(names[longest], size, max_value_bytes)
            else:
                ids[int(fields[0])] = line
                rows.append(fields[1:])
                continue
            refused.append(Refused(line, reason, raw))
        yield sorted(refused, key=lambda row: row.line)
    values = list(zip(*rows, strict=True)) or [()] * (len(names) - 1)
    columns = {name: pl.Series(column, dtype=pl.String) for name, column in zip(names[1:], values, strict=True)}
    return pl.DataFrame({"id": pl.Series(list(ids), dtype=pl.Int64), **columns})


def text_lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[list[tuple[int, str]], list[Refused]]]:
    """Numbered lines without their ends, a block at a time, and those refused: runs of empty ones, and those that are
    not text."""
    text = TextFormat(separator=STAND_IN, columns=("line",), encoding=encoding)
    for block in without_mark(read_blocks(path), text):
        records, refused = check_records(block, text, num_columns=None)
        lines = zip(records.lines.tolist(), records.data.decode().split("\n")[:-1], strict=True)
        yield list(lines), refused


def is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19  # below 2^63
