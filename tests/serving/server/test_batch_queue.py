"""Queue of batches: all that waits is scored at once, a full queue refuses, and what was taken is answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from holdall.serving.server.batch_queue import BatchQueue, BatchTimes, QueueFullError, Result, Work


class Scoring:
    """Function that scores a request by its number of rows, and stops before each batch until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, works: Sequence[Work]) -> list[Result]:
        self.begun.release()
        assert self.go.acquire(timeout=30)
        self.batches.append([work.num_rows for work in works])
        if any(work.rows == "broken" for work in works):
            raise RuntimeError("broken")
        return [np.full(work.num_rows, work.num_rows, dtype=np.float32) for work in works]


class Queue:
    """Queue whose results are delivered by the scoring thread itself."""

    def __init__(self, **limits: Any) -> None:
        self.scoring = Scoring()
        self.times: list[BatchTimes] = []
        self.answers: dict[int, Result] = {}
        self.arrived = threading.Semaphore(0)
        own: dict[str, Any] = {"batch_rows": 10, "batch_values": 100, "queue_rows": 100, "max_wait": 30.0} | limits
        self.queue = BatchQueue(self.scoring, observe=self.times.append, **own)
        self.queue.start(lambda function, *args: function(*args))

    def put(self, num_rows: int, rows: Any = None, num_values: int = 0) -> Work:
        work = Work(rows, num_rows, self._answer, num_values=num_values)
        self.queue.put(work)
        return work

    def _answer(self, work: Work, result: Result) -> None:
        self.answers[id(work)] = result
        self.arrived.release()

    def wait(self, number: int) -> None:
        for _ in range(number):
            assert self.arrived.acquire(timeout=30)


@pytest.fixture
def make() -> Iterator[Callable[..., Queue]]:
    made: list[Queue] = []

    def one(**limits: Any) -> Queue:
        made.append(Queue(**limits))
        return made[-1]

    yield one
    for queue in made:
        queue.scoring.go.release(1000)
        queue.queue.stop()


def test_requests_that_come_during_a_batch_are_the_next_one(make: Callable[..., Queue]) -> None:
    queue = make()
    works = [queue.put(1)]
    assert queue.scoring.begun.acquire(timeout=30)
    works += [queue.put(rows) for rows in (2, 3, 4, 5)]
    queue.scoring.go.release(3)
    queue.wait(5)
    assert queue.scoring.batches == [[1], [2, 3, 4], [5]]  # 5 more would be 14 rows
    assert [len(queue.answers[id(work)]) for work in works] == [1, 2, 3, 4, 5]  # type: ignore[arg-type]
    assert [times.num_rows for times in queue.times] == [1, 9, 5]
    assert queue.queue.num_rows == 0


def test_a_request_larger_than_a_batch_is_scored_alone(make: Callable[..., Queue]) -> None:
    queue = make()
    queue.put(1)
    assert queue.scoring.begun.acquire(timeout=30)
    for rows in (25, 1):
        queue.put(rows)
    queue.scoring.go.release(3)
    queue.wait(3)
    assert queue.scoring.batches == [[1], [25], [1]]


def test_values_in_bags_end_a_batch(make: Callable[..., Queue]) -> None:
    queue = make()
    queue.put(1)
    assert queue.scoring.begun.acquire(timeout=30)
    for rows, values in ((1, 60), (2, 40), (3, 1), (1, 100)):
        queue.put(rows, num_values=values)
    queue.scoring.go.release(4)
    queue.wait(5)
    assert queue.scoring.batches == [[1], [1, 2], [3], [1]]


def test_a_full_queue_refuses_and_recovers(make: Callable[..., Queue]) -> None:
    queue = make(queue_rows=20)
    queue.put(15)
    with pytest.raises(QueueFullError, match="15 rows wait, and 20 are the most"):
        queue.put(6)
    queue.put(5)
    queue.scoring.go.release(2)
    queue.wait(2)
    queue.put(20)
    assert queue.queue.num_rows == 20


def test_a_queue_that_is_late_refuses(make: Callable[..., Queue]) -> None:
    queue = make(max_wait=1e-9)
    queue.put(1)
    assert queue.scoring.begun.acquire(timeout=30)
    queue.put(1)  # the first is being scored, so that nobody waits yet
    with pytest.raises(QueueFullError, match="requests wait for more than"):
        queue.put(1)
    queue.scoring.go.release(2)
    queue.wait(2)
    queue.queue.check()


def test_requests_that_nobody_waits_for_are_not_scored(make: Callable[..., Queue]) -> None:
    queue = make()
    queue.put(1)
    assert queue.scoring.begun.acquire(timeout=30)
    queue.put(2).is_cancelled = True
    queue.put(3)
    queue.scoring.go.release(2)
    queue.wait(2)
    assert queue.scoring.batches == [[1], [3]]
    assert queue.queue.num_rows == 0


def test_a_batch_that_fails_answers_its_requests_and_the_next_goes_on(make: Callable[..., Queue]) -> None:
    queue = make()
    broken, good = queue.put(9, "broken"), queue.put(8)
    queue.scoring.go.release(2)
    queue.wait(2)
    assert isinstance(queue.answers[id(broken)], RuntimeError)
    assert len(queue.answers[id(good)]) == 8  # type: ignore[arg-type]


def test_stopping_answers_what_was_taken(make: Callable[..., Queue]) -> None:
    queue = make()
    works = [queue.put(rows) for rows in (9, 8, 7)]
    queue.scoring.go.release(100)
    queue.queue.stop()
    assert {id(work) for work in works} == set(queue.answers)
