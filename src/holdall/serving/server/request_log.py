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
from holdall.serving.server.row_types import ArrowColumns
from holdall.serving.server.served import Ranking, Served

log = logging.getLogger("holdall.server")
MAX_WAITING, MAX_WAITING_ROWS = 1000, 16384
"""Requests, and rows of them, that wait to be written; more are dropped and counted."""


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
        self._handle = handle
        self._is_failing = False
        self._rows_put = self._rows_taken = 0  # each is changed by one thread only
        self._waiting: queue.Queue[tuple[Served, Any, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def put(self, served: Served, rows: Any, scores: npt.NDArray[np.float32]) -> None:
        """Write a request when there is time."""
        if self._rows_put - self._rows_taken + len(scores) > MAX_WAITING_ROWS:
            self.num_dropped += 1
            return
        try:
            self._waiting.put_nowait((served, rows, scores))
            self._rows_put += len(scores)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join()
        os.close(self._handle)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            served, rows, scores = entry
            try:
                line = {
                    "fingerprint": served.scorer.fingerprint,
                    "rows": _dicts(served, rows),
                    "scores": np.asarray(scores).tolist(),
                }
                self._append(msgspec.json.encode(line) + b"\n")
                self._is_failing = False
            except Exception as error:  # a full disk must not end the thread
                self.num_dropped += 1
                if not self._is_failing:  # once is enough: requests come fast
                    log.error("requests cannot be logged: %s", error)
                self._is_failing = True
            self._rows_taken += len(scores)

    def _append(self, line: bytes) -> None:
        """Write a line as a whole or not at all, so that the next one begins where a line begins."""
        size = os.fstat(self._handle).st_size
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError:
            if len(left) < len(line):
                os.ftruncate(self._handle, size)
            raise


def _dicts(served: Served, rows: Any) -> list[dict[str, Any]]:
    if isinstance(rows, ArrowColumns):
        rows = zip(*rows.lists(), strict=True)
    if isinstance(rows, Ranking):
        names = list(rows.items)
        return [rows.user | dict(zip(names, row, strict=True)) for row in zip(*rows.items.values(), strict=True)]
    return [dict(zip(served.reader.names, row, strict=True)) for row in rows]
