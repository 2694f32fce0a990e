"""Several hosts on one machine: network namespaces on a switch of their own, with links of a given rate.

    with hosts(4, gbits=1.0) as found:
        subprocess.run(found[0].command([sys.executable, "-m", ...]))

Every host has one interface, `net0`, with the address 10.77.0.1, 10.77.0.2...; hosts see each other and nothing else.
A link sends and receives at `gbits` each way (a token bucket at both of its ends), as a full-duplex cable does; without
one it is as fast as the machine copies. No latency is added: `round_trip` measures what there is. Needs Linux, iproute2
and the right to make namespaces: `unavailable` says what is missing. Traffic stays on the machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "net0"
PORT = 5201
"""Where `throughput` listens, inside of a namespace."""


@dataclass(frozen=True)
class Host:
    """One network namespace."""

    name: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """A command line that runs there."""
        return ["ip", "netns", "exec", self.name, *words]


def unavailable() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed (iproute2)"
    name = f"holdall-{os.getpid()}-try"
    made = _try("ip", "netns", "add", name)
    if made is None:
        made = _try("ip", "-n", name, "link", "add", "left", "type", "veth", "peer", "name", "right")
        _try("ip", "netns", "del", name)
    return None if made is None else f"network namespaces are not permitted here ({made})"


def _try(*words: str) -> str | None:
    """What a command complained of, in a line; None when it did its work."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def _run(*words: str) -> None:
    wrong = _try(*words)
    if wrong is not None:
        raise RuntimeError(f"{' '.join(words)}: {wrong}")


@contextmanager
def hosts(num: int, gbits: float | None = None) -> Iterator[list[Host]]:
    """So many hosts on one switch for the time of the block."""
    prefix = f"holdall-{os.getpid()}"
    switch, found = f"{prefix}-switch", [Host(f"{prefix}-{i + 1}", f"10.77.0.{i + 1}") for i in range(num)]
    names = [switch, *(host.name for host in found)]
    before = signal.signal(signal.SIGTERM, _end)
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(found):
            _plug_in(host, switch, f"port{number}", gbits)
        yield found
    finally:
        signal.signal(signal.SIGTERM, before)
        for name in names:
            _try("ip", "netns", "del", name)


def _end(signum: int, frame: object) -> None:
    """End as by an error, so that what was made is taken away."""
    raise SystemExit(128 + signum)


def _plug_in(host: Host, switch: str, port: str, gbits: float | None) -> None:
    """Join a host to the switch."""
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host.name)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
    _run("ip", "-n", switch, "link", "set", port, "up")
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    _run("ip", "-n", host.name, "link", "set", "dev", INTERFACE, "up")
    if gbits is not None:
        shape(host.name, INTERFACE, gbits)
        shape(switch, port, gbits)


def shape(namespace: str, device: str, gbits: float) -> None:
    """Let a device send at most so much. A bucket of 0.5 ms, and of two of the largest packets; a queue of 20 ms."""
    burst = max(131_072, int(gbits * 1e9 / 8 * 0.5e-3))
    rate = f"{round(gbits * 1000)}mbit"
    words = ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "20ms"]
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *words)


# --- what the links do, measured --------------------------------------------------------------------------------------


def throughput(sender: Host, receiver: Host, seconds: float = 1.0) -> float:
    """Gbit/s that one TCP connection gets through."""
    server = _measuring(receiver, "receive", receiver.address, str(seconds))
    try:
        with _measuring(sender, "send", receiver.address, str(seconds)) as client:
            client.communicate(timeout=60)
        return float(server.communicate(timeout=60)[0])
    finally:
        server.kill()
        server.wait()


def round_trip(one: Host, other: Host, repeats: int = 200) -> float:
    """Median seconds of a byte there and back."""
    server = _measuring(other, "echo", other.address, str(repeats))
    try:
        with _measuring(one, "ask", other.address, str(repeats)) as client:
            return float(client.communicate(timeout=60)[0])
    finally:
        server.kill()
        server.wait()


def _measuring(host: Host, *arguments: str) -> subprocess.Popen[str]:
    words = host.command([sys.executable, str(Path(__file__).resolve()), *arguments])
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def _receive(address: str, seconds: float) -> float:
    import time

    with socket.create_server((address, PORT)) as server:
        connection, _ = server.accept()
        buffer, total, start = bytearray(1 << 20), 0, time.perf_counter()
        while size := connection.recv_into(buffer):
            total += size
        return total * 8 / (time.perf_counter() - start) / 1e9


def _send(address: str, seconds: float) -> None:
    import time

    payload = bytes(1 << 20)
    with _connect(address) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(payload)


def _echo(address: str, repeats: int) -> None:
    with socket.create_server((address, PORT)) as server:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(repeats):
            connection.sendall(connection.recv(1))


def _ask(address: str, repeats: int) -> float:
    import statistics
    import time

    times = []
    with _connect(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(repeats):
            start = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _connect(address: str) -> socket.socket:
    import time

    for _ in range(100):
        try:
            return socket.create_connection((address, PORT), timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise RuntimeError(f"nobody listens at {address}")


def main() -> None:
    """One side of a measurement, inside of a namespace."""
    kind, address, number = sys.argv[1:]
    match kind:
        case "receive":
            print(_receive(address, float(number)))
        case "send":
            _send(address, float(number))
        case "echo":
            _echo(address, int(number))
        case "ask":
            print(_ask(address, int(number)))


if __name__ == "__main__":
    main()
