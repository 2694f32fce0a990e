"""Open Inference Protocol, as tritonclient and plain JSON speak it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from holdall.serving.scorer import Scorer, load
from holdall.serving.server.run import Server
from tests.serving.server.running import Client, running
from tests.serving.server.test_score import text_rows

INFER = "/v2/models/model/infer"


def tensors(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Inputs in JSON, with text where a number may be missing."""
    found = []
    for name in rows[0]:
        values = ["" if row[name] is None else str(row[name]) for row in rows]
        found.append({"name": name, "datatype": "BYTES", "shape": [len(rows)], "data": values})
    return found


def test_json_tensors(client: Client, scorer: Scorer) -> None:
    rows = text_rows(8)
    status, answer = client.json("POST", INFER, {"id": "17", "inputs": tensors(rows)})
    assert status == 200
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("17", "model", "7")
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("score", "FP32", [8])
    assert np.array_equal(np.float32(output["data"]), scorer.score(rows))


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_tritonclient(server: Server, scorer: Scorer, binary_in: bool, binary_out: bool | None) -> None:
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(server.address.removeprefix("http://"))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("model")
    assert not client.is_model_ready("other")
    described = client.get_model_metadata("model")
    rows = [
        row | {name: 1.5 if row[name] is None else row[name] for name in ("I1", "I2", "I3")} for row in text_rows(9)
    ]
    inputs = []
    for one in described["inputs"]:
        is_text = one["datatype"] == "BYTES"
        values = [row[one["name"]] for row in rows]
        array = np.array([value or "" for value in values], dtype=np.object_) if is_text else np.float32(values)
        inputs.append(triton.InferInput(one["name"], [len(rows)], one["datatype"]))
        inputs[-1].set_data_from_numpy(array, binary_data=binary_in)
    outputs = None if binary_out is None else [triton.InferRequestedOutput("score", binary_data=binary_out)]
    result = client.infer("model", inputs, outputs=outputs, request_id="x")
    assert result.get_response()["id"] == "x"
    assert np.array_equal(result.as_numpy("score"), scorer.score(rows))
    client.close()


def test_bags_are_rows_of_a_tensor(bag_bundle: Path) -> None:
    rows = [
        {"I1": 1.0, "I2": 2.0, "C1": "00000001", "C2": ["00000001", "00000003"], "C3": []},
        {"I1": 1.0, "I2": 2.0, "C1": "", "C2": ["00000002"], "C3": []},
    ]
    inputs = [
        {"name": "I1", "datatype": "FP32", "shape": [2, 1], "data": [[1.0], [1.0]]},
        {"name": "I2", "datatype": "INT64", "shape": [2], "data": [2, 2]},
        {"name": "C1", "datatype": "BYTES", "shape": [2], "data": ["00000001", ""]},
        {"name": "C2", "datatype": "BYTES", "shape": [2, 2], "data": ["00000001", "00000003", "00000002", ""]},
        {"name": "C3", "datatype": "BYTES", "shape": [2, 0], "data": []},
    ]
    with running(bag_bundle) as server:
        client = Client(server)
        status, answer = client.json("POST", INFER, {"inputs": inputs})
        assert status == 200, answer
        assert np.array_equal(np.float32(answer["outputs"][0]["data"]), load(bag_bundle).score(rows))
        assert client.json("GET", "/v2/models/model")[1]["inputs"][-1]["shape"] == [-1, -1]
        inputs[-1]["shape"] = [10**6, 0]  # a million empty bags take no bytes
        status, answer = client.json("POST", INFER, {"inputs": inputs})
        assert (status, "1,000,000 rows are more than" in answer["error"]) == (413, True), answer
        client.http.close()


def test_versions(client: Client) -> None:
    assert client.json("GET", "/v2/models/model/versions/7/ready")[0] == 200
    assert client.json("GET", "/v2/models/model/versions/8")[0] == 404
    body = {"inputs": tensors(text_rows(1))}
    assert client.json("POST", "/v2/models/model/versions/7/infer", body)[0] == 200
    assert client.json("POST", "/v2/models/model/versions/8/infer", body)[0] == 404


