"""Batches that a thread makes ready before their turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from holdall.batch import Batch, Ids
from holdall.training.copy_ahead import READY, copied_ahead, made_ahead


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

    for number, (item, made) in enumerate(made_ahead(items(), make)):
        assert (item, made.result()) == (number, str(number))
        assert len(drawn) == min(10, number + 1 + READY)
    assert begun == list(range(10))


def test_what_goes_wrong_is_that_items_own() -> None:
    def make(number: int) -> int:
        if number == 3:
            raise ValueError("the third")
        return number

    found = list(made_ahead(iter(range(6)), make))
    assert [made.result() for item, made in found if item != 3] == [0, 1, 2, 4, 5]
    with pytest.raises(ValueError, match="the third"):
        found[3][1].result()


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    ahead = made_ahead(iter(range(100)), str)
    next(ahead)
    assert threading.active_count() == before + 1
    ahead.close()
    assert threading.active_count() == before


def test_the_threads_of_the_caller_stay_as_many() -> None:
    before = torch.get_num_threads()
    list(made_ahead(iter(range(3)), lambda _: torch.get_num_threads()))
    assert torch.get_num_threads() == before


def test_on_a_cpu_nothing_runs_ahead() -> None:
    seen = []
    batches = [Batch(torch.zeros(2, 1), Ids(torch.zeros(1, 2), None, 1), torch.zeros(2)) for _ in range(3)]
    for number, (batch, moved) in enumerate(copied_ahead(iter(batches), torch.device("cpu"), seen.append)):
        assert batch is moved
        assert len(seen) == number + 1
