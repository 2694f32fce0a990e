"""Scores over HTTP are those of the scorer, to the bit, whatever the form of the rows and the batch they were in."""

from __future__ import annotations

import io
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdall.serving import encode_arrays
from holdall.serving.scorer import Scorer, load
from holdall.serving.server.arrow_rows import ArrowBody, ArrowReader
from holdall.serving.server.row_types import RowReader, TooManyRowsError
from holdall.serving.server.run import Server
from tests.serving.server.running import Client, running

ARROW = {"content-type": "application/vnd.apache.arrow.stream"}


def made_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with values of every type, some of them unseen or missing."""
    draw = random.Random(seed)

    def text(most: int) -> Any:
        return draw.choice([f"{draw.randrange(most):08x}", f"{draw.randrange(most):08x}", None, "", 17, True])

    return [
        {
            **{name: draw.choice([draw.randrange(100), 2.5, None]) for name in ("I1", "I2", "I3")},
            **{name: text(most) for name, most in (("C1", 50), ("C2", 7), ("C3", 400))},
        }
        for _ in range(number)
    ]


def as_stream(table: pa.Table, codec: str | None = None, batch_rows: int = 5) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
        stream.write_table(table, max_chunksize=batch_rows)
    return sink.getvalue()


def text_rows(number: int) -> list[dict[str, Any]]:
    """Rows that have one type a column."""
    rows = made_rows(number)
    for row in rows:
        row.update({name: "17" for name in ("C1", "C2", "C3") if isinstance(row[name], int)})
    return rows


def test_json_rows(client: Client, scorer: Scorer) -> None:
    rows = made_rows(20)
    status, answer = client.json("POST", "/score", {"rows": rows})
    assert status == 200
    assert np.array_equal(np.float32(answer["scores"]), scorer.score(rows))
    assert len(set(answer["scores"])) > 10


def test_names_that_the_model_does_not_have_are_ignored(client: Client, row: dict[str, Any]) -> None:
    plain = client.json("POST", "/score", {"rows": [row]})
    assert client.json("POST", "/score", {"rows": [row | {"label": 1, "more": [{}]}]}) == plain


@pytest.mark.parametrize("table_from", [1, 1000])
def test_arrow_rows(table_from: int, client: Client, scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_arrays, "TABLE_FROM", table_from)
    rows = text_rows(12)
    table = pa.Table.from_pylist(rows)
    for form in (table, table.set_column(3, "C1", table["C1"].dictionary_encode())):
        status, headers, body = client.ask("POST", "/score", as_stream(form), ARROW)
        assert status == 200
        assert headers["content-type"] == ARROW["content-type"]
        scores = pa.ipc.open_stream(body).read_all()
        assert scores.column_names == ["score"]
        assert np.array_equal(scores["score"].to_numpy(), scorer.score(rows))


def test_ranking(client: Client, scorer: Scorer) -> None:
    first, *rest = made_rows(9)
    user = {name: first[name] for name in ("I1", "I2", "I3", "C1")}
    items = [{name: row[name] for name in ("C2", "C3")} for row in rest]
    status, answer = client.json("POST", "/rank", {"user": user, "items": items})
    assert status == 200
    found = np.float32(answer["scores"])
    assert np.array_equal(found, scorer.rank(user, items))
    np.testing.assert_allclose(found, scorer.score([user | item for item in items]), rtol=1e-6)


def test_bags(bag_bundle: Path) -> None:
    rows = [
        {"I1": 1, "I2": 2, "C1": "00000001", "C2": ["00000001", 3], "C3": []},
        {"I1": 1, "I2": 2, "C1": None, "C2": None, "C3": ["00000002", "", "never"]},
    ]
    with running(bag_bundle) as server:
        client = Client(server)
        status, answer = client.json("POST", "/score", {"rows": rows})
        assert status == 200
        assert np.array_equal(np.float32(answer["scores"]), load(bag_bundle).score(rows))
        status, answer = client.json("POST", "/score", {"rows": [rows[0] | {"C2": "00000001"}]})
        assert (status, answer["error"].startswith("row 0: 'C2': expected")) == (422, True)
        _, schema = client.json("GET", "/schema")
        assert client.json("POST", "/score", schema["example"])[0] == 200
        client.http.close()


def test_requests_at_the_same_time_get_their_own_scores(server: Server, scorer: Scorer) -> None:
    """Also when rows of other requests in the same batch are refused by the scorer."""

    def ask(number: int) -> None:
        client = Client(server)
        for turn in range(5):
            rows = text_rows(1 + (number + turn) % 7) if number % 2 else made_rows(1 + number, seed=turn)
            if number == 4:
                status, answer = client.json("POST", "/score", {"rows": [*rows, rows[0] | {"C1": "x" * 70_000}]})
                assert status == 422
                assert "C1" in answer["error"]
            elif number % 2:
                _, _, body = client.ask("POST", "/score", as_stream(pa.Table.from_pylist(rows)), ARROW)
                found = pa.ipc.open_stream(body).read_all()["score"].to_numpy()
                np.testing.assert_allclose(found, expected[json.dumps(rows)], rtol=1e-6)
            else:
                _, answer = client.json("POST", "/score", {"rows": rows})
                np.testing.assert_allclose(np.float32(answer["scores"]), expected[json.dumps(rows)], rtol=1e-6)
        client.http.close()

    wanted = [text_rows(number) for number in range(1, 8)]
    wanted += [made_rows(1 + number, seed=turn) for number in range(0, 9, 2) for turn in range(5)]
    expected = {json.dumps(rows): scorer.score(rows) for rows in wanted}
    with ThreadPoolExecutor(9) as pool:
        list(pool.map(ask, range(9)))


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_streams_are_refused(client: Client, codec: str) -> None:
    status, answer = client.json("POST", "/score", as_stream(pa.Table.from_pylist(text_rows(12)), codec), ARROW)
    assert (status, "compressed" in answer["error"]) == (400, True)


def test_a_dictionary_of_long_texts_is_refused(client: Client) -> None:
    table = pa.Table.from_pylist(text_rows(250))
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 250, pa.int8()), ["x" * 80_000])
    table = table.set_column(3, "C1", column)
    status, answer = client.json("POST", "/score", as_stream(table, batch_rows=250), ARROW)
    assert status == 422
    assert "20,000,000 bytes" in answer["error"]


def test_the_answer_names_the_bundle(client: Client, scorer: Scorer, row: dict[str, Any]) -> None:
    _, headers, _ = client.ask("POST", "/score", {"rows": [row]})
    assert scorer.fingerprint.startswith(headers["holdall-bundle"])


def test_the_values_of_a_stream_are_bounded_from_its_headers(bag_bundle: Path) -> None:
    with running(bag_bundle) as server:
        assert server.front.served is not None
        reader = server.front.served.reader
    names = [name for name in reader.names if name not in reader.bags]
    bags = [[str(value) for value in range(number)] for number in (5, 0, 12)]
    table = pa.table({name: [1, 2, 3] for name in names} | dict.fromkeys(sorted(reader.bags), bags))
    assert len(reader.bags) == 2
    for batch_rows in (1, 5):
        assert ArrowBody.of(as_stream(table, batch_rows=batch_rows)).most_values(reader) == 2 * 17


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_values_of_bags_as_texts_are_counted(is_dictionary: bool, bag_bundle: Path) -> None:
    scorer = load(bag_bundle)
    reader = RowReader(scorer.schema, scorer.reads, max_rows=10, max_values=20)
    reader.separators = dict.fromkeys(reader.bags, "|")
    text = pa.array(["a|b|c|d|e|f"] * 3)
    bag = text.dictionary_encode() if is_dictionary else text
    table = pa.table({name: bag if name in reader.bags else [1, 2, 3] for name in reader.names})
    with pytest.raises(TooManyRowsError, match="36 values in bags"):
        ArrowReader(reader).columns(ArrowBody.of(as_stream(table)))
