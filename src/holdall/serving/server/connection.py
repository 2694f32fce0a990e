"""HTTP/1.1 connection on httptools, with limits on every part of a request and on how long it takes.

Bodies are short and bounded, so each is received as a whole before its request is handled, one request at a time and in
order, also when several are sent ahead. Handlers are plain functions on the event loop that answer at once or
later: a scoring request needs no task.
"""

from __future__ import annotations

import asyncio
import http
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import httptools
import msgspec

MAX_HEAD_BYTES = 16 << 10
MAX_OVERHEAD = 16
"""Most bytes of a request that may come for each byte of its body, beside the headers; chunks of one byte take 6."""
MAX_AHEAD = 16
"""Most requests that one connection may send ahead of their answers before it is no longer read."""
MAX_DISCARDED_BYTES = 1 << 20
"""Longest body of a refused request that is read and dropped; the connection of a longer one is closed."""
LINGER_SECONDS = 1.0
"""Seconds that a refused sender has to read its answer before the connection is closed."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}


@dataclass(slots=True, eq=False)
class Request:
    """One request with its whole body."""

    connection: Connection
    method: str = ""
    url: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    """By name in lower case; of repeated ones the last."""
    body: bytes | bytearray = b""
    keep_alive: bool = True
    started: float = 0.0
    refusal: Answer | None = None
    """Answer to a request that is not read to its end."""
    cancel: Callable[[], None] | None = None
    """Called when the sender is gone before the answer."""
    route: str = "other"

    @property
    def path(self) -> str:
        return self.url.partition(b"?")[0].decode("latin-1")


@dataclass(slots=True)
class Answer:
    """Status, headers and body of an answer."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


def refused(status: int, sentence: str, *headers: tuple[bytes, bytes]) -> Answer:
    """Answer of a request that cannot be served, as `{"error": ...}`."""
    return Answer(status, msgspec.json.encode({"error": sentence}), headers=headers)


class Handler(Protocol):
    """Handler of requests, shared by all connections."""

    max_bytes: int
    max_connections: int
    read_timeout: float
    idle_timeout: float

    def handle(self, request: Request) -> None:
        """Answer a request by `request.connection.answer`, now or later."""

    def early(self, request: Request) -> Answer | None:
        """Answer to a request whose headers are there and whose body is not wanted; None to read it."""

    def reserve(self, num_bytes: int) -> bool:
        """Take memory for a body, negative to give it back; False if there is none."""

    def observe(self, request: Request, status: int) -> None:
        """Note the outcome of a request."""


