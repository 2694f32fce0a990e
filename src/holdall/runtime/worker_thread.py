"""A thread beside the one that trains: it makes things ready before their turn, and takes few cores for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

MAX_INTRAOP_THREADS = 4
"""Threads of an operation in such a thread, beside a GPU: more get in each other's way, and in the step's. Gathering
40,000 rows of 256 bytes out of 12 GB took 0.9 ms with 4, 3.0 with 8 and 6.0 with 16 of them, on 16 cores."""
PREFETCH_BATCHES = 3
"""Things that are made ready before their turn."""

Item = TypeVar("Item")
Made = TypeVar("Made")


class WorkerThread(ThreadPoolExecutor):
    """Does one thing after the other; with `few`, no operation takes more than so many threads."""

    def __init__(self, name: str, few: int | None = MAX_INTRAOP_THREADS):
        super().__init__(1, thread_name_prefix=f"holdall-{name}")
        self._last: Future[Any] | None = None
        if few is not None:
            before = torch.get_num_threads()
            self.submit(torch.set_num_threads, min(before, few)).result()  # of that thread alone
            torch.set_num_threads(before)  # of this one

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._last = super().submit(fn, *args, **kwargs)
        return self._last

    def settle(self) -> None:
        """Wait until it has nothing to do; what went wrong is for those to raise who asked for it."""
        if self._last is not None:
            wait([self._last])


class InlineExecutor(Executor):
    """Runs what it is given where it is asked to, at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def prefetch_map(
    items: Iterator[Item], make: Callable[[Item], Made], thread: Executor, count: int = PREFETCH_BATCHES
) -> Generator[tuple[Item, Future[Made]], None, None]:
    """The items, each with what was made of it. The thread draws them and makes it, so many before their turn: one
    thread rather than two, since each time they take turns costs as much as making a small batch ready.

    What goes wrong in drawing is raised here, in making when the result is asked for. Close this before `items`.
    """
    at_once = InlineExecutor()

    def draw() -> tuple[Item, Future[Made]] | None:
        for item in items:
            return item, at_once.submit(make, item)
        return None

    ahead: deque[Future[tuple[Item, Future[Made]] | None]] = deque()
    try:
        while True:
            ahead.extend(thread.submit(draw) for _ in range(count + 1 - len(ahead)))
            drawn = ahead.popleft().result()
            if drawn is None:
                return
            yield drawn
    finally:
        for future in ahead:
            future.cancel()
        wait(ahead)
