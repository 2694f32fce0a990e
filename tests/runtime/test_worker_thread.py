"""A thread that makes things ready before their turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from holdall.runtime.worker_thread import PREFETCH_BATCHES, WorkerThread, prefetch_map


def test_some_are_made_before_their_turn_and_no_more() -> None:
    begun: list[int] = []
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for number in range(10):
            drawn.append(number)
            yield number

    def make(number: int) -> str:
        assert threading.current_thread().name.startswith("holdall-read")
        begun.append(number)
        return str(number)

    before = threading.active_count()
    with WorkerThread("read") as thread:
        for number, (item, made) in enumerate(prefetch_map(items(), make, thread)):
            assert (item, made.result()) == (number, str(number))
            thread.settle()
            assert len(drawn) == min(10, number + 1 + PREFETCH_BATCHES)
    assert begun == list(range(10))
    assert threading.active_count() == before


def test_what_goes_wrong_is_that_items_own() -> None:
    def make(number: int) -> int:
        if number == 3:
            raise ValueError("the third")
        return number

    with WorkerThread("read") as thread:
        found = list(prefetch_map(iter(range(6)), make, thread))
        thread.settle()
    assert [made.result() for item, made in found if item != 3] == [0, 1, 2, 4, 5]
    with pytest.raises(ValueError, match="the third"):
        found[3][1].result()


def test_settled_it_has_nothing_to_do() -> None:
    done = []
    thread = WorkerThread("slow")
    thread.submit(lambda: (time.sleep(0.05), done.append(1)))
    thread.submit(lambda: 1 / 0)  # is for those to see who asked for it
    thread.settle()
    assert done == [1]
    thread.shutdown()
    thread.settle()


def test_few_threads_there_and_as_many_as_before_here() -> None:
    before = torch.get_num_threads()
    with WorkerThread("few", few=1) as few, WorkerThread("all", few=None) as everything:
        assert few.submit(torch.get_num_threads).result() == 1
        assert everything.submit(torch.get_num_threads).result() == before
    assert torch.get_num_threads() == before


def test_closed_early_nothing_more_is_drawn() -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            time.sleep(0.001)
            drawn.append(number)
            yield number

    given = items()
    with WorkerThread("read") as thread:
        ahead = prefetch_map(given, str, thread)
        next(ahead)
        ahead.close()
        count = len(drawn)
        given.close()  # which nobody is in the middle of
        thread.settle()
    assert len(drawn) == count <= 2 + PREFETCH_BATCHES


def test_what_goes_wrong_in_drawing_comes_after_what_was_drawn() -> None:
    def items() -> Iterator[int]:
        yield from range(2)
        raise ValueError("no third")

    with WorkerThread("read") as thread:
        ahead = prefetch_map(items(), str, thread)
        assert [next(ahead)[1].result() for _ in range(2)] == ["0", "1"]
        with pytest.raises(ValueError, match="no third"):
            next(ahead)
