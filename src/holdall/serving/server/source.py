"""Source of models, and the thread that swaps a newer one in between two batches."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdall.common.errors import HoldallError
from holdall.serving.published_folder import Published, is_published
from holdall.serving.scorer import Scorer, load, load_bundle

log = logging.getLogger("holdall.server")
BACKGROUND_NICENESS = 10
FIRST_RETRY_SECONDS = 10.0
"""Seconds until a model that was refused is tried again for the first time."""


class Source(Protocol):
    """Place that scorers come from."""

    def poll(self) -> Scorer | None:
        """A scorer to serve from now on; None if it is the one that was given last.

        Raises a `HoldallError` if there is a newer one that cannot be served, and not again at every poll.
        """


class FixedSource:
    """One bundle or run, which never changes."""

    def __init__(self, path: Path):
        self._path: Path | None = path

    def poll(self) -> Scorer | None:
        path, self._path = self._path, None
        return None if path is None else load(path)


class PublishedSource:
    """Published folder, of which the current model is served.

    One that is refused is tried again, after twice as long each time: its files may still be on their way.
    """

    def __init__(self, folder: Path):
        self._published = Published(folder)
        self._last: str | None = None
        """Fingerprint of the model that was given or refused last."""
        self._wait = self._next_try = 0.0

    def poll(self) -> Scorer | None:
        target = self._published.current()
        if target.fingerprint != self._last:
            self._wait, self._next_try = FIRST_RETRY_SECONDS, 0.0
        elif time.monotonic() < self._next_try:
            return None
        self._last, self._next_try = target.fingerprint, time.monotonic() + self._wait
        self._wait *= 2
        scorer = load_bundle(self._published.open(target))
        self._next_try = math.inf
        return scorer


def source_of(path: Path) -> Source:
    """Source of a bundle, a run or a published folder."""
    return PublishedSource(path) if is_published(path) else FixedSource(path)


class SwapThread:
    """Thread that loads models from a source, warms them up, and hands them over to be served.

    A model that is refused is logged and counted, and the old one goes on. On Linux a newer model is loaded at low
    priority, since requests are being answered meanwhile.
    """

    def __init__(
        self,
        source: Source,
        swap: Callable[[Scorer], None],
        *,
        poll_seconds: float,
        on_refused: Callable[[], None],
        on_first_failure: Callable[[Exception], None],
    ):
        self._source, self._swap, self._poll_seconds = source, swap, poll_seconds
        self._on_refused, self._on_first_failure = on_refused, on_first_failure
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swap", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a model that is being loaded is not waited for."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._take()
        except Exception as error:
            self._on_first_failure(error)
            return
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
        while not self._stop.wait(self._poll_seconds):
            try:
                self._take()
            except HoldallError as error:
                log.warning("a newer model was refused, the old one is still served: %s", error)
                self._on_refused()
            except Exception:
                log.exception("a newer model could not be loaded, the old one is still served")
                self._on_refused()

    def _take(self) -> None:
        scorer = self._source.poll()
        if scorer is not None:
            scorer.warm_up()
            if not self._stop.is_set():
                self._swap(scorer)
