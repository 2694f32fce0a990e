"""Threads beside the one that trains: they make things ready before their turn, and take few cores for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from threading import Barrier
from typing import Any, TypeVar

import torch

FEW = 4
"""Threads of an operation in such a thread, beside a GPU: more get in each other's way, and in the step's. Gathering
40,000 rows of 256 bytes out of 12 GB took 0.9 ms with 4, 3.0 with 8 and 6.0 with 16 of them, on 16 cores."""
READERS = 3
"""Threads that make batches ready for a GPU, each with a core: one whose operations take 4 needs 0.8 ms for one of
16,384 samples of Criteo, which is longer than a step with small layers."""
READY = READERS
"""Things that are made ready before their turn."""

Item = TypeVar("Item")
Made = TypeVar("Made")


class HelperThreads(ThreadPoolExecutor):
    """So many threads that begin things in the order they are given, one by default: it does one after the other.

    With `few`, no operation of one takes more than so many threads itself.
    """

    def __init__(self, name: str, few: int | None = FEW, count: int = 1):
        super().__init__(count, thread_name_prefix=f"holdall-{name}")
        self._under_way: set[Future[Any]] = set()
        if few is not None:
            self._take_few(few, count)

    def _take_few(self, few: int, count: int) -> None:
        before = torch.get_num_threads()
        all_there = Barrier(count)  # so that each of them does it

        def begin() -> None:
            all_there.wait()
            torch.set_num_threads(min(before, few))  # of that thread alone

        for begun in [self.submit(begin) for _ in range(count)]:
            begun.result()
        torch.set_num_threads(before)  # of this one

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def settle(self) -> None:
        """Wait until they have nothing to do; what went wrong is for those to raise who asked for it."""
        wait(list(self._under_way))


def made_ahead(
    items: Iterator[Item], make: Callable[[Item], Made], threads: Executor, count: int = READY
) -> Generator[tuple[Item, Future[Made]], None, None]:
    """The items, each with what a thread makes of it, which has been given so many after it."""
    ahead: deque[tuple[Item, Future[Made]]] = deque()
    for item in items:
        ahead.append((item, threads.submit(make, item)))
        if len(ahead) > count:
            yield ahead.popleft()
    yield from ahead
