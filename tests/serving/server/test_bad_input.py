"""Rows and bodies that cannot be scored: a sentence that names row and feature, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdall.serving.server.arrow_rows import ArrowBody
from holdall.serving.server.row_types import BodyError
from holdall.serving.server.run import Server
from tests.serving.server.running import Client, running
from tests.serving.server.test_score import ARROW, as_stream, text_rows

Row = dict[str, Any]


def without(row: Row, name: str) -> Row:
    return {key: value for key, value in row.items() if key != name}


def text(rows: list[Row]) -> str:
    return json.dumps({"rows": rows})


JSON_CASES: dict[str, tuple[Callable[[Row], Any], int, str]] = {
    "missing feature": (lambda row: text([row, without(row, "C2")]), 422, "row 1: 'C2' is missing"),
    "missing number": (lambda row: text([without(row, "I1")]), 422, "row 0: 'I1' is missing"),
    "list for text": (lambda row: text([row | {"C1": ["a"]}]), 422, "row 0: 'C1': expected text, a whole number"),
    "object for text": (lambda row: text([row | {"C1": {}}]), 422, "row 0: 'C1': expected text"),
    "fraction for text": (lambda row: text([row, row | {"C3": 1.5}]), 422, "row 1: 'C3': expected text"),
    "text for number": (lambda row: text([row | {"I2": "7"}]), 422, "row 0: 'I2': expected a number or null"),
    "boolean for number": (lambda row: text([row | {"I2": True}]), 422, "row 0: 'I2': expected a number"),
    "NaN": (lambda row: text([row | {"I1": float("nan")}]), 400, "the body is no JSON"),
    "infinity": (lambda row: text([row | {"I1": float("inf")}]), 400, "the body is no JSON"),
    "huge number": (lambda row: text([row | {"I1": 0}]).replace("0,", "1e999,", 1), 422, "Number out of range"),
    "too large for float32": (lambda row: text([row, row | {"I1": 1e39}]), 422, "I1"),
    "long text": (lambda row: text([row, row | {"C1": "x" * 70_000}]), 422, "C1"),
    "many rows": (lambda row: text([{}] * 20_000), 422, "row 0: 'I1' is missing"),
    "too many rows": (lambda row: text([row] * 301), 413, "301 rows are more than the 300 of one request"),
    "no rows": (lambda row: text([]), 422, "the list is empty"),
    "row is a list": (lambda row: text([[1, 2]]), 422, "row 0: expected object, got array"),  # type: ignore[list-item]
    "rows is an object": (lambda row: {"rows": {}}, 422, "expected array, got object"),
    "no object": (lambda row: [row], 422, "expected object, got array"),
    "another name": (lambda row: {"Rows": [row]}, 422, "unknown field Rows"),
    "one name more": (lambda row: {"rows": [row], "more": 1}, 422, "unknown field more"),
    "empty": (lambda row: b"", 400, "the body is no JSON"),
    "cut off": (lambda row: text([row])[:-3].encode(), 400, "the body is no JSON"),
    "two documents": (lambda row: text([row]).encode() * 2, 400, "the body is no JSON"),
    "broken UTF-8": (
        lambda row: text([row]).replace("00000000", "\udcff").encode("utf-8", "surrogateescape"),
        400,
        "UTF-8",
    ),
    "half a pair": (lambda row: text([row]).replace("00000000", "\\ud800", 1), 400, "the body is no JSON"),
    "UTF-16": (lambda row: text([row]).encode("utf-16"), 400, "the body is no JSON"),
    "deep": (lambda row: b'{"rows": ' + b"[" * 90_000, 422, "row 0: expected object, got array"),
    "deep in an ignored name": (lambda row: b'{"rows": [{"x": ' + b"[" * 90_000, 400, "nested too deeply"),
    "deep object": (lambda row: b'{"rows": [{"x": ' + b'{"a":' * 15_000, 400, "nested too deeply"),
}


@pytest.mark.parametrize("name", JSON_CASES)
def test_json_that_cannot_be_scored(server: Server, row: Row, name: str) -> None:
    make, status, sentence = JSON_CASES[name]
    client = Client(server)
    body = make(row)
    found, answer = client.json("POST", "/score", body.encode() if isinstance(body, str) else body)
    assert (found, sentence in answer["error"]) == (status, True), answer
    assert list(answer) == ["error"]
    assert "\n" not in answer["error"]
    assert client.json("POST", "/score", {"rows": [row]})[0] == 200  # on the same connection
    client.http.close()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"user": {}, "items": []}, "the list is empty"),
        ({"user": {"I1": "x"}, "items": [{}]}, "user: 'I1': expected a number"),
        ({"user": {}, "items": [{"C1": 1.5}]}, "item 0: 'C1': expected text"),
        ({"user": {}, "items": [{}]}, "item 0: 'I1' is missing in user and item"),
        ({"user": {}}, "'items' is missing"),
    ],
)
def test_rankings_that_cannot_be_scored(client: Client, body: Any, sentence: str) -> None:
    status, answer = client.json("POST", "/rank", body)
    assert (status, sentence in answer["error"]) == (422, True), answer


def test_a_ranking_needs_features_of_items(client: Client, row: Row) -> None:
    status, answer = client.json("POST", "/rank", {"user": row, "items": [{}]})
    assert (status, "the user has every feature" in answer["error"]) == (422, True)


def test_too_many_values_are_refused_before_they_are_scored(bag_bundle: Path) -> None:
    row = {"I1": 1, "I2": 2, "C1": "a", "C2": ["b"] * 6, "C3": ["c"] * 5}
    sentence = "22 values in bags and sequences are more than the 20 of one request"
    user = {name: value for name, value in row.items() if name != "C1"}
    tensors = [{"name": name, "datatype": "FP32", "shape": [2], "data": [1, 1]} for name in ("I1", "I2")]
    tensors += [{"name": "C1", "datatype": "BYTES", "shape": [2], "data": ["a", "a"]}]
    tensors += [
        {"name": name, "datatype": "BYTES", "shape": [2, width], "data": ["b"] * 2 * width}
        for name, width in (("C2", 6), ("C3", 5))
    ]
    with running(bag_bundle, max_values=20) as server:
        client = Client(server)
        answers = [
            client.json("POST", "/score", {"rows": [row] * 2}),
            client.json("POST", "/score", as_stream(pa.Table.from_pylist([row] * 2)), ARROW),
            client.json("POST", "/rank", {"user": user, "items": [{"C1": "a"}] * 2}),
            client.json("POST", "/v2/models/model/infer", {"inputs": tensors}),
        ]
        for status, answer in answers:
            assert (status, sentence in answer["error"]) == (413, True), answer
        assert client.json("POST", "/score", {"rows": [row]})[0] == 200
        client.http.close()


def stream(**columns: pa.Array) -> bytes:
    table = pa.Table.from_pylist(text_rows(6))
    for name, column in columns.items():
        place = table.column_names.index(name)
        table = table.remove_column(place) if column is None else table.set_column(place, name, column)
    return as_stream(table, batch_rows=100)


ARROW_CASES: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "empty": (lambda: b"", 400, "no Arrow IPC stream"),
    "no Arrow": (lambda: b"ARROW1\0\0" * 100, 400, "no Arrow IPC stream"),
    "cut off": (lambda: stream()[:700], 400, "no Arrow IPC stream"),
    "missing column": (lambda: stream(C2=None), 422, "'C2' is missing"),
    "fraction for text": (lambda: stream(C1=pa.array([0.5] * 6)), 422, "C1"),
    "text for number": (lambda: stream(I1=pa.array(["x"] * 6)), 422, "I1"),
    "NaN": (lambda: stream(I1=pa.array([float("nan")] * 6)), 422, "I1"),
    "list for text": (lambda: stream(C1=pa.array([["a"]] * 6)), 422, "C1"),
    "lists of nulls": (
        lambda: stream(C1=pa.ListArray.from_arrays(pa.array([0, *[10**6] * 6]), pa.nulls(10**6))),
        422,
        "'C1': its lists have 1,000,000 values, more than the stream has bytes",
    ),
    "bytes": (lambda: stream(C1=pa.array([b"\xff"] * 6)), 422, "'C1': columns of the Arrow type binary"),
    "views": (
        lambda: stream(C1=pa.array(["a"] * 6, pa.string_view())),
        422,
        "Arrow type string_view",
    ),
    "time": (lambda: stream(I1=pa.array([0] * 6, pa.timestamp("s"))), 422, "'I1': columns of the Arrow type timestamp"),
    "too many rows": (
        lambda: as_stream(pa.Table.from_pylist(text_rows(1) * 301), batch_rows=301),
        413,
        "301 rows are more than the 300",
    ),
    "no rows": (lambda: as_stream(pa.Table.from_pylist(text_rows(2)).slice(0, 0)), 422, "the list is empty"),
}


@pytest.mark.parametrize("name", ARROW_CASES)
def test_arrow_that_cannot_be_scored(client: Client, name: str) -> None:
    make, status, sentence = ARROW_CASES[name]
    found, answer = client.json("POST", "/score", make(), ARROW)
    assert (found, sentence in answer["error"]) == (status, True), answer


def test_a_stream_of_very_many_messages_is_refused() -> None:
    empty = pa.record_batch({"x": pa.array([], pa.null())}).serialize().to_pybytes()
    assert ArrowBody.of(stream()[:-8] + 100 * empty).num_rows == 6
    with pytest.raises(BodyError, match="more than 8,192 messages: write larger batches"):
        ArrowBody.of(stream()[:-8] + 9000 * empty)


def test_a_text_that_is_no_utf8_in_arrow_is_refused(client: Client) -> None:
    texts = pa.array([b"\xff\xfe"] * 6, pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 6, texts.buffers())
    found, answer = client.json("POST", "/score", stream(C1=broken), ARROW)
    assert (found, "UTF8" in answer["error"]) == (400, True), answer


def test_damaged_arrow_never_ends_the_server(client: Client, row: Row) -> None:
    """Every byte of the metadata of a stream changed, one at a time."""
    whole = stream()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        status, _, _ = client.ask("POST", "/score", bytes(damaged), ARROW)
        assert status in (200, 400, 413, 422)
    assert client.json("POST", "/score", {"rows": [row]})[0] == 200
