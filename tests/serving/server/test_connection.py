"""HTTP of a connection: order of answers, limits, and senders that are slow, broken or gone."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest

from holdall.serving.server.connection import Answer, Connection, Request
from holdall.serving.server.run import Server
from tests.serving.server.running import Client, raw, running


def post(body: bytes, *headers: str, path: str = "/score", version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answers)]


@pytest.fixture
def body(row: dict[str, Any]) -> bytes:
    return json.dumps({"rows": [row]}).encode()


def connect(server: Server) -> socket.socket:
    place = urlsplit(server.address)
    return socket.create_connection((place.hostname or "", place.port or 0), timeout=30)


def test_requests_sent_ahead_are_answered_in_order(server: Server, body: bytes, row: dict[str, Any]) -> None:
    two = json.dumps({"rows": [row, row]}).encode()
    health = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    found = raw(server, post(body) + health + post(two) + post(b"{") + post(body, "Connection: close"))
    assert statuses(found) == [200, 200, 200, 400, 200]
    bodies = re.findall(rb"\r\n\r\n(\{.*?\})(?=HTTP|$)", found)
    assert [len(json.loads(answer).get("scores", [])) for answer in bodies] == [1, 0, 2, 0, 1]


def test_very_many_requests_ahead_are_answered(server: Server, body: bytes) -> None:
    found = raw(server, post(b"{") * 2000 + post(body) * 100 + post(body, "Connection: close"))
    assert statuses(found) == [400] * 2000 + [200] * 101


def test_chunked_bodies(server: Server, body: bytes) -> None:
    head = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:8], body[8:])) + b"0\r\n\r\n"
    assert statuses(raw(server, head + b"Connection: close\r\n\r\n" + chunks)) == [200]
    endless = b"ffff\r\n" + b" " * 0xFFFF + b"\r\n"
    assert statuses(raw(server, head + b"\r\n" + endless * 2)) == [413]


def test_lengths_that_contradict_are_refused(server: Server, body: bytes) -> None:
    assert statuses(raw(server, post(body, "Transfer-Encoding: chunked"))) == [400]
    assert statuses(raw(server, post(body, "Content-Length: 1"))) == [400]


def test_what_is_not_http_is_refused(server: Server) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 100, b"nonsense\r\n\r\n"):
        assert statuses(raw(server, sent)) == [400]


def test_a_long_body_is_refused_before_it_is_sent(server: Server) -> None:
    found = raw(server, b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n")
    assert statuses(found) in ([413], [400])
    found = raw(server, b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 100001\r\n\r\n")
    assert statuses(found) == [413]
    assert b"connection: close" in found
    assert b"100,000 bytes" in found


def test_long_headers_are_refused(server: Server, body: bytes) -> None:
    assert statuses(raw(server, post(body, f"X: {'x' * 20_000}"))) == [431]
    assert statuses(raw(server, b"GET / HTTP/1.1\r\nX: " + b"x" * 300_000)) == [431]  # never ends
    assert statuses(raw(server, b"GET /" + b"x" * 300_000)) == [431]
    many = [f"X-{number}: {number}" for number in range(3000)]
    assert statuses(raw(server, post(body, *many))) == [431]


def test_trailers_are_bounded_and_change_nothing(server: Server, body: bytes) -> None:
    head = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    chunks = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    last = b"Content-Type: text/plain\r\n\r\n"
    assert statuses(raw(server, head + b"Connection: close\r\n\r\n" + chunks + last)) == [200]
    many = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(300))
    assert statuses(raw(server, head + b"\r\n" + chunks + many)) == [431]
    assert statuses(raw(server, head + b"\r\n" + chunks + b"X: " + b"x" * 300_000)) == [431]


class AtOnce:
    """Handler that answers every request at once."""

    max_bytes, max_connections, read_timeout, idle_timeout = 1000, 10, 10.0, 10.0

    def handle(self, request: Request) -> None:
        request.connection.answer(request, Answer(200, b"{}"))

    def early(self, request: Request) -> Answer | None:
        return None

    def reserve(self, num_bytes: int) -> bool:
        return True

    def observe(self, request: Request, status: int) -> None:
        pass


def test_requests_wait_while_their_answers_are_not_read() -> None:
    connection = Connection(AtOnce(), SimpleNamespace(connections=set(), default_headers=[]))
    transport = Mock(is_closing=lambda: False)
    transport.write.side_effect = lambda data: connection.pause_writing()
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 40)
    assert (transport.write.call_count, transport.pause_reading.call_count) == (1, 1)
    for _ in range(40):
        connection.resume_writing()
    assert (transport.write.call_count, transport.resume_reading.call_count) == (40, 1)


def test_a_slow_sender_is_refused(bundle: Path, body: bytes) -> None:
    with running(bundle, read_timeout=0.3) as server:
        for sent in (b"POST /sc", post(body)[:-1]):
            assert statuses(raw(server, sent)) == [408]


def test_a_sender_that_resets_leaves_nothing_behind(server: Server, body: bytes) -> None:
    for sent in (post(body), post(body)[:-1], b"POST", post(body) * 50):
        with connect(server) as connection:
            connection.sendall(sent)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert statuses(raw(server, post(body, "Connection: close"))) == [200]
    deadline = time.monotonic() + 30
    while (server.front.queue.num_rows or server.front.body_bytes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (server.front.queue.num_rows, server.front.body_bytes) == (0, 0)


def test_a_sender_that_only_closes_its_half_is_answered(server: Server, body: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(post(body) * 2)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
    assert statuses(found) == [200, 200]


def test_expect_continue(server: Server, body: bytes) -> None:
    whole = post(body, "Expect: 100-continue", "Connection: close")
    head = whole[: -len(body)]
    with connect(server) as connection:
        connection.sendall(head)
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert statuses(connection.recv(1000)) == [200]


def test_a_request_to_upgrade_is_answered_in_http_1(server: Server, body: bytes) -> None:
    """Some clients offer HTTP/2 with every request."""
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    found = raw(server, post(body, *upgrade) + post(body, "Connection: close"))
    assert statuses(found) == [200, 200]


def test_http_1_0(server: Server, body: bytes) -> None:
    found = raw(server, post(body, version="1.0"))
    assert statuses(found) == [200]
    assert b"connection: close" in found


def test_head_has_no_body(client: Client) -> None:
    for _ in range(2):
        status, headers, content = client.ask("HEAD", "/schema")
        assert (status, content) == (200, b"")
        assert int(headers["content-length"]) > 100


def test_methods_and_paths_that_do_not_exist(client: Client) -> None:
    assert client.json("GET", "/score")[0] == 405
    assert client.json("DELETE", "/schema", {})[0] == 405
    for path in ("/nothing", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v2/models/other"):
        assert client.json("GET", path)[0] == 404
    assert client.json("POST", "/v2/models/other/infer", {"inputs": []})[0] == 404


def test_a_compressed_body_is_refused(client: Client) -> None:
    assert client.json("POST", "/score", b"\x1f\x8b", {"content-encoding": "gzip"})[0] == 415
