"""Rows of files with one record a line that is no list of columns: JSON lines, and libSVM or libFM text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

from holdall.common.errors import DataError, did_you_mean
from holdall.data.blocks import BLOCK_BYTES, COMPRESSIONS, TextBlock, read_blocks
from holdall.data.layout import Layout, is_number_input
from holdall.data.rows import NOT_WHOLE, WHOLE_FLOATS, Refused, Rows, check_values, import_polars, inputs_of, shown

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
LABEL, INDEX, QID = "label", "index", "qid"
"""Columns of a libSVM line besides those of its indices: the first number, the indices with the value 1, and `qid`."""

ONES, ZEROS = ("1", "1.0", "1.", "+1"), ("0", "0.0", "0.")

Record = dict[str, Any]
Parse = Callable[[str], Record]


class RecordError(ValueError):
    """What is wrong with a line or a value of it."""


class NumberText(str):
    """Number with a point or an exponent, as it is written."""

    __slots__ = ()


# --- lines ----------------------------------------------------------------------------------------------------------


def is_json(path: Path) -> bool:
    """Whether a file has JSON lines by its name."""
    return (Path(path.stem) if path.suffix in COMPRESSIONS else path).suffix.lower() in JSON_SUFFIXES


_decode_json = json.JSONDecoder(parse_float=NumberText, parse_constant=NumberText).decode


def parse_json(line: str) -> Record:
    """The object of a line, with numbers of any number of digits."""
    try:
        found = _decode_json(line)
    except (ValueError, RecursionError) as error:
        hint = "; the file is one JSON list: write an object a line" if line.startswith("[") else ""
        raise RecordError(f"the line is no JSON object ({error}){hint}") from None
    if not isinstance(found, dict):
        raise RecordError(f"the line is {shown(found)} instead of a JSON object with the columns as keys")
    return found


def value_at(record: Record, column: str) -> Any:
    """Value of a column, which may be that of a nested object: `user.city`; None where it is absent."""
    if column in record:
        return record[column]
    name, _, rest = column.partition(".")
    while rest:
        inner = record.get(name)
        if isinstance(inner, dict):
            found = value_at(inner, rest)
            if found is not None:
                return found
        more, _, rest = rest.partition(".")
        name = f"{name}.{more}"
    return None


def names_in(record: Record, before: str = "") -> Generator[str]:
    """Names of the columns of a record, those of nested objects with a dot."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from names_in(value, f"{before}{name}.")
        else:
            yield before + name


def libsvm_parser(layout: Layout) -> Parse:
    """Parser of `label index:value ...`; indices that the layout names are columns, the others a list, `index`."""
    named = {column: "0" for column in layout.used_columns if column not in (LABEL, INDEX, QID)}

    def parse(line: str) -> Record:
        first, *pairs = line.split("#", 1)[0].split()
        record: Record = {LABEL: first, **named}
        indices = []
        for pair in pairs:
            index, _, value = pair.partition(":")
            if not index or not value or ":" in value:
                raise RecordError(f"{shown(pair)} is not index:value (a line is: label index:value index:value ...)")
            if index in named or index == QID:
                record[index] = value
            elif value in ONES:
                indices.append(index)
            elif value not in ZEROS:
                raise RecordError(
                    f"index {index} has the value {shown(value)}, and only 1 makes it an id: name it in a schema, as "
                    f'dense = ["{index}"]'
                )
        record[INDEX] = indices
        return record

    return parse


# --- rows -----------------------------------------------------------------------------------------------------------


def read_lines(path: Path, layout: Layout, block_bytes: int = BLOCK_BYTES) -> Generator[Rows]:
    """The rows of one file of JSON lines, or of libSVM text if the layout says so, a block at a time."""
    parse = libsvm_parser(layout) if layout.lines == "libsvm" else parse_json
    first_row, seen, names = 0, set[str](), set[str]()
    for block in read_blocks(path, block_bytes):
        records, places, refused, num_rows = parsed(block, parse)
        if not first_row:
            names = {name for record in records for name in names_in(record)}
            layout = layout.for_columns(sorted(names))
        raw, reasons = frame_of(records, layout, seen)
        keep = [place for place in range(len(records)) if place not in reasons]
        frame, wrong = check_values(raw[keep] if reasons else raw, layout)
        reasons |= {keep[place]: reason for place, reason in wrong.items()}
        lines = block.first_line + places
        said = [Refused(int(lines[p]), reason, shown_record(records[p])) for p, reason in reasons.items()]
        numbers = np.delete(places, sorted(reasons)) + first_row
        refused = sorted([*refused, *said], key=lambda row: row.line)
        yield Rows(frame, numbers, refused, num_rows, block.position)
        first_row += num_rows
    for column in layout.used_columns:
        if column not in seen:
            raise DataError(
                f"no line of {path} has a column '{column}'{did_you_mean(column, names)}: correct the schema or the "
                f"file"
            )


