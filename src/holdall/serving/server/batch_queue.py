"""Bounded queue of requests and the one thread that scores them, all that wait at once.

The event loop puts a request in and goes on. The thread takes everything that waits, up to a number of rows and of
values in their bags, scores it as one batch, and hands all results back in one call to the loop. So a request never
waits for others to fill a batch: batches grow by themselves when requests come faster than they are scored.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import HoldallError

Scores = npt.NDArray[np.float32]
Result = Scores | Exception

log = logging.getLogger("holdall.server")


class QueueFullError(HoldallError):
    """Request that is refused because too many rows wait."""


@dataclass(slots=True, eq=False)
class Work:
    """Rows of one request, from when they were decoded to when their scores are there."""

    rows: Any
    num_rows: int
    answer: Callable[[Work, Result], None]
    """Called on the event loop with the scores, or with what went wrong."""
    served: Any = None
    """Model that decoded the rows, and so has to score them."""
    num_values: int = 0
    """Values in the bags and sequences of the rows; at most, where they are not read yet."""
    arrived: float = field(default_factory=time.monotonic)
    taken: float = 0.0
    is_cancelled: bool = False
    """Whether nobody waits for the scores any more."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Seconds and sizes of one batch, for the metrics."""

    waited: list[float]
    compute: float
    num_rows: int


Call = Callable[..., object]
"""`loop.call_soon_threadsafe`."""


class BatchQueue:
    """Queue between the event loop and the scoring thread; every method is called on the loop."""

    def __init__(
        self,
        score: Callable[[Sequence[Work]], list[Result]],
        *,
        batch_rows: int,
        batch_values: int,
        queue_rows: int,
        max_wait: float,
        observe: Callable[[BatchTimes], None] = lambda times: None,
    ):
        """`score` gives one result a request, in order; it runs in the thread."""
        self.batch_rows, self.batch_values = batch_rows, batch_values
        self.queue_rows, self.max_wait = queue_rows, max_wait
        self.num_rows = 0
        """Rows that wait or are being scored."""
        self._score, self._observe = score, observe
        self._waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._untaken: deque[Work] = deque()
        self._call: Call | None = None
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)

    def start(self, call_soon_threadsafe: Call) -> None:
        """Start the thread, which hands results to the loop by this function."""
        self._call = call_soon_threadsafe
        self._thread.start()

    def check(self, num_rows: int = 1) -> None:
        """Raise unless a request of this number of rows can be taken now."""
        if self.num_rows + num_rows > self.queue_rows:
            raise QueueFullError(f"{self.num_rows:,} rows wait, and {self.queue_rows:,} are the most: try again later")
        while self._untaken and self._untaken[0].taken:
            self._untaken.popleft()
        if self._untaken and time.monotonic() - self._untaken[0].arrived > self.max_wait:
            raise QueueFullError(f"requests wait for more than {self.max_wait:g} s: try again later")

    def put(self, work: Work) -> None:
        """Take a request, or raise `QueueFullError`."""
        self.check(work.num_rows)
        self.num_rows += work.num_rows
        self._untaken.append(work)
        self._waiting.put(work)

    def stop(self) -> None:
        """Score what was taken, then end the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        left: Work | None = None
        while True:
            work = self._waiting.get() if left is None else left
            if work is None:
                return
            works, left, ends = self._more(work)
            self._score_batch(works)
            if ends:
                return

    def _more(self, first: Work) -> tuple[list[Work], Work | None, bool]:
        """The next batch, the request that did not fit in it, and whether the queue has ended."""
        works, rows, values = [first], first.num_rows, first.num_values
        while True:
            try:
                work = self._waiting.get_nowait()
            except queue.Empty:
                return works, None, False
            if work is None:
                return works, None, True
            if rows + work.num_rows > self.batch_rows or values + work.num_values > self.batch_values:
                return works, work, False
            works.append(work)
            rows += work.num_rows
            values += work.num_values

    def _score_batch(self, works: list[Work]) -> None:
        start = time.monotonic()
        for work in works:
            work.taken = start
        wanted = [work for work in works if not work.is_cancelled]
        results: list[Result] = []
        try:
            if wanted:
                results = self._score(wanted)
        except Exception as error:  # one answer a request, whatever happens: the thread must go on
            log.exception("a batch of %d requests failed", len(wanted))
            results = [error] * len(wanted)
        times = BatchTimes(
            waited=[start - work.arrived for work in wanted],
            compute=time.monotonic() - start,
            num_rows=sum(work.num_rows for work in wanted),
        )
        assert self._call is not None
        self._call(self._deliver, works, wanted, results, times)

    def _deliver(self, works: list[Work], wanted: list[Work], results: list[Result], times: BatchTimes) -> None:
        self.num_rows -= sum(work.num_rows for work in works)
        if wanted:
            self._observe(times)
        for work, result in zip(wanted, results, strict=True):
            try:
                work.answer(work, result)
            except Exception:  # the others wait for their answers
                log.exception("an answer could not be sent")
