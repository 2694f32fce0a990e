"""Open Inference Protocol (V2) over HTTP: requests for scores as tensors, one input a column, in JSON or binary.

An input has the shape [R], [R, 1], or [R, L] for a bag or sequence, where empty texts are left out. Text is BYTES, and
a missing value is "". The output is `score`, FP32 [R]. With the binary extension, the header
`Inference-Header-Content-Length` gives the bytes of the JSON part; tensors that name a `binary_data_size` follow it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from holdall.data.schema import Schema
from holdall.data.transforms import input_features
from holdall.serving.raw_rows import ValueRefusedError, number_of
from holdall.serving.server.connection import Answer
from holdall.serving.server.row_types import BodyError, Row, RowError, RowReader

HEADER_LENGTH = b"inference-header-content-length"
TYPES: dict[str, Any] = {
    "BOOL": np.dtype(np.bool_),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
OUTPUT = "score"


class Tensor(msgspec.Struct):
    """Input of a request."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class WantedOutput(msgspec.Struct):
    """Output that a request asks for."""

    name: str
    parameters: dict[str, Any] | None = None


class InferenceRequest(msgspec.Struct):
    """JSON part of a request."""

    inputs: list[Tensor]
    outputs: list[WantedOutput] | None = None
    id: str | None = None
    parameters: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(InferenceRequest)


@dataclass(frozen=True, slots=True)
class Inference:
    """Rows of a request, and the form that its answer takes."""

    rows: list[Row]
    id: str | None
    is_binary: bool

    def answer(self, name: str, version: str, scores: npt.NDArray[np.float32]) -> Answer:
        output: dict[str, Any] = {"name": OUTPUT, "datatype": "FP32", "shape": [len(scores)]}
        whole: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": [output]}
        if self.id is not None:
            whole["id"] = self.id
        if not self.is_binary:
            output["data"] = scores.tolist()
            return Answer(200, msgspec.json.encode(whole))
        data = scores.astype("<f4").tobytes()
        output["parameters"] = {"binary_data_size": len(data)}
        head = msgspec.json.encode(whole)
        return Answer(200, head + data, b"application/octet-stream", ((HEADER_LENGTH, b"%d" % len(head)),))


def metadata(name: str, version: str, schema: Schema, reads: tuple[str, ...]) -> dict[str, Any]:
    """Description of the model: its inputs and its output."""
    inputs: list[dict[str, Any]] = [{"name": column.name, "datatype": "FP32", "shape": [-1]} for column in schema.dense]
    inputs += [
        {
            "name": feature.name,
            "datatype": "BYTES" if feature.bucket is None else "FP32",
            "shape": [-1] if feature.one_hot else [-1, -1],
        }
        for feature in input_features(feature for feature in schema.features if feature.name in reads)
    ]
    outputs = [{"name": OUTPUT, "datatype": "FP32", "shape": [-1]}]
    return {"name": name, "versions": [version], "platform": "holdall", "inputs": inputs, "outputs": outputs}


def read_request(body: bytes | bytearray, headers: Mapping[bytes, bytes], reader: RowReader) -> Inference:
    """The rows of an inference request."""
    view = memoryview(body)
    length = headers.get(HEADER_LENGTH)
    if length is not None:
        if not length.isdigit() or len(length) > 18 or int(length) > len(view):
            raise BodyError(f"the header {HEADER_LENGTH.decode()} is no number of bytes of the body: correct it")
        view, rest = view[: int(length)], view[int(length) :]
    else:
        rest = view[:0]
    request = _decode(view)
    columns: dict[str, list[Any]] = {}
    for tensor in request.inputs:
        if tensor.name not in reader.places:
            raise RowError(f"input '{tensor.name}' is not one of the model: ask for its metadata")
        if tensor.name in columns:
            raise RowError(f"input '{tensor.name}' is given twice: give it once")
        size = (tensor.parameters or {}).get("binary_data_size")
        if size is None:
            values = _json_values(tensor)
        else:
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(rest):
                raise BodyError(f"input '{tensor.name}' has a binary_data_size that the body does not have: correct it")
            values, rest = _binary_values(tensor, rest[:size]), rest[size:]
        columns[tensor.name] = _column(tensor, values, reader)
    if len(rest):
        raise BodyError(f"{len(rest):,} bytes after the last tensor belong to none: correct binary_data_size")
    for name in reader.names:
        if name not in columns:
            raise RowError(f"input '{name}' is missing: give it")
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise RowError(f"inputs have {min(lengths):,} to {max(lengths):,} rows: give all of them equally many")
    reader.check_number(next(iter(lengths)))
    reader.check_values(sum(len(bag) for name in reader.bags for bag in columns[name]))
    rows = list(zip(*(columns[name] for name in reader.names), strict=True))
    return Inference(rows, request.id, _wants_binary(request))


