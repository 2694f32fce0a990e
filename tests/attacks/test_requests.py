"""Attack on the server, with few requests; `attack_server` takes any number of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdall.serving.server.run import Server
from tests.attacks.requests import Answers, attack_server, exchange, ways_past_the_token
from tests.serving.server.running import made_bundle, running

TOKEN = "Abcdef0123456789"


@pytest.fixture(scope="module")
def bundle(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_bundle(data, tmp_path_factory.mktemp("bundle") / "model")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    with running(bundle, max_rows=300, max_bytes=200_000, read_timeout=2.0) as server:
        yield server


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_requests_are_refused_and_leave_nothing(server: Server, seed: int) -> None:
    answers = attack_server(server, seed, 400)
    assert answers.defects == []
    assert min(answers.counts[outcome] for outcome in ("answered", "refused", "closed")) > 10


def test_nothing_gets_past_the_token(bundle: Path) -> None:
    with running(bundle, token=TOKEN) as server:
        for request in ways_past_the_token(TOKEN):
            found = exchange(server, request)
            page = found.startswith(b"HTTP/1.1 200") and b"<title>Holdall: try a row" in found
            assert page or found[9:12] in (b"401", b"400"), (request, found[:300])
            assert b"C1" not in found
        right = b"GET /schema HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
        assert b"C1" in exchange(server, right)


@pytest.mark.parametrize(
    "found",
    [
        b"HTTP/1.1 500 Internal Server Error\r\n\r\n{}",
        b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "in /home/someone/model"}',
        b"HTTP/1.1 200 OK\r\n\r\n{}HTTP/1.1 503 Service Unavailable\r\n\r\n{}",
    ],
)
def test_the_judge_finds_defects(found: bytes) -> None:
    answers = Answers()
    answers.judge("none", b"", found)
    assert len(answers.defects) == 1