class Connection(asyncio.Protocol):
    """One connection. uvicorn makes it, lists it in `connections`, and calls `shutdown`."""

    def __init__(self, handler: Handler, server_state: Any, **_: Any):
        self.handler = handler
        self.state = server_state
        self.parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.waiting: deque[Request] = deque()
        """Requests that have arrived and are not handled yet."""
        self.current: Request | None = None
        """Request that is being answered."""
        self.incoming: Request | None = None
        """Request that is being received."""
        self.in_head = False
        self.received_bytes = self.reserved = 0
        self.has_completed = False
        """Whether a request was complete with the data that is being parsed."""
        self.unparsed = 0
        """Bytes of a body that the parser does not read."""
        self.is_closing = self.is_lingering = self.is_running = self.is_paused = False
        self.is_last = False
        """Whether no request is read after the ones that have arrived."""
        self.since = time.monotonic()
        """When the connection began to be idle, to receive, to wait for its reader, or to linger."""
        self.is_blocked = False
        """Whether the sender does not read its answers."""

    # --- the transport -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self.state.connections.add(self)
        if len(self.state.connections) > self.handler.max_connections:
            self.on_message_begin()
            self._refuse(503, "too many connections are open: try again later", retry=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.discard(self)
        self.is_closing = True
        self._free(self.reserved)
        for request in (self.current, *self.waiting):
            if request is not None and request.cancel is not None:
                request.cancel()
        self.waiting.clear()
        self.current = self.incoming = None

    def eof_received(self) -> bool:
        """Keep the connection open for the answers to what was sent; close it if there is nothing to answer."""
        if self.is_lingering or not self.is_busy:
            return False
        self.is_closing = True
        return True

    def pause_writing(self) -> None:
        self.is_blocked, self.since = True, time.monotonic()

    def resume_writing(self) -> None:
        self.is_blocked, self.since = False, time.monotonic()
        if not self.is_running:
            self._run()

    def shutdown(self) -> None:
        """Finish the requests that were begun, and close the connection."""
        self.is_closing = True
        if not self.is_busy and self.incoming is None:
            self.transport.close()

    def check_time(self, now: float) -> None:
        """Close the connection if it has been in its state for too long; called a few times a second."""
        passed = now - self.since
        if self.is_blocked or self.is_lingering:
            if passed > (LINGER_SECONDS if self.is_lingering else self.handler.read_timeout):
                self.transport.abort()
        elif self.incoming is not None:
            if now - self.incoming.started > self.handler.read_timeout:
                self._refuse(
                    408, f"the request took more than {self.handler.read_timeout:g} s to arrive: send it faster"
                )
        elif not self.is_busy and passed > self.handler.idle_timeout:
            self.transport.close()

    # --- the parser ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        while data and not self.is_lingering:
            rest, self.has_completed = b"", False
            if self.unparsed:
                data, rest = data[: self.unparsed], data[self.unparsed :]
                self.unparsed -= len(data)
                self.on_body(data)
                if not self.unparsed:
                    self.on_message_complete()
            else:
                rest = self._parse(data)
            if self.incoming is not None and not self.has_completed:
                self._check_overhead(self.incoming, len(data))
            data = rest
        if not self.is_running:
            self._run()

    def _check_overhead(self, request: Request, num_bytes: int) -> None:
        """Refuse a request whose headers, trailers and chunk sizes are out of proportion to its body."""
        self.received_bytes += num_bytes
        if self.received_bytes > MAX_HEAD_BYTES + MAX_OVERHEAD * len(request.body) and request.refusal is None:
            self._refuse_head()

    def _parse(self, data: bytes) -> bytes:
        """Parse data; what is left of it begins behind the headers of a request to upgrade.

        Some clients offer HTTP/2 with every request, and go on in HTTP/1.1 if the answer is one. The parser stops at
        such headers, and does not read the body behind them.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.parser = httptools.HttpRequestParser(self)
            return data[upgrade.args[0] :]
        except httptools.HttpParserError:
            if self.incoming is None:
                self.on_message_begin()
            self._refuse(400, "the request is not HTTP/1.1: check the sender")
        return b""

    def on_message_begin(self) -> None:
        if self.is_last:
            return
        self.incoming = Request(self, started=time.monotonic())
        self.in_head, self.received_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        if self.incoming is not None:
            self.incoming.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.incoming is not None and self.in_head:  # trailers are not read
            self.incoming.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.in_head = False
        request = self.incoming
        if request is None:
            return None
        request.method = self.parser.get_method().decode("latin-1")
        request.keep_alive = self.parser.should_keep_alive()
        headers = request.headers
        if sum(map(len, headers)) + sum(map(len, headers.values())) + len(request.url) > MAX_HEAD_BYTES:
            return self._refuse_head()
        length = headers.get(b"content-length")
        if length is not None and (len(length) > 18 or int(length) > self.handler.max_bytes):
            return self._refuse_body()
        early = self.handler.early(request)
        if early is not None:
            expects = b"expect" in headers or b"transfer-encoding" in headers
            if expects or int(length or 0) > MAX_DISCARDED_BYTES:
                return self._refuse_as(early)
            request.refusal = early  # the body is read and dropped, so that the connection can go on
        elif length is not None and headers.get(b"expect", b"").lower() == b"100-continue" and not self.is_busy:
            self.transport.write(CONTINUE)
        return None

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for its answer."""
        return self.current is not None or bool(self.waiting)

    def on_body(self, body: bytes) -> None:
        request = self.incoming
        if request is None:
            return None
        if request.refusal is not None:
            return None
        if len(request.body) + len(body) > self.handler.max_bytes:
            return self._refuse_body()
        if not self.handler.reserve(len(body)):
            return self._refuse(429, "the server has no memory left for the body: try again later", retry=True)
        self.reserved += len(body)
        if not request.body:
            request.body = body
        else:
            if isinstance(request.body, bytes):
                request.body = bytearray(request.body)
            request.body += body
        return None

    def on_message_complete(self) -> None:
        request = self.incoming
        self.has_completed = True
        if request is None:
            return None
        if self.parser.should_upgrade() and not request.body:
            if b"transfer-encoding" in request.headers:
                return self._refuse(400, "a request to upgrade cannot be chunked: send it without")
            self.unparsed = int(request.headers.get(b"content-length", b"0"))
            if self.unparsed:
                return None
        self.incoming = None
        self.is_last = not request.keep_alive
        self.waiting.append(request)
        if len(self.waiting) >= MAX_AHEAD and not self.is_paused:
            self.is_paused = True
            self.transport.pause_reading()
        return None

    # --- answers -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Handle requests until one of them is answered later, or answers are not read."""
        self.is_running = True
        while self.waiting and self.current is None and not self.is_blocked:
            self.current = request = self.waiting.popleft()
            if request.refusal is not None:
                self.answer(request, request.refusal)
            else:
                self.handler.handle(request)
        self.is_running = False
        if self.is_paused and len(self.waiting) < MAX_AHEAD and not self.transport.is_closing():
            self.is_paused = False
            self.transport.resume_reading()

    def answer(self, request: Request, answer: Answer) -> None:
        """Send the answer of the request that is being handled, unless its sender is gone."""
        if request is not self.current:
            return
        self.handler.observe(request, answer.status)
        self.current = None
        request.cancel = None
        self._free(len(request.body))
        ends = not request.keep_alive or (self.is_closing and not self.waiting)
        if not self.transport.is_closing():
            self.transport.write(self._encoded(request, answer, ends))
        self.since = time.monotonic()
        if ends:
            self._end(linger=self.is_last and request.refusal is not None)
        elif not self.is_running:
            self._run()

    def _encoded(self, request: Request, answer: Answer, ends: bool) -> bytes:
        parts = [STATUS[answer.status]]
        for name, value in (*self.state.default_headers, *answer.headers):
            parts += (name, b": ", value, b"\r\n")
        if answer.status != 204:
            parts += (b"content-type: ", answer.content_type, b"\r\ncontent-length: %d\r\n" % len(answer.body))
        if ends:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        if request.method != "HEAD":
            parts.append(answer.body)
        return b"".join(parts)

    def _end(self, linger: bool) -> None:
        """Close the connection, and let a sender that is still sending read its answer first."""
        self.waiting.clear()
        if linger and self.transport.can_write_eof() and not self.transport.is_closing():
            self.is_lingering, self.since = True, time.monotonic()
            self.transport.write_eof()
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        self._refuse(431, f"the headers have more than {MAX_HEAD_BYTES:,} bytes: send fewer")

    def _refuse_body(self) -> None:
        self._refuse(413, f"the body has more than {self.handler.max_bytes:,} bytes: send fewer rows at once")

    def _refuse(self, status: int, sentence: str, *, retry: bool = False) -> None:
        self._refuse_as(refused(status, sentence, *((b"retry-after", b"1"),) * retry))

    def _refuse_as(self, answer: Answer) -> None:
        """Answer the request that is being received after those before it, and close the connection."""
        request, self.incoming = self.incoming, None
        if request is None:
            return
        request.refusal, request.keep_alive = answer, False
        self.in_head, self.is_last = False, True
        self.waiting.append(request)
        if not self.is_running and self.current is None:
            self._run()

    def _free(self, num_bytes: int) -> None:
        if num_bytes:
            self.reserved -= num_bytes
            self.handler.reserve(-num_bytes)
