"""Text files of whole-number ids: columns of ids, lists of ids per line, and attributes per id.

Every line is read whole or refused with its number and the reason. The first kind is parsed by polars a block at a time
(MovieLens-25M); the others are small and parsed line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import DataError, did_you_mean
from holdall.data.blocks import TextBlock, read_blocks
from holdall.data.layout import TextFormat
from holdall.data.read_text import read_header, without_mark
from holdall.data.records import check_records
from holdall.data.rows import Refused, import_polars

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
            data = block.data.replace(separator.encode(), STAND_IN.encode())
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
            numbers = frame.to_numpy()[good].astype(np.int64)
        if len(separator) > 1:
            refused = [spell(row, separator) for row in refused]
        yield numbers, sorted(refused, key=lambda row: row.line)


def spell(row: Refused, separator: str) -> Refused:
    """Refused row whose reason names the separator that the file should have."""
    return Refused(row.line, row.reason.replace(repr(STAND_IN), repr(separator)), row.raw.replace(STAND_IN, separator))


def read_id_lists(path: Path) -> tuple[Ints, Ints, list[Refused], int]:
    """Lines `user item item ...`: [E] users, [E] items in order, the lines refused, and how many have no items."""
    users: list[int] = []
    items: list[int] = []
    refused: list[Refused] = []
    first_line: dict[int, int] = {}
    num_empty = 0
    for line, raw in text_lines(path):
        fields = raw.split()
        bad = next((field for field in fields if not is_id(field)), None)
        if not fields:
            refused.append(Refused(line, "an empty line", raw))
        elif bad is not None:
            reason = f"{bad[:40]!r} is not a whole number: a line is a user and its items, separated by spaces"
            refused.append(Refused(line, reason, raw))
        elif (user := int(fields[0])) in first_line:
            refused.append(Refused(line, f"user {user} has line {first_line[user]} already", raw))
        else:
            first_line[user] = line
            num_empty += len(fields) == 1
            users += [user] * (len(fields) - 1)
            items += map(int, fields[1:])
    return np.array(users, dtype=np.int64), np.array(items, dtype=np.int64), refused, num_empty


def read_attributes(
    path: Path, names: Sequence[str], split: Callable[[str], list[str]] = str.split, encoding: str = "utf-8"
) -> tuple[Any, list[Refused]]:
    """A frame with `id` (Int64) and one text column for each further name, and the lines refused.

    `names` are those of all fields of a line; the first is the id.
    """
    pl = import_polars()
    ids: dict[int, int] = {}
    rows: list[list[str]] = []
    refused: list[Refused] = []
    for line, raw in text_lines(path, encoding):
        fields = split(raw)
        if len(fields) != len(names):
            found = f"{len(fields)} field{'s' if len(fields) != 1 else ''}"
            refused.append(Refused(line, f"{found} instead of {len(names)} ({', '.join(names)})", raw))
        elif not is_id(fields[0]):
            refused.append(Refused(line, f"the {names[0]} {fields[0][:40]!r} is not a whole number", raw))
        elif int(fields[0]) in ids:
            refused.append(Refused(line, f"{names[0]} {fields[0]} has line {ids[int(fields[0])]} already", raw))
        else:
            ids[int(fields[0])] = line
            rows.append(fields[1:])
    values = list(zip(*rows, strict=True)) or [()] * (len(names) - 1)
    columns = {name: pl.Series(column, dtype=pl.String) for name, column in zip(names[1:], values, strict=True)}
    return pl.DataFrame({"id": pl.Series(list(ids), dtype=pl.Int64), **columns}), refused


def text_lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends; bytes that are not text are shown as `\\xNN`."""
    for block in read_blocks(path):
        for line, raw in enumerate(block.data.split(b"\n")[:-1], start=block.first_line):
            yield line, raw.rstrip(b"\r").decode(encoding, "backslashreplace")


def is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19  # below 2^63
