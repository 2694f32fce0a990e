"""Tasks that run on every rank; if one fails, all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from holdall.distributed.processes import PeerError, Processes

Result = TypeVar("Result")


def on_all_ranks(processes: Processes, task: Callable[[], Result]) -> Result:
    """Run a task on every rank and return this rank's result; if one fails, all raise.

    The rank that failed raises its own error, the others a `PeerError` that names the rank and the error. A collective
    call.
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
