"""Records of a text block, checked for encoding and number of columns; all checks are vectorised over the bytes.

CSV parsers pad short lines and cut long ones, or give up at the first: here every line is either passed on whole or
refused with its number and the reason, so that rows in = rows out + rows refused.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdall.data.blocks import TextBlock
from holdall.data.layout import TextFormat
from holdall.data.rows import Refused

NEWLINE = 10
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Records:
    """Rows of text, still as bytes: record i ends before position `ends[i]` of `data`, newline included."""

    data: bytes
    ends: Positions
    lines: Positions
    """Line number of each record's first line."""
    rows: Positions
    """Number of each record in the block as it was read, refused ones counted."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> Positions:
        return np.concatenate([np.zeros(1, dtype=np.int64), self.ends[:-1]])

    def raw(self, record: int) -> bytes:
        start = int(self.ends[record - 1]) if record else 0
        return self.data[start : int(self.ends[record]) - 1]

    def without(self, refused: Iterable[int]) -> Records:
        """The records that are not refused, with their bytes moved together."""
        keep = np.ones(len(self), dtype=bool)
        keep[list(refused)] = False
        lengths = np.diff(self.ends, prepend=0)
        data = np.frombuffer(self.data, dtype=np.uint8)[np.repeat(keep, lengths)].tobytes()
        return Records(data, np.cumsum(lengths[keep]), self.lines[keep], self.rows[keep])


def check_records(block: TextBlock, text: TextFormat, num_columns: int | None) -> tuple[Records, list[Refused]]:
    """The records of a block in UTF-8, every one with `num_columns` columns (or any number), and the refused ones."""

    def refuse(records: Records, reasons: dict[int, str], encoding: str = "utf-8") -> Records:
        if not reasons:
            return records
        starts, ends, lines = records.starts.tolist(), records.ends.tolist(), records.lines.tolist()
        for record, reason in reasons.items():
            raw = records.data[starts[record] : ends[record] - 1].decode(encoding, "backslashreplace")
            refused.append(Refused(lines[record], reason, raw))
        return records.without(reasons)

    records, refused = without_empty_lines(split_records(block, text), text, num_columns)
    records = refuse(records, stray_returns(records), text.encoding)
    records = refuse(records, undecodable(records, text.encoding), text.encoding)
    records = to_utf8(records, text.encoding)
    if text.quote:
        records = refuse(records, open_quotes(records, text.quote))
        records = refuse(records, misplaced_quotes(records, text))
    if num_columns is not None:
        records = refuse(records, wrong_columns(records, text, num_columns))
    return records, refused


def split_records(block: TextBlock, text: TextFormat) -> Records:
    """Find where records end: at every newline, or only at those outside quotes when fields may span lines."""
    data = block.data.replace(b"\r\n", b"\n") if b"\r\n" in block.data else block.data
    data = double_quotes(data, text)
    newlines = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == NEWLINE)
    ends = newlines + 1
    if text.multiline:
        quotes = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord(text.quote))
        ends = ends[(np.searchsorted(quotes, newlines) % 2 == 0) | (ends == len(data))]
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    lines = block.first_line + np.searchsorted(newlines, starts)
    return Records(data, ends, lines, np.arange(len(ends)))


def without_empty_lines(records: Records, text: TextFormat, num_columns: int | None) -> tuple[Records, list[Refused]]:
    """The other records, and one refusal for every run of empty lines, which may be most of a file."""
    empty = np.diff(records.ends, prepend=0) == 1
    if not empty.any():
        return records, []
    edges = np.flatnonzero(np.diff(empty, prepend=False, append=False))
    wanted = "" if num_columns is None else f" instead of {num_columns} columns separated by {text.separator!r}"
    refused = [
        Refused(line, f"{'an empty line' if number == 1 else f'{number:,} empty lines'}{wanted}", "", number)
        for line, number in zip(records.lines[edges[0::2]].tolist(), (edges[1::2] - edges[0::2]).tolist(), strict=True)
    ]
    return records.without(np.flatnonzero(empty)), refused


def double_quotes(data: bytes, text: TextFormat) -> bytes:
    """Escaped quotes as doubled ones, which take as many bytes."""
    return data.replace((text.escape + text.quote).encode(), text.quote.encode() * 2) if text.escape else data


def last_even_newline(data: bytes, text: TextFormat) -> int:
    """End of the last record in text whose quoted fields may contain newlines; 0 when there is none."""
    quotes = np.frombuffer(double_quotes(data, text), dtype=np.uint8) == ord(text.quote)
    outside = np.cumsum(quotes, dtype=np.uint8) % 2 == 0  # wraps at 256, which is even
    ends = np.flatnonzero((np.frombuffer(data, dtype=np.uint8) == NEWLINE) & outside)
    return int(ends[-1]) + 1 if len(ends) else 0


def stray_returns(records: Records) -> dict[int, str]:
    if b"\r" not in records.data:
        return {}
    positions = np.flatnonzero(np.frombuffer(records.data, dtype=np.uint8) == 13)
    reason = "a carriage return is inside the line; convert the file's line endings to \\n"
    return dict.fromkeys(records_at(records, positions), reason)


def undecodable(records: Records, encoding: str) -> dict[int, str]:
    """Records that are not text in this encoding; looks at single records only when the block as a whole is not."""
    if records.data.isascii():
        return {}
    try:
        records.data.decode(encoding)
        return {}
    except UnicodeDecodeError:
        pass
    reasons = {}
    for record in range(len(records)):
        raw = records.raw(record)
        try:
            raw.decode(encoding)
        except UnicodeDecodeError as error:
            reasons[record] = (
                f"byte {raw[error.start]:#04x} (number {error.start + 1} of the line) is not valid {encoding}"
            )
    return reasons


def to_utf8(records: Records, encoding: str) -> Records:
    if records.data.isascii() or codecs.lookup(encoding).name == "utf-8":
        return records
    encoded = records.data.decode(encoding).encode("utf-8")
    # The k-th newline stays the k-th newline.
    before = np.flatnonzero(np.frombuffer(records.data, dtype=np.uint8) == NEWLINE) + 1
    after = np.flatnonzero(np.frombuffer(encoded, dtype=np.uint8) == NEWLINE) + 1
    assert len(before) == len(after)
    return Records(encoded, after[np.searchsorted(before, records.ends)], records.lines, records.rows)


def open_quotes(records: Records, quote: str) -> dict[int, str]:
    """Records whose quotes do not pair up."""
    positions = np.flatnonzero(np.frombuffer(records.data, dtype=np.uint8) == ord(quote))
    counts = np.diff(np.searchsorted(positions, records.ends), prepend=0)
    cure = "set multiline = true where fields hold line breaks, escape where quotes are escaped, or quote = ''"
    return dict.fromkeys(np.flatnonzero(counts % 2).tolist(), f"a quoted field is not closed; {cure}")


def misplaced_quotes(records: Records, text: TextFormat) -> dict[int, str]:
    """Records with a quote that neither opens nor closes a field; quotes pair up in all of them."""
    data = np.frombuffer(records.data, dtype=np.uint8)
    positions = np.flatnonzero(data == ord(text.quote))
    if not len(positions):
        return {}
    opening, closing = positions[0::2], positions[1::2]
    edges = np.zeros(256, dtype=bool)
    edges[[NEWLINE, ord(text.separator)]] = True
    # A doubled quote inside a field closes and opens again at once.
    again = np.zeros(len(opening), dtype=bool)
    again[1:] = opening[1:] == closing[:-1] + 1
    fine_opening = again | (opening == 0) | edges[data[opening - 1]]
    fine_closing = edges[data[closing + 1]]
    fine_closing[:-1] |= again[1:]
    wrong = np.concatenate([opening[~fine_opening], closing[~fine_closing]])
    reason = "a quote is inside a field; double it, or see escape and quote in the schema"
    return dict.fromkeys(records_at(records, wrong), reason)


def count_columns(records: Records, text: TextFormat) -> Positions:
    """Number of columns of each record."""
    data = np.frombuffer(records.data, dtype=np.uint8)
    separators = data == ord(text.separator)
    if text.quote and text.quote.encode() in records.data:
        inside = np.cumsum(data == ord(text.quote), dtype=np.uint8) % 2 == 1
        separators &= ~inside
    return np.diff(np.searchsorted(np.flatnonzero(separators), records.ends), prepend=0) + 1


def wrong_columns(records: Records, text: TextFormat, num_columns: int) -> dict[int, str]:
    counts = count_columns(records, text)
    wrong = np.flatnonzero(counts != num_columns)
    wanted = f"{num_columns} columns separated by {text.separator!r}"
    reasons = {
        count: f"{count} column{'s' if count > 1 else ''} instead of {wanted}"
        for count in np.unique(counts[wrong]).tolist()
    }
    return {record: reasons[count] for record, count in zip(wrong.tolist(), counts[wrong].tolist(), strict=True)}


def records_at(records: Records, positions: Positions) -> list[int]:
    """The records that hold these bytes, once each."""
    return np.unique(np.searchsorted(records.ends, positions, side="right")).tolist()
