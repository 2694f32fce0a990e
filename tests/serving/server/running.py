"""Server in a thread of the test, and requests to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from holdall.data.schema import Schema
from holdall.models import DLRMConfig
from holdall.serving.bundle import Origin, Quality, write_bundle
from holdall.serving.server.run import Server
from holdall.serving.server.settings import ServerConfig
from holdall.serving.server.source import FixedSource, Source

SMALL = DLRMConfig(dim=4, bottom=(8,), top=(8,))


def made_bundle(data: Path, out: Path, *, step: int = 7) -> Path:
    """Bundle of an untrained model."""
    model = SMALL.build(Schema.load(data))
    quality = Quality(table_bytes=model.bags.num_bytes(), dense_bytes=1)
    write_bundle(out, model, SMALL, Schema.load(data), data, Origin(run=None, checkpoint=None, step=step), quality)
    return out


@contextmanager
def running(source: Path | Source, **settings: Any) -> Iterator[Server]:
    """A server on a free port, ready; it has ended after the block."""
    own = {key: settings.pop(key) for key in ("token", "request_log") if key in settings}
    if isinstance(source, Path):
        source = FixedSource(source)
    server = Server(source, ServerConfig(**({"port": 0, "name": "model", "max_wait": 60.0} | settings)), **own)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert server.ready.wait(60)
        assert server.failure is None
        yield server
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


class Client:
    """Requests on one connection."""

    def __init__(self, server: Server):
        self.place = urlsplit(server.address)
        assert self.place.hostname is not None
        self.http = http.client.HTTPConnection(self.place.hostname, self.place.port, timeout=30)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer; a body that is no bytes is sent as JSON."""
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            sent = {"content-type": "application/json"} | sent
        self.http.request(method, path, body, sent)
        answer = self.http.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def json(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and decoded JSON of an answer."""
        status, _, content = self.ask(method, path, body, headers)
        return status, json.loads(content)


def raw(server: Server, data: bytes, *, timeout: float = 30) -> bytes:
    """All that the server answers to these bytes until it closes the connection."""
    place = urlsplit(server.address)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=timeout) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
        return found