def _decode(view: memoryview) -> InferenceRequest:
    try:
        return _decoder.decode(view)
    except RecursionError:
        raise BodyError("the body is no inference request: it is nested too deeply") from None
    except UnicodeDecodeError:
        raise BodyError("the body is no inference request: it is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise BodyError(f"the body is no inference request: {error}") from None


def _wants_binary(request: InferenceRequest) -> bool:
    wanted = (request.parameters or {}).get("binary_data_output") is True
    for output in request.outputs or ():
        if output.name != OUTPUT:
            raise RowError(f"there is no output '{output.name[:60]}': ask for '{OUTPUT}'")
        wanted = (output.parameters or {}).get("binary_data", wanted) is True
    return wanted


def _json_values(tensor: Tensor) -> list[Any]:
    """Values of a JSON tensor, flat or nested as its shape says."""
    values = tensor.data
    if values is None:
        raise RowError(f"input '{tensor.name}' has neither data nor binary data: give it")
    if values and all(isinstance(value, list) for value in values):
        values = [value for inner in values for value in inner]
    kind = TYPES.get(tensor.datatype)
    if tensor.datatype == "BYTES":
        allowed: tuple[type, ...] = (str,)
    elif kind is None:
        raise RowError(f"input '{tensor.name}' has the datatype '{tensor.datatype[:20]}': use BYTES, FP32 or INT64")
    else:
        allowed = (bool,) if kind.kind == "b" else (int, float) if kind.kind == "f" else (int,)
    for number, value in enumerate(values):
        if type(value) not in allowed:
            raise RowError(f"input '{tensor.name}': value {number} is not of the datatype {tensor.datatype}")
    return values


def _binary_values(tensor: Tensor, data: memoryview) -> list[Any]:
    kind = TYPES.get(tensor.datatype)
    if kind is not None:
        if len(data) % kind.itemsize:
            raise BodyError(
                f"input '{tensor.name}' has {len(data):,} bytes, no multiple of {tensor.datatype}'s: correct it"
            )
        if kind.kind == "b":
            return (np.frombuffer(data, dtype=np.uint8) != 0).tolist()
        return np.frombuffer(data, dtype=kind).tolist()
    if tensor.datatype != "BYTES":
        raise RowError(f"input '{tensor.name}' has the datatype '{tensor.datatype[:20]}': use BYTES, FP32 or INT64")
    values, at, raw = [], 0, bytes(data)
    try:
        while at < len(raw):
            end = at + 4 + struct.unpack_from("<I", raw, at)[0]
            if end > len(raw):
                raise BodyError(f"input '{tensor.name}' ends inside of a text: correct binary_data_size")
            values.append(raw[at + 4 : end].decode())
            at = end
    except struct.error:
        raise BodyError(f"input '{tensor.name}' ends inside of a length: correct binary_data_size") from None
    except UnicodeDecodeError:
        raise RowError(f"input '{tensor.name}': value {len(values)} is not UTF-8") from None
    return values


def _column(tensor: Tensor, values: list[Any], reader: RowReader) -> list[Any]:
    """Values as a column of the rows: texts of a dense column as numbers, lists for a bag."""
    shape = tensor.shape
    if any(size < 0 for size in shape) or len(shape) not in (1, 2):
        raise RowError(
            f"input '{tensor.name}' has the shape {shape[:4]}: it must be [rows], or [rows, values] for a bag"
        )
    width = shape[1] if len(shape) == 2 else 1
    if shape[0] * width != len(values):
        raise RowError(f"input '{tensor.name}' has {len(values):,} values, but its shape is {shape}: correct it")
    reader.check_number(shape[0])
    if tensor.name in reader.bags:
        return [[value for value in values[row * width : (row + 1) * width] if value != ""] for row in range(shape[0])]
    if width != 1:
        raise RowError(f"input '{tensor.name}' has {width} values a row, and needs one: give it the shape [rows]")
    if reader.places[tensor.name] >= len(reader.dense):
        if values and isinstance(values[0], float):
            raise RowError(f"input '{tensor.name}' is text: give BYTES or integers, not {tensor.datatype}")
        return values
    return [_number(tensor.name, row, value) for row, value in enumerate(values)]


def _number(name: str, row: int, value: Any) -> float | None:
    """A value of a dense column; only text can say that it is missing."""
    if isinstance(value, bool):
        raise RowError(f"input '{name}': value {row} is a boolean, and needs a number")
    try:
        return number_of(value)
    except ValueRefusedError:
        raise RowError(
            f"input '{name}': value {row} is no finite number of float32: give BYTES with \"\" where it is missing"
        ) from None
