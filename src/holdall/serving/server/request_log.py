"""Log of requests and their scores, as JSON lines that `holdall verify --log` scores again."""

from __future__ import annotations

import logging
import os
import queue
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from holdall.common.errors import ConfigError
from holdall.serving.server.served import Ranking, Served

log = logging.getLogger("holdall.server")
MAX_WAITING = 1000
"""Requests that wait to be written; more of them are dropped and counted."""


class RequestLog:
    """File that a thread appends to: `{"fingerprint": ..., "rows": [...], "scores": [...]}` a line.

    Only its owner may read the file, since rows are what users sent.
    """

    def __init__(self, path: Path):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the request log {path} cannot be written ({error.strerror}): name another file"
            ) from None
        self.num_dropped = 0
        self._file = os.fdopen(handle, "ab")
        self._waiting: queue.Queue[tuple[Served, Any, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def put(self, served: Served, rows: Any, scores: npt.NDArray[np.float32]) -> None:
        """Write a request when there is time."""
        try:
            self._waiting.put_nowait((served, rows, scores))
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            try:
                served, rows, scores = entry
                line = {
                    "fingerprint": served.scorer.fingerprint,
                    "rows": _dicts(served, rows),
                    "scores": np.asarray(scores).tolist(),
                }
                self._file.write(msgspec.json.encode(line) + b"\n")
                if self._waiting.empty():
                    self._file.flush()
            except Exception as error:  # a full disk must not end the thread
                self.num_dropped += 1
                log.error("a request could not be logged: %s", error)


def _dicts(served: Served, rows: Any) -> list[dict[str, Any]]:
    if isinstance(rows, tuple):
        rows = zip(*rows, strict=True)
    if isinstance(rows, Ranking):
        names = list(rows.items)
        return [rows.user | dict(zip(names, row, strict=True)) for row in zip(*rows.items.values(), strict=True)]
    return [dict(zip(served.reader.names, row, strict=True)) for row in rows]
