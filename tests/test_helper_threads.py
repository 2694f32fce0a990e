"""Threads that make things ready before their turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from holdall.helper_threads import READY, HelperThreads, made_ahead


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
    with HelperThreads("read") as thread:
        for number, (item, made) in enumerate(made_ahead(items(), make, thread)):
            assert (item, made.result()) == (number, str(number))
            assert len(drawn) == min(10, number + 1 + READY)
    assert begun == list(range(10))
    assert threading.active_count() == before


def test_what_goes_wrong_is_that_items_own() -> None:
    def make(number: int) -> int:
        if number == 3:
            raise ValueError("the third")
        return number

    with HelperThreads("read") as thread:
        found = list(made_ahead(iter(range(6)), make, thread))
        thread.settle()
    assert [made.result() for item, made in found if item != 3] == [0, 1, 2, 4, 5]
    with pytest.raises(ValueError, match="the third"):
        found[3][1].result()


def test_settled_it_has_nothing_to_do() -> None:
    done = []
    thread = HelperThreads("slow")
    thread.submit(lambda: (time.sleep(0.05), done.append(1)))
    thread.submit(lambda: 1 / 0)  # is for those to see who asked for it
    thread.settle()
    assert done == [1]
    thread.shutdown()
    thread.settle()


def test_few_threads_there_and_as_many_as_before_here() -> None:
    before = torch.get_num_threads()
    with HelperThreads("few", few=1) as few, HelperThreads("all", few=None) as everything:
        assert few.submit(torch.get_num_threads).result() == 1
        assert everything.submit(torch.get_num_threads).result() == before
    assert torch.get_num_threads() == before


def test_several_work_at_the_same_time_and_things_keep_their_order() -> None:
    all_there = threading.Barrier(3)

    def make(number: int) -> int:
        all_there.wait(timeout=30)  # which one thread alone would never pass
        time.sleep(0.01 * (3 - number % 3))
        return number

    with HelperThreads("read", few=1, count=3) as threads:
        assert [made.result() for _, made in made_ahead(iter(range(9)), make, threads, 3)] == list(range(9))
        assert {made.result() for made in [threads.submit(torch.get_num_threads) for _ in range(9)]} == {1}


def test_settled_none_of_several_has_anything_to_do() -> None:
    done = []
    with HelperThreads("slow", count=2) as threads:
        for seconds in (0.1, 0.0, 0.0):
            threads.submit(lambda seconds=seconds: (time.sleep(seconds), done.append(seconds)))
        threads.settle()
        assert sorted(done) == [0.0, 0.0, 0.1]
