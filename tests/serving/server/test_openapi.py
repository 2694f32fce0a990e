"""Descriptions of the server: true, with examples that work, and no request that they allow ends in a 5xx."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdall.serving.server.run import Server
from tests.serving.server.running import Client, running

ARROW = "application/vnd.apache.arrow.stream"
"""JSON schema cannot say what a stream is, so that the generated ones are none."""
RULES_ACROSS_FIELDS = ("/rank", "/infer")
"""Routes with a rule that JSON schema cannot say: a column of a ranking is the user's or the items', and the data of an
input has the length that its shape says. So 422 is right for requests that the schema allows. It is for 1.0 in a
feature, too, which is an integer of JSON schema."""


def test_examples_are_answered(client: Client) -> None:
    status, found = client.json("GET", "/openapi.json")
    assert status == 200
    posts = {path: methods["post"] for path, methods in found["paths"].items() if "post" in methods}
    assert set(posts) == {"/score", "/rank", "/v2/models/{name}/infer"}
    for path, post in posts.items():
        example = post["requestBody"]["content"]["application/json"]["example"]
        status, answer = client.json("POST", path.replace("{name}", "model"), example)
        assert status == 200, answer


def test_every_get_route_that_is_described_is_there(client: Client) -> None:
    _, found = client.json("GET", "/openapi.json")
    for path, methods in found["paths"].items():
        if "get" in methods:
            status, headers, _ = client.ask("GET", path.replace("{name}", "model"))
            assert status == 200
            kind = headers["content-type"].partition(";")[0]
            assert kind in methods["get"]["responses"]["200"]["content"]


def test_pages_load_nothing_from_elsewhere(client: Client) -> None:
    for path in ("/", "/docs"):
        status, headers, body = client.ask("GET", path)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert not re.findall(rb"(?:src|href)=.?(?:https?:)?//|@import|url\(", body)
        assert headers["content-security-policy"].startswith("default-src 'self'")


def test_the_schema_names_columns_and_limits(client: Client) -> None:
    _, found = client.json("GET", "/schema")
    assert [column["name"] for column in found["dense"]] == ["I1", "I2", "I3"]
    assert [feature["name"] for feature in found["features"]] == ["C1", "C2", "C3"]
    assert found["limits"] == {"rows": 300, "values": 1 << 17, "bytes": 100_000}
    assert found["step"] == 7


def test_rules_that_a_json_schema_cannot_say_are_described_and_answered(client: Client) -> None:
    _, found = client.json("GET", "/openapi.json")
    schemas = found["components"]["schemas"]
    assert "either by the user or by every item" in schemas["Ranking"]["description"]
    assert "as many values as the product of `shape`" in schemas["Input"]["description"]
    for path, sentence in (("/rank", "by the user and by the item"), ("/v2/models/{name}/infer", "its shape is [2]")):
        post = found["paths"][path]["post"]
        wrong = post["requestBody"]["content"]["application/json"]["example"]
        if "user" in wrong:
            wrong["items"][0] |= wrong["user"]
        else:
            wrong["inputs"][0]["shape"] = [2]
        status, answer = client.json("POST", path.replace("{name}", "model"), wrong)
        assert status == 422
        assert sentence in answer["error"]
        assert "422" in post["responses"]


@pytest.mark.slow
def test_no_request_that_the_description_allows_or_not_ends_in_a_5xx(bundle: Path, bag_bundle: Path) -> None:
    """Generated requests, valid and not, to every route; answers must be as they are described."""
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    for path in (bundle, bag_bundle):
        with running(path) as server:
            _check_all(server, schemathesis, hypothesis, examples=6)


def _check_all(server: Server, schemathesis: Any, hypothesis: Any, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
    quiet = list(hypothesis.HealthCheck)
    settings = hypothesis.settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=quiet, database=None
    )
    responses = schemathesis.specs.openapi.checks
    wanted = [
        schemathesis.checks.not_a_server_error,
        responses.status_code_conformance,
        responses.content_type_conformance,
        responses.response_schema_conformance,
    ]
    rejection, acceptance = responses.negative_data_rejection, responses.positive_data_acceptance
    numbers = []
    for result in schema.get_all_operations():
        operation = result.ok()
        modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:

            @settings
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                answer = case.call()
                numbers.append(answer.status_code)
                own = [*wanted, rejection]
                has_point = b"got a number with a point" in answer.content
                if case.media_type != ARROW and not has_point and not case.path.endswith(RULES_ACROSS_FIELDS):
                    own.append(acceptance)
                case.validate_response(answer, checks=own)

            try:
                ask()
            except hypothesis.errors.Unsatisfiable:
                assert mode is schemathesis.GenerationMode.NEGATIVE  # a route without parameters has no wrong ones
    assert 200 in numbers
    assert 422 in numbers
    assert max(numbers) < 500
