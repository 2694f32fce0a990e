"""Rows and scores as Arrow IPC streams.

The event loop only counts the rows of a stream, from the headers of its messages; the scoring thread reads it. Each
call of Arrow gives up Python's lock, which the event loop would have to wait for while a batch is scored.

No part of a stream may decode to more bytes than it has: compressed buffers and types whose values may share bytes are
refused, since a short stream of them can stand for terabytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from holdall.serving.server.row_types import ArrowColumns, BodyError, RowError, RowReader

CONTENT_TYPE = b"application/vnd.apache.arrow.stream"
SCORE_SCHEMA = pa.schema([pa.field("score", pa.float32(), nullable=False)])
MAX_TEXT_BYTES = 16 << 20
"""Most bytes of the texts that a dictionary column of one request stands for."""
MAX_MESSAGES = 8192
"""Most messages of a stream: the event loop looks at each for 3 microseconds."""
_MARK = 0xFFFFFFFF  # before each message, in streams of today
_BATCH, _DICTIONARY = 3, 2  # kinds of messages, in the format's `MessageHeader`


@dataclass(frozen=True, slots=True)
class ArrowBody:
    """Stream that was not read yet, of so many rows as its headers say."""

    body: bytes | bytearray
    num_rows: int
    num_entries: int = 0
    """Entries of all arrays: one a row and column, and one for each value of a list."""
    num_bytes: int = 0
    """Bytes beside headers."""

    @classmethod
    def of(cls, body: bytes | bytearray) -> ArrowBody:
        """The stream of a body; it may not be compressed."""
        try:
            messages = list(_messages(body))
            found = list(map(_batch_sizes, messages))
        except (struct.error, IndexError):
            raise BodyError("the body is no Arrow IPC stream: it is cut off or damaged") from None
        rows, entries = (sum(sizes) for sizes in zip((0, 0), *found, strict=True))
        return cls(body, rows, entries, len(body) - sum(map(len, messages)))

    def most_values(self, reader: RowReader) -> int:
        """Number that the values in bags and sequences do not exceed, if the stream is one that is scored."""
        if not reader.bags:
            return 0
        in_lists = max(self.num_entries - self.num_rows * len(reader.names), 0)
        in_texts = self.num_bytes if reader.separators else 0
        return min(in_lists + in_texts, reader.max_values)


class ArrowReader:
    """Reader of the rows of one schema; it remembers the columns of the last stream, since most have the same."""

    def __init__(self, reader: RowReader):
        self.reader = reader
        self._last: pa.Schema | None = None
        self._places: list[int] = []
        self._dictionaries: list[int] = []
        self._lists: list[int] = []
        self._separated: list[tuple[int, str]] = []
        """Columns of bags as texts, and what separates their values."""

    def columns(self, sent: ArrowBody) -> ArrowColumns:
        """The columns of a stream, every buffer of which was checked."""
        body = sent.body
        buffer = pa.py_buffer(body)
        try:
            with pa.ipc.open_stream(buffer) as stream:
                batches, num_rows = [], 0
                for batch in stream:
                    num_rows += batch.num_rows
                    self.reader.check_number(max(num_rows, 1))
                    batch.validate(full=True)
                    batches.append(batch)
                schema = stream.schema
        except (pa.ArrowException, OSError, struct.error) as error:
            reason = (str(error).splitlines() or ["?"])[0][:200]
            raise BodyError(f"the body is no Arrow IPC stream: {reason}") from None
        if num_rows != sent.num_rows:
            raise BodyError("the body is no Arrow IPC stream: its batches have other rows than their headers say")
        if self._last is None or not self._last.equals(schema):
            self._remember(schema)
        for place in self._dictionaries:
            _check_dictionary(schema.names[place], [batch.column(place) for batch in batches])
        values = 0
        for place in self._lists:
            values += _num_values(schema.names[place], [batch.column(place) for batch in batches], len(body))
        for place, separator in self._separated:
            texts = [batch.column(place) for batch in batches]
            if place in self._dictionaries:
                texts = [part.dictionary_decode() for part in texts]
            counts = [pc.sum(pc.count_substring(part, separator)).as_py() or 0 for part in texts]
            values += sum(counts) + num_rows
        self.reader.check_values(values)
        return ArrowColumns(tuple([batch.column(place) for batch in batches] for place in self._places))

    def _remember(self, schema: pa.Schema) -> None:
        """Check names and types of the columns."""
        places = [schema.names.index(name) for name in self.reader.check_names(schema.names)]
        for place in places:
            _check_type(schema.names[place], schema.types[place])
        self._dictionaries = [place for place in places if kinds.is_dictionary(schema.types[place])]
        self._lists = [place for place in places if _is_list(schema.types[place])]
        texts = [place for place in places if _is_text(schema.types[place]) or place in self._dictionaries]
        separators = self.reader.separators
        self._separated = [(p, separators[schema.names[p]]) for p in texts if schema.names[p] in separators]
        self._places, self._last = places, schema


def write_scores(scores: npt.NDArray[np.float32]) -> bytes:
    """An Arrow IPC stream with the column `score`."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCORE_SCHEMA) as stream:
        stream.write_batch(pa.record_batch([pa.array(scores, pa.float32())], schema=SCORE_SCHEMA))
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _check_type(name: str, kind: pa.DataType) -> None:
    inner = kind
    if kinds.is_dictionary(kind) or _is_list(kind):
        inner = kind.value_type
    if _is_text(inner):
        return
    is_number = kinds.is_integer(inner) or kinds.is_floating(inner) or kinds.is_boolean(inner) or kinds.is_null(inner)
    if not is_number or kinds.is_dictionary(kind):
        raise RowError(f"'{name}': columns of the Arrow type {str(kind)[:60]} are not read: send text or numbers")


