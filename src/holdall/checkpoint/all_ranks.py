"""What all processes do at once, and end alike: done on all of them, or an error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from holdall.distributed.processes import PeerError, Processes

Result = TypeVar("Result")


def on_all_ranks(processes: Processes, task: Callable[[], Result]) -> Result:
    """This process's result of a task that every process has.

    What a process fails of is raised there in its own words, and as `PeerError` that names it on the others.
    """
    if processes.world_size == 1:
        return task()
    try:
        result = task()
    except Exception as error:
        processes.gather(_words(error))
        raise
    for rank, failure in enumerate(processes.gather(None)):
        if failure is not None:
            raise PeerError(f"rank {rank}: {failure}")
    return result


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
