"""Load generator of `benchmarks.serve`: a process on a core of its own that sends HTTP requests over raw sockets.

Open loop: requests arrive by a Poisson process, whatever the server does, and latency counts from the arrival, so a
server that is late is not spared the requests that it delays.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import time
from collections import Counter, deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

NUM_CONNECTIONS = 64
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """Result of one spell of load."""

    rate: float
    """Requests per second that were to be sent; inf for a closed loop."""
    seconds: float
    statuses: dict[int, int]
    """Answers by status; 0 for requests without one."""
    p50: float
    p99: float
    """Seconds from arrival to answer, of answers with 200."""
    busy: float
    """Share of the time in which the generator had something to do; near 1 it is the limit, not the server."""
    late: float = 0.0
    """p99 of the seconds from arrival to sending, for requests that found a free connection."""

    @property
    def num_good(self) -> int:
        return self.statuses.get(200, 0)

    def passes(self, p99: float) -> bool:
        """Whether all requests were answered with 200, 99 of 100 in time."""
        return set(self.statuses) == {200} and self.p99 < p99


class _Socket:
    """One connection with at most one request under way."""

    def __init__(self, address: tuple[str, int]):
        self.address = address
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.unsent: memoryview | None = None
        self.received = b""
        self.number = -1

    def send(self, number: int, request: bytes) -> bool:
        """Send a request; False if some of it is left."""
        self.number, self.received = number, b""
        self.unsent = memoryview(request)
        return self.go_on()

    def go_on(self) -> bool:
        assert self.unsent is not None
        try:
            sent = self.socket.send(self.unsent)
        except BlockingIOError:
            sent = 0
        self.unsent = self.unsent[sent:] if sent < len(self.unsent) else None
        return self.unsent is None

    def receive(self) -> int | None:
        """Status of the answer once it is complete; 0 if the connection ended."""
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return None
        except OSError:
            return 0
        if not data:
            return 0
        self.received = self.received + data if self.received else data
        head = self.received.find(b"\r\n\r\n")
        if head < 0:
            return None
        at = self.received.lower().find(b"content-length: ", 0, head + 2)
        length = int(self.received[at + 16 : self.received.index(b"\r\n", at)])
        return int(self.received[9:12]) if len(self.received) >= head + 4 + length else None


def run_load(
    address: tuple[str, int], requests: list[bytes], rate: float, seconds: float, seed: int, connections: int
) -> Outcome:
    """Send requests at a rate for some seconds; at an infinite rate each connection sends as it gets answers."""
    draw = np.random.default_rng(seed)
    closed = rate == float("inf")
    number = 1 << 22 if closed else max(1, int(rate * seconds))
    arrivals = np.zeros(0) if closed else np.cumsum(draw.exponential(1 / rate, number))
    latency = np.full(number, np.nan)
    statuses: Counter[int] = Counter()
    poll = select.epoll()
    sockets: dict[int, _Socket] = {}
    free: deque[_Socket] = deque()
    for _ in range(connections):
        one = _Socket(address)
        sockets[one.socket.fileno()] = one
        poll.register(one.socket, select.EPOLLIN)
        free.append(one)
    start = time.perf_counter()
    times = arrivals.tolist()
    late: list[float] = []
    sent = done = 0
    idle, had_free = 0.0, True
    while done < number:
        now = time.perf_counter() - start
        if now > seconds + (0 if closed else GRACE_SECONDS):
            break
        while sent < number and free and (closed or times[sent] <= now):
            one = free.popleft()
            if closed:
                latency[sent] = now
            elif had_free:
                late.append(now - times[sent])
            if not one.send(sent, requests[sent % len(requests)]):
                poll.modify(one.socket, select.EPOLLIN | select.EPOLLOUT)
            sent += 1
        had_free = bool(free)
        before = time.perf_counter()
        events = poll.poll(0)
        if not events:
            idle += time.perf_counter() - before
        for descriptor, kind in events:
            one = sockets[descriptor]
            if kind & select.EPOLLOUT and one.unsent is not None and one.go_on():
                poll.modify(one.socket, select.EPOLLIN)
            if not kind & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                continue
            status = one.receive()
            if status is None:
                continue
            if one.number >= 0:
                ended = time.perf_counter() - start
                begun = latency[one.number] if closed else times[one.number]
                latency[one.number] = ended - begun if status == 200 else np.nan
                statuses[status] += 1
                done += 1
                one.number = -1
                if status:
                    free.append(one)
            if not status or b"\r\nconnection: close" in one.received[:500].lower():
                poll.unregister(descriptor)
                one.socket.close()
                del sockets[descriptor]
                if status:
                    free.remove(one)
                fresh = _Socket(address)
                sockets[fresh.socket.fileno()] = fresh
                poll.register(fresh.socket, select.EPOLLIN)
                free.append(fresh)
    passed = time.perf_counter() - start
    busy = 1 - idle / passed
    if not closed and done < number:
        statuses[0] += number - done
    for one in sockets.values():
        if closed and one.number >= 0:
            latency[one.number] = np.nan
        one.socket.close()
    good = latency[:sent][~np.isnan(latency[:sent])]
    p50, p99 = np.percentile(good, [50, 99]) if len(good) else (float("inf"), float("inf"))
    return Outcome(
        rate, passed, dict(statuses), float(p50), float(p99), busy, float(np.percentile(late, 99)) if late else 0.0
    )


class LoadProcess:
    """Process on one core that makes load when it is told to."""

    def __init__(self, core: int | None):
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, core), daemon=True)
        self._process.start()

    def run(
        self, address: tuple[str, int], requests: list[bytes], rate: float, seconds: float, **options: Any
    ) -> Outcome:
        """The outcome of one spell; see `run_load`."""
        self._here.send((address, requests, rate, seconds, options))
        found = self._here.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self._here.send(None)
        self._process.join(10)


def _serve(pipe: Connection, core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    while (task := pipe.recv()) is not None:
        address, requests, rate, seconds, options = task
        own = {"seed": 0, "connections": NUM_CONNECTIONS} | options
        try:
            pipe.send(run_load(address, requests, rate, seconds, **own))
        except Exception as error:
            pipe.send(error)