def _check_dictionary(name: str, parts: list[pa.DictionaryArray]) -> None:
    size = sum(len(part) * (pc.max(pc.binary_length(part.dictionary)).as_py() or 0) for part in parts)
    if size > MAX_TEXT_BYTES:
        raise RowError(f"'{name}': its dictionary may stand for {size:,} bytes of text: send plain text")


def _num_values(name: str, parts: list[pa.ListArray], num_bytes: int) -> int:
    """Values of a column of lists. Nulls take no bytes, so their number must be bounded."""
    number = sum(pc.sum(pc.list_value_length(part)).as_py() or 0 for part in parts)
    if number > num_bytes:
        raise RowError(f"'{name}': its lists have {number:,} values, more than the stream has bytes: send fewer")
    return int(number)


def _is_list(kind: pa.DataType) -> bool:
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind))


def _messages(body: bytes | bytearray) -> Iterator[bytes]:
    """The flatbuffers of the messages of a stream."""
    at, number, view = 0, 0, memoryview(body)
    if not view:
        raise BodyError("the body is no Arrow IPC stream: it is empty")
    while at < len(view):
        number += 1
        if number > MAX_MESSAGES:
            raise BodyError(f"the Arrow stream has more than {MAX_MESSAGES:,} messages: write larger batches")
        (size,) = struct.unpack_from("<I", view, at)
        at += 4
        if size == _MARK:
            (size,) = struct.unpack_from("<I", view, at)
            at += 4
        if size == 0:
            return
        message = bytes(view[at : at + size])
        if len(message) < size:
            raise IndexError
        length_at = _field(message, _indirect(message, 0), 3)
        at += size + (0 if length_at is None else struct.unpack_from("<Q", message, length_at)[0])
        if at > len(view):
            raise IndexError
        yield message


def _batch_sizes(message: bytes) -> tuple[int, int]:
    """Rows and entries of a message, 0 if it is no batch; raises if its buffers are compressed."""
    root = _indirect(message, 0)
    kind_at, header_at = _field(message, root, 1), _field(message, root, 2)
    if kind_at is None or header_at is None or message[kind_at] not in (_BATCH, _DICTIONARY):
        return 0, 0
    header = _indirect(message, header_at)
    if message[kind_at] == _DICTIONARY:
        data_at = _field(message, header, 1)
        if data_at is None:
            return 0, 0
        header = _indirect(message, data_at)
    if _field(message, header, 3) is not None:
        raise BodyError("the Arrow stream is compressed, which is not read: write it without a codec")
    length_at = _field(message, header, 0)
    if message[kind_at] == _DICTIONARY or length_at is None:
        return 0, 0
    rows, nodes_at = int(struct.unpack_from("<Q", message, length_at)[0]), _field(message, header, 1)
    if nodes_at is None:
        return rows, 0
    nodes = _indirect(message, nodes_at)
    (number,) = struct.unpack_from("<I", message, nodes)
    lengths = struct.unpack_from("<" + "Q8x" * min(number, len(message) // 16), message, nodes + 4)
    return rows, sum(lengths)


def _indirect(data: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, number: int) -> int | None:
    """Place of a field of a flatbuffer's table; None where it is absent."""
    layout = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", data, layout)[0]:
        return None
    offset = struct.unpack_from("<H", data, layout + 4 + 2 * number)[0]
    return table + int(offset) if offset else None
