"""Settings of the server: where it listens, how much it takes, and how long it waits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdall.common.errors import ConfigError
from holdall.common.settings import check_types, flag

TOKEN_VARIABLE = "HOLDALL_TOKEN"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where a server listens, and its limits."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 for any that is free."""
    name: str | None = None
    """Name of the model in the Open Inference Protocol; the name of the folder when absent."""
    max_rows: int = 4096
    """Most rows of one request."""
    max_values: int = 1 << 17
    """Most values in the bags and sequences of one request, and of those that are scored at once: they take about 3
    microseconds each."""
    max_bytes: int = 16 << 20
    """Most bytes of the body of one request."""
    batch_rows: int = 1024
    """Most rows that are scored at once, unless one request has more."""
    queue_rows: int = 16384
    """Most rows that wait or are being scored; a request beyond them is answered with 429."""
    max_wait: float = 0.05
    """Seconds: while the oldest request in the queue has waited for longer, new ones are answered with 429."""
    read_timeout: float = 10.0
    """Seconds that a request may take to arrive, and an answer to be read."""
    idle_timeout: float = 75.0
    """Seconds that a connection may stay open without a request."""
    shutdown_timeout: float = 30.0
    """Seconds that requests may take to finish after SIGTERM or Ctrl-C."""
    max_connections: int = 1000
    """Most open connections; one beyond them is answered with 503."""
    memory_bytes: int = 256 << 20
    """Most bytes of all bodies that are received or answered at one time."""
    poll_seconds: float = 1.0
    """Seconds between two looks for a newer bundle."""
    threads: int = 1
    """Threads that compute one batch."""

    def __post_init__(self) -> None:
        check_types(self)
        counts = ("max_rows", "max_values", "max_bytes", "batch_rows", "queue_rows", "max_connections", "memory_bytes")
        for name in (*counts, "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}: it must be 1 or more")
        for name in ("max_wait", "read_timeout", "idle_timeout", "shutdown_timeout", "poll_seconds"):
            if not 0 < getattr(self, name) < 1e6:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}: it must be seconds above 0")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--port is {self.port}: it must be from 0 to 65535")
        if self.queue_rows < self.max_rows:
            raise ConfigError(
                f"--queue-rows is {self.queue_rows}, so a request of --max-rows {self.max_rows} could never be taken: "
                f"raise the first or lower the second"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in LOOPBACK or self.host.startswith("127.")


def read_token(file: Path | None) -> str | None:
    """The bearer token of a file, or of the variable HOLDALL_TOKEN; None where neither is given."""
    if file is None:
        token, place = os.environ.get(TOKEN_VARIABLE), f"the variable {TOKEN_VARIABLE}"
        if token is None:
            return None
    else:
        try:
            token, place = file.read_text(encoding="utf-8").strip(), f"the token file {file}"
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"the token file {file} cannot be read ({error}): name a text file with one line"
            ) from None
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{place} has no usable token: 16 or more printable ASCII characters without a space are needed, such as "
            f"those of `openssl rand -hex 32`"
        )
    return token
