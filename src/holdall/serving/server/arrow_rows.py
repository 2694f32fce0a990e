"""Rows and scores as Arrow IPC streams.

A stream is read without copying it, and no part of it may decode to more bytes than it has: compressed buffers and
types whose values may share bytes are refused, since a short stream of them can stand for terabytes.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from holdall.serving.server.row_types import BodyError, RowError, RowReader

CONTENT_TYPE = b"application/vnd.apache.arrow.stream"
SCORE_SCHEMA = pa.schema([pa.field("score", pa.float32(), nullable=False)])
MAX_TEXT_BYTES = 16 << 20
"""Most bytes of the texts that a dictionary column of one request stands for."""
_BATCH, _DICTIONARY = 3, 2  # kinds of messages, in the format's `MessageHeader`


def read_table(body: bytes | bytearray, reader: RowReader) -> pa.Table:
    """The rows of an Arrow IPC stream, every buffer of which was checked."""
    buffer = pa.py_buffer(body)
    try:
        for message in pa.ipc.MessageReader.open_stream(buffer):
            if _is_compressed(message.metadata.to_pybytes()):
                raise BodyError("the Arrow stream is compressed, which is not read: write it without a codec")
        with pa.ipc.open_stream(buffer) as stream:
            batches, num_rows = [], 0
            for batch in stream:
                num_rows += batch.num_rows
                reader.check_number(max(num_rows, 1))
                batches.append(batch)
            table = pa.Table.from_batches(batches, stream.schema)
        table = table.select(reader.check_names(table.column_names))
        table.validate(full=True)
    except (pa.ArrowException, OSError, struct.error) as error:
        reason = (str(error).splitlines() or ["?"])[0][:200]
        raise BodyError(f"the body is no Arrow IPC stream: {reason}") from None
    reader.check_number(num_rows)
    for name, column in zip(table.column_names, table.columns, strict=True):
        _check_type(name, column)
    return table


def write_scores(scores: npt.NDArray[np.float32]) -> bytes:
    """An Arrow IPC stream with the column `score`."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCORE_SCHEMA) as stream:
        stream.write_batch(pa.record_batch([pa.array(scores, pa.float32())], schema=SCORE_SCHEMA))
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _check_type(name: str, column: pa.ChunkedArray) -> None:
    kind = column.type
    if kinds.is_dictionary(kind) and _is_text(kind.value_type):
        size = sum(len(chunk) * (pc.max(pc.binary_length(chunk.dictionary)).as_py() or 0) for chunk in column.chunks)
        if size > MAX_TEXT_BYTES:
            raise RowError(f"'{name}': its dictionary may stand for {size:,} bytes of text: send plain text")
        return
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        kind = kind.value_type
    if not (
        _is_text(kind)
        or kinds.is_integer(kind)
        or kinds.is_floating(kind)
        or kinds.is_boolean(kind)
        or kinds.is_null(kind)
    ):
        raise RowError(
            f"'{name}': columns of the Arrow type {str(column.type)[:60]} are not read: send text or numbers"
        )


def _is_text(kind: pa.DataType) -> bool:
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind))


def _is_compressed(message: bytes) -> bool:
    """Whether the flatbuffer of a message describes compressed buffers (`RecordBatch.compression` is there)."""
    root = _indirect(message, 0)
    kind_at, header_at = _field(message, root, 1), _field(message, root, 2)
    if kind_at is None or header_at is None:
        return False
    kind, header = message[kind_at], _indirect(message, header_at)
    if kind == _DICTIONARY:
        data_at = _field(message, header, 1)
        if data_at is None:
            return False
        header = _indirect(message, data_at)
    return kind in (_BATCH, _DICTIONARY) and _field(message, header, 3) is not None


def _indirect(data: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, number: int) -> int | None:
    """Place of a field of a flatbuffer's table; None where it is absent."""
    layout = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", data, layout)[0]:
        return None
    offset = struct.unpack_from("<H", data, layout + 4 + 2 * number)[0]
    return table + int(offset) if offset else None
