"""Attacker of the server: requests that are damaged, cut, mixed, or made to get past its token.

    attack_server(server, seed=0, number=1000)

Every request must end `answered` (200, and only for a request that was not changed or changed in bytes that do not
matter), `refused` (4xx, one sentence of JSON) or `closed` (no HTTP that could be answered). A 5xx, an answer that shows
a path or a trace, no answer in time, and a server that has not given back its memory are defects.
"""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from holdall.serving.server.run import Server

LIMIT_SECONDS = 20.0
LEAKS = re.compile(rb"Traceback|File \"|\.py\b|/usr/|/home/|/tmp/|/root/|site-packages|0x[0-9a-f]{8}")


@dataclass
class Answers:
    """Requests by outcome, and what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)

    def judge(self, attack: str, sent: bytes, found: bytes) -> None:
        """Judge all that was answered to some bytes."""
        heads = re.findall(rb"(?:^|(?<=[}\]>\n]))HTTP/1\.1 (\d{3})", found)
        heads = [status for status in heads if status != b"100"]
        wrong = next((status for status in heads if not 200 <= int(status) < 500), None)
        leak = LEAKS.search(found)
        if wrong is not None or leak is not None:
            reason = f"status {wrong.decode()}" if wrong is not None else f"shows {leak.group()!r}"  # type: ignore[union-attr]
            self.counts["defect"] += 1
            self.defects.append(f"{attack}: {reason}: {sent[:300]!r} -> {found[:300]!r}")
        elif not heads:
            self.counts["closed"] += 1
        else:
            self.counts["answered" if all(status == b"200" for status in heads) else "refused"] += 1


def valid_requests(server: Server) -> list[bytes]:
    """A request to each route, as bytes."""
    served = server.front.served
    assert served is not None
    row = served.example
    names = list(row)
    half = len(names) // 2
    user, item = ({name: row[name] for name in part} for part in (names[:half], names[half:]))
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": [str(row[name])]}
        for name in names
        if not isinstance(row[name], list)
    ]
    bodies: dict[str, object] = {"/score": {"rows": [row, row]}, "/rank": {"user": user, "items": [item]}}
    bodies["/v2/models/model/infer"] = {"inputs": inputs}
    found = [
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(json.dumps(body))}\r\n\r\n{json.dumps(body)}".encode()
        for path, body in bodies.items()
    ]
    gets = ("/", "/docs", "/schema", "/metrics", "/openapi.json", "/v2", "/v2/models/model")
    return found + [f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for path in gets]


def flip(draw: random.Random, request: bytes) -> bytes:
    changed = bytearray(request)
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def cut(draw: random.Random, request: bytes) -> bytes:
    return request[: draw.randrange(len(request))]


def doubled(draw: random.Random, request: bytes) -> bytes:
    start = draw.randrange(len(request))
    return request[: draw.randrange(len(request))] + request[start:]


def header(draw: random.Random, request: bytes) -> bytes:
    """One header more, of those that servers and proxies understand in different ways."""
    lines = (
        b"Content-Length: 0",
        b"Content-Length: +5",
        b"Content-Length: 5, 5",
        b"Content-Length : 5",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding: chunked, identity",
        b"Expect: 100-continue",
        b"Expect: nonsense",
        b"Upgrade: websocket\r\nConnection: Upgrade",
        b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings",
        b"Inference-Header-Content-Length: " + str(draw.randrange(-5, 10**6)).encode(),
        b"Content-Encoding: gzip",
        b"Content-Type: application/vnd.apache.arrow.stream",
        b"Authorization: Bearer " + bytes(draw.randrange(256) for _ in range(40)),
        b" folded: line",
        b"X: " + b"x" * draw.randrange(20_000),
        b"\x00: \x00",
    )
    first, _, rest = request.partition(b"\r\n")
    return first + b"\r\n" + draw.choice(lines) + b"\r\n" + rest


def first_line(draw: random.Random, request: bytes) -> bytes:
    """Another method, path or version."""
    method = draw.choice((b"GET", b"POST", b"PUT", b"OPTIONS", b"CONNECT", b"TRACE", b"PRI", b"HEAD", b"get"))
    paths = (b"*", b"/score/", b"//score", b"/./score", b"/%73core", b"http://x/score", b"/score?x=%00", b"/\xff")
    path = draw.choice(paths)
    version = draw.choice((b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.10", b""))
    return b" ".join((method, path, version)) + b"\r\n" + request.partition(b"\r\n")[2]


def value(draw: random.Random, request: bytes) -> bytes:
    """Another JSON value in the place of one, with the right length."""
    head, _, body = request.partition(b"\r\n\r\n")
    places = list(re.finditer(rb'"[^"]*"|\b\d+\b', body))
    if not places:
        return request
    nasty = [b"null", b"[]", b"{}", b"NaN", b"-1e400", b"1e39", b"true", b'"\\u0000"', b'"\\ud800"', b'"\xff"']
    nasty += [b"[" * 5000, b"9" * 400, b'"' + b"x" * 100_000 + b'"', b'"__class__"', b'"../../etc"', b"-0", b'""']
    place = draw.choice(places)
    body = body[: place.start()] + draw.choice(nasty) + body[place.end() :]
    return re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head) + b"\r\n\r\n" + body


ATTACKS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "flip": flip,
    "cut": cut,
    "doubled": doubled,
    "header": header,
    "first line": first_line,
    "value": value,
}


def attack_server(server: Server, seed: int, number: int) -> Answers:
    """So many damaged requests, each on a connection of its own, and how they ended."""
    draw = random.Random(seed)
    answers = Answers()
    valid = valid_requests(server)
    for _ in range(number):
        name = draw.choice(list(ATTACKS))
        sent = ATTACKS[name](draw, draw.choice(valid))
        if draw.random() < 0.2:
            sent += draw.choice(valid)
        try:
            answers.judge(name, sent, exchange(server, sent, reset=draw.random() < 0.1))
        except TimeoutError:
            answers.defects.append(f"{name}: no answer within {LIMIT_SECONDS:g} s: {sent[:300]!r}")
    _check_alive(server, answers)
    return answers


def exchange(server: Server, sent: bytes, *, reset: bool = False) -> bytes:
    """All that is answered to some bytes, behind which nothing more comes."""
    place = urlsplit(server.address)
    found = b""
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=LIMIT_SECONDS) as connection:
        try:
            connection.sendall(sent)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return b""
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                found += part
        except (ConnectionResetError, BrokenPipeError):
            pass
    return found


def _check_alive(server: Server, answers: Answers) -> None:
    """The server answers, and has given back what it kept for the requests."""
    for request in valid_requests(server):
        answers.judge("afterwards", request, exchange(server, request))
    deadline = time.monotonic() + LIMIT_SECONDS
    while server.front.queue.num_rows or server.front.body_bytes or len(server.server_state.connections):
        if time.monotonic() > deadline:
            left = (server.front.queue.num_rows, server.front.body_bytes, len(server.server_state.connections))
            answers.defects.append(f"rows, bytes and connections that were not given back: {left}")
            return
        time.sleep(0.01)


def ways_past_the_token(token: str) -> list[bytes]:
    """Requests without the token that must not reach what it guards."""
    right = token.encode()
    given = (b"", b"Bearer", b"Bearer ", b"Bearer \x00", b"Basic " + right, right, b"Bearer " + right[:-1])
    given += (b"Bearer " + right + b"0", b"Bearer " + right.swapcase(), b'Bearer "' + right + b'"')
    paths = (b"/schema", b"/metrics", b"/openapi.json", b"/docs", b"/v2", b"/v2/models/model", b"//", b"/./schema")
    paths += (b"/schema/../schema", b"/%73chema", b"/?/schema", b"http://x/schema", b"/;/schema", b"/SCHEMA")
    paths += (b"/v2/health/live/../../../schema", b"/v2/health/live/schema")
    return [
        b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nAuthorization: " + value + b"\r\nConnection: close\r\n\r\n"
        for path in paths
        for value in given
    ]
