"""Worker thread: order and errors of its tasks, items drawn ahead of use, and no thread that outlives its use."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from holdall.common.worker_thread import PREFETCH_BATCHES, WorkerThread, prefetch_map, prefetched


def alive(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"holdall-{name}"]


# Tasks


def test_tasks_run_in_order_and_errors_stay_in_their_futures() -> None:
    done = []
    thread = WorkerThread("slow")
    thread.submit(lambda: (time.sleep(0.05), done.append(1)))
    failed = thread.submit(lambda: 1 / 0)
    thread.submit(done.append, 2)
    thread.drain()
    assert done == [1, 2]
    with pytest.raises(ZeroDivisionError):
        failed.result()
    thread.shutdown()
    thread.drain()
    with pytest.raises(RuntimeError, match="shut down"):
        thread.submit(done.append, 3)
    assert not alive("slow")


def test_a_cancelled_task_is_not_run() -> None:
    opened, done = threading.Event(), []
    with WorkerThread("cancel") as thread:
        thread.submit(opened.wait, 20)
        assert thread.submit(done.append, 1).cancel()
        thread.submit(done.append, 2)
        opened.set()
    assert done == [2]


def test_intraop_threads_are_limited_in_the_worker_thread_only() -> None:
    before = torch.get_num_threads()
    with WorkerThread("few", 1) as few, WorkerThread("all") as everything:
        assert few.submit(torch.get_num_threads).result() == 1
        assert everything.submit(torch.get_num_threads).result() == before
    assert torch.get_num_threads() == before


def test_the_thread_of_a_dropped_worker_ends() -> None:
    worker = WorkerThread("dropped")
    assert worker.submit(int, "7").result() == 7
    (thread,) = alive("dropped")
    del worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_task_that_never_returns_does_not_keep_the_interpreter_from_exiting() -> None:
    program = (
        "import threading; from holdall.common.worker_thread import WorkerThread; thread = WorkerThread('stuck'); "
        "thread.submit(threading.Event().wait); print('end', flush=True)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (0, "end\n"), found.stderr


# Items drawn ahead, with what is made of them


def test_items_are_made_ahead_up_to_the_count() -> None:
    made: list[int] = []
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for number in range(10):
            drawn.append(number)
            yield number

    def make(number: int) -> str:
        assert threading.current_thread().name == "holdall-make"
        made.append(number)
        return str(number)

    with WorkerThread("make") as thread:
        for number, (item, result) in enumerate(prefetch_map(items(), make, thread)):
            assert (item, result.result()) == (number, str(number))
            thread.drain()
            assert len(drawn) == min(10, number + 1 + PREFETCH_BATCHES)
    assert made == list(range(10))
    assert not alive("make")


def test_an_error_of_making_belongs_to_its_item() -> None:
    def make(number: int) -> int:
        if number == 3:
            raise ValueError("the third")
        return number

    with WorkerThread("make") as thread:
        found = list(prefetch_map(iter(range(6)), make, thread))
        thread.drain()
    assert [made.result() for item, made in found if item != 3] == [0, 1, 2, 4, 5]
    with pytest.raises(ValueError, match="the third"):
        found[3][1].result()


def test_closed_early_nothing_more_is_drawn() -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            time.sleep(0.001)
            drawn.append(number)
            yield number

    given = items()
    with WorkerThread("make") as thread:
        ahead = prefetch_map(given, str, thread)
        next(ahead)
        ahead.close()
        count = len(drawn)
        given.close()  # no thread is executing it
        thread.drain()
    assert len(drawn) == count <= 2 + PREFETCH_BATCHES


def test_an_error_of_drawing_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(2)
        raise ValueError("no third")

    with WorkerThread("make") as thread:
        ahead = prefetch_map(items(), str, thread)
        assert [next(ahead)[1].result() for _ in range(2)] == ["0", "1"]
        with pytest.raises(ValueError, match="no third"):
            next(ahead)


# Items drawn ahead by a thread of their own


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_prefetched_items_are_the_same_in_the_same_order(depth: int) -> None:
    items = [None, 3, (), "x", None]  # none of them means the end
    assert list(prefetched(iter(items), depth, "same")) == items
    assert list(prefetched(iter([]), depth, "same")) == []
    assert not alive("same")


def test_an_interrupt_of_the_consumer_ends_the_thread() -> None:
    def consume() -> None:
        for number in prefetched(iter(range(100)), 2, "interrupted"):
            if number == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    gc.collect()
    assert not alive("interrupted")


def test_the_worker_thread_itself_may_close_the_iterator() -> None:
    """The garbage collector, which runs on any thread, closes iterators that nobody refers to."""
    at_rest, closed = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 0
        at_rest.wait(20)
        ahead.close()
        closed.set()

    ahead = prefetched(items(), 1, "itself")
    assert next(ahead) == 0
    (thread,) = alive("itself")
    at_rest.set()
    assert closed.wait(20)
    thread.join(20)
    assert not thread.is_alive()
    assert list(ahead) == []
