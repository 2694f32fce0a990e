"""Rows of a text file: blocks of lines, checked line by line, parsed by polars, checked value by value."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Generator, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from holdall.common.errors import ConfigError, DataError
from holdall.common.worker_thread import prefetched
from holdall.data.blocks import BLOCK_BYTES, TextBlock, last_line_end, read_blocks
from holdall.data.layout import Layout, TextFormat
from holdall.data.records import Records, check_records, count_columns, last_even_newline
from holdall.data.rows import Refused, Rows, check_columns, check_values, import_polars


def read_text(path: Path, layout: Layout, block_bytes: int = BLOCK_BYTES) -> Generator[Rows]:
    """The rows of one file, a block at a time. Decompressing and checking lines run in a thread of their own."""
    assert layout.text is not None
    text = layout.text
    cut = partial(last_even_newline, text=text) if text.multiline else last_line_end
    blocks = without_mark(read_blocks(path, block_bytes, cut), text)
    names: list[str] = list(text.columns)
    if text.header:
        names, blocks = read_header(path, blocks, text)
    elif layout.label_optional and layout.label in names:
        names, blocks = columns_of(blocks, names, layout)
    layout = layout.for_columns(names)
    positions = check_columns(names, layout, str(path))
    for feature in layout.features:
        if feature.kind != "categorical" and feature.separator is None:
            raise ConfigError(f"{feature.kind} '{feature.name}' needs a separator: {path} is text and holds no lists")
    checked = ((block, *check_records(block, text, len(names))) for block in blocks)
    first_row = 0
    for block, records, refused in prefetched(checked, depth=1):
        rows = parse(records, refused, layout, positions, len(names), first_row, block.position)
        first_row += rows.num_rows
        yield rows


def parse(
    records: Records,
    refused: list[Refused],
    layout: Layout,
    positions: list[int],
    num_columns: int,
    first_row: int,
    position: int,
) -> Rows:
    """Split checked records into columns and check their values."""
    pl = import_polars()
    assert layout.text is not None
    num_rows = len(records) + sum(row.num_rows for row in refused)
    names = {f"column{index}": name for index, name in zip(positions, layout.used_columns, strict=True)}
    if len(records):
        # Polars drops a byte order mark at the start of its input; within a file it belongs to the value.
        again = codecs.BOM_UTF8 if records.data.startswith(codecs.BOM_UTF8) else b""
        raw = pl.read_csv(
            again + records.data if again else records.data,
            has_header=False,
            separator=layout.text.separator,
            quote_char=layout.text.quote or None,
            schema={f"column{index}": pl.String for index in range(num_columns)},
            columns=sorted(positions),
            null_values=list(layout.text.missing) or None,
        ).rename(names)
        raw = raw.rechunk()  # numbering values takes half the time in one chunk a column
    else:
        raw = pl.DataFrame(schema=dict.fromkeys(names.values(), pl.String))
    assert raw.height == len(records), f"{raw.height} rows parsed from {len(records)} records"
    frame, reasons = check_values(raw, layout)
    numbers = records.rows + first_row
    if reasons:
        lines = ((row, int(records.lines[row]), reason) for row, reason in reasons.items())
        refused = refused + [Refused(line, reason, records.raw(row).decode()) for row, line, reason in lines]
        numbers = records.without(reasons).rows + first_row
    return Rows(frame, numbers, sorted(refused, key=lambda row: row.line), num_rows, position)


def without_mark(blocks: Iterator[TextBlock], text: TextFormat) -> Iterator[TextBlock]:
    """Drop the byte order mark that some programs put before UTF-8 text."""
    first = next(blocks)
    if first.data.startswith(codecs.BOM_UTF8) and codecs.lookup(text.encoding).name.startswith("utf-8"):
        first = TextBlock(first.data.removeprefix(codecs.BOM_UTF8), first.first_line, first.position)
    yield first
    yield from blocks


def columns_of(blocks: Iterator[TextBlock], names: list[str], layout: Layout) -> tuple[list[str], Iterator[TextBlock]]:
    """The columns of a file without a header, and its blocks: without the label's if most lines are one short."""
    assert layout.text is not None
    first = next(blocks)
    records, _ = check_records(first, layout.text, num_columns=None)
    counts = count_columns(records, layout.text)
    short = np.count_nonzero(counts == len(names) - 1) > np.count_nonzero(counts == len(names))
    return [name for name in names if not short or name != layout.label], chain([first], blocks)


def read_header(path: Path, blocks: Iterator[TextBlock], text: TextFormat) -> tuple[list[str], Iterator[TextBlock]]:
    """The column names of the first line, and the blocks after it."""
    first = next(blocks)
    end = first.data.index(b"\n") + 1
    try:
        line = first.data[:end].decode(text.encoding).rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line 1: the header is not valid {text.encoding} ({error})") from error
    if text.quote:
        names = next(csv.reader([line], delimiter=text.separator, quotechar=text.quote), [])
    else:
        names = line.split(text.separator)

    def rest() -> Iterator[TextBlock]:
        data = first.data[end:]
        if data:
            yield TextBlock(data, first.first_line + 1, first.position)
        empty = not data
        for block in blocks:
            empty = False
            yield block
        if empty:
            raise DataError(f"{path} holds a header and no rows: leave it out")

    return names, rest()