def parsed(block: TextBlock, parse: Parse) -> tuple[list[Record], Any, list[Refused], int]:
    """The records of a block, their places among its lines, the refused ones, and the number of lines."""
    lines = block.data.removeprefix(codecs.BOM_UTF8).split(b"\n")[:-1]
    records, places, refused = [], [], []
    for place, line in enumerate(lines):
        try:
            text = line.decode().strip()
            if not text or (text[0] == "#" and parse is not parse_json):
                raise RecordError("an empty line" if not text else "a line without a label")
            records.append(parse(text))
            places.append(place)
        except UnicodeDecodeError as error:
            reason = f"byte {line[error.start]:#04x} (number {error.start + 1} of the line) is not valid utf-8"
            refused.append(Refused(block.first_line + place, reason, line.decode(errors="backslashreplace")))
        except RecordError as error:
            refused.append(Refused(block.first_line + place, str(error), text))
    return records, np.array(places, dtype=np.int64), refused, len(lines)


def frame_of(records: list[Record], layout: Layout, seen: set[str]) -> tuple[Any, dict[int, str]]:
    """Used columns of records as text, or lists of it, and the reasons why some of them (by place) are refused.

    Adds the columns that a record has to `seen`.
    """
    pl = import_polars()
    lists = {f.column: f.separator for f in layout.features if f.kind != "categorical"}
    inputs = inputs_of(layout).values()
    texts = {f.column for f in inputs if f.column not in lists and not is_number_input(f)}
    numbers = {f.column for f in inputs if is_number_input(f)} | {dense.column for dense in layout.dense}
    numbers |= set() if layout.weight is None else {layout.weight}
    reasons: dict[int, str] = {}
    columns = {}
    for column in layout.used_columns:
        given = [value_at(record, column) for record in records]
        if column not in seen and any(v is not None or column in r for v, r in zip(given, records, strict=True)):
            seen.add(column)
        plain = None if column in lists else plain_texts(given, whole=column in texts)
        if plain is not None:
            columns[column] = pl.Series(plain, dtype=pl.String)
            continue
        values: list[Any] = []
        for place, value in enumerate(given):
            try:
                if column in lists:
                    values.append(pieces_of(value, lists[column]))
                else:
                    values.append(text_of(value, whole=column in texts, number=column in numbers))
            except RecordError as error:
                values.append([] if column in lists else None)
                reasons.setdefault(place, f"column '{column}' {error}")
        columns[column] = pl.Series(values, dtype=pl.List(pl.String) if column in lists else pl.String)
    return pl.DataFrame(columns), reasons


def plain_texts(values: list[Any], *, whole: bool) -> list[str | None] | None:
    """`text_of` of a column whose values are of one plain kind, in a fraction of the time; None for other columns."""
    kinds = set(map(type, values)) - {type(None)}
    if kinds == {int}:
        return [None if value is None else str(value) for value in values]
    if kinds == {NumberText} and not whole:
        return values
    return values if kinds == {str} and all(value.isascii() for value in values if value is not None) else None


def text_of(value: Any, *, whole: bool, number: bool) -> str | None:
    """A JSON value as the text that a CSV file would have; floats in a column of values are whole numbers."""
    if value is None:
        return None
    if type(value) is int:
        return str(value)
    if isinstance(value, NumberText):
        if not whole:
            return str(value)
        if value == "NaN":
            return None
        found = float(value)
        if not found.is_integer() or abs(found) >= WHOLE_FLOATS[64]:
            raise RecordError(f"holds {value}, {NOT_WHOLE}")
        return str(int(found))
    if isinstance(value, bool):
        return ("1" if value else "0") if number else ("true" if value else "false")
    if isinstance(value, str):
        if not value.isascii() and not is_unicode(value):
            raise RecordError("holds text that is not valid Unicode: correct it")
        return value
    kind = "a list" if isinstance(value, list) else "an object"
    cure = "name it as a bag or sequence" if isinstance(value, list) else "name its fields, as user.city"
    raise RecordError(f"holds {kind}: {cure}")


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can write alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def pieces_of(value: Any, separator: str | None) -> list[str]:
    """The values of a bag or sequence."""
    if isinstance(value, list):
        found = [text_of(piece, whole=True, number=False) for piece in value]
        return [piece for piece in found if piece]
    text = text_of(value, whole=True, number=False)
    if not text:
        return []
    if separator is None:
        raise RecordError(f"holds {shown(text)} instead of a list: set its separator in the schema")
    return [piece for piece in text.split(separator) if piece]


def shown_record(record: Record) -> str:
    text = json.dumps(record, ensure_ascii=False)
    return text if is_unicode(text) else json.dumps(record)