def test_a_name_is_read_from_its_url(bundle: Path) -> None:
    with running(bundle, name="clicks of the new café") as server:
        client = Client(server)
        path = f"/v2/models/{quote('clicks of the new café')}"
        assert client.json("GET", f"{path}/ready")[0] == 200
        assert client.json("POST", f"{path}/infer", {"inputs": tensors(text_rows(1))})[0] == 200
        client.http.close()


def change(number: int, **fields: Any) -> dict[str, Any]:
    inputs = tensors(text_rows(2))
    inputs[number] |= fields
    return {"inputs": inputs}


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({}, 400, "missing required field `inputs`"),
        ({"inputs": []}, 422, "input 'I1' is missing"),
        (change(0, data=["x", "1"]), 422, "input 'I1': value 0 is no finite number"),
        (change(0, data=["1", "1_000"]), 422, "value 1 is no finite number"),
        (change(0, data=["1", " 5 "]), 422, "value 1 is no finite number"),
        (change(0, data=["1", "\u0661"]), 422, "value 1 is no finite number"),
        (change(0, data=["nan", "1"]), 422, "value 0 is no finite number"),
        (change(0, datatype="FP32", data=[1e300, 1]), 422, "no finite number of float32"),
        (change(0, datatype="BOOL", data=[True, False]), 422, "is a boolean"),
        (change(0, datatype="COMPLEX", data=[1, 1]), 422, "has the datatype 'COMPLEX'"),
        (change(3, datatype="FP32", data=[1.0, 2.0]), 422, "input 'C1' is text"),
        (change(3, data=["a", 1]), 422, "value 1 is not of the datatype BYTES"),
        (change(3, shape=[3]), 422, "has 2 values, but its shape is [3]"),
        (change(3, shape=[-1]), 422, "has the shape [-1]"),
        (change(3, shape=[1, 2]), 422, "has 2 values a row, and needs one"),
        (change(3, shape=[10**30]), 422, "has 2 values, but its shape is"),
        (change(3, name="C9"), 422, "input 'C9' is not one of the model"),
        (change(3, name="I1"), 422, "input 'I1' is given twice"),
        (change(3, shape=[1], data=["a"]), 422, "inputs have 1 to 2 rows"),
        (change(3, data=None), 422, "has neither data nor binary data"),
        (change(3, parameters={"binary_data_size": 5}), 400, "binary_data_size that the body does not have"),
        (change(3, parameters={"binary_data_size": -1}), 400, "binary_data_size that the body does not have"),
        ({**change(0), "outputs": [{"name": "other"}]}, 422, "there is no output 'other'"),
    ],
)
def test_wrong_requests_are_refused(client: Client, body: dict[str, Any], status: int, sentence: str) -> None:
    found, answer = client.json("POST", INFER, body)
    assert (found, sentence in answer["error"]) == (status, True), answer


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (b"\x01\x00\x00\x00a\x01\x00\x00", "ends inside of a length"),
        (b"\xff\x00\x00\x00a", "ends inside of a text"),
        (b"\x01\x00\x00\x00\xff\x00\x00\x00\x00", "value 0 is not UTF-8"),
    ],
    ids=["length", "text", "encoding"],
)
def test_wrong_binary_texts_are_refused(client: Client, texts: bytes, sentence: str) -> None:
    body = change(3, data=None, parameters={"binary_data_size": len(texts)})
    head = json.dumps(body).encode()
    headers = {"inference-header-content-length": str(len(head))}
    status, answer = client.json("POST", INFER, head + texts, headers)
    assert (status in (400, 422), sentence in answer["error"]) == (True, True), answer
    for wrong in ("x", "-1", str(len(head) + 1000), "9" * 30, "0" * 5000):
        assert client.json("POST", INFER, head + texts, {"inference-header-content-length": wrong})[0] == 400
    assert client.json("POST", INFER, head + texts + b"more", headers)[0] in (400, 422)
