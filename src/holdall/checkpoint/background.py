"""Checkpoints saved in the background: training waits for a copy in host memory, and a thread writes it.

The copy is of the rows that this process writes; its memory is reused by the next save. The threads of the processes
have a process group of their own, so that their messages cannot be confused with those of training.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from holdall.checkpoint.all_ranks import on_all_ranks
from holdall.checkpoint.hot_checkpoint import plan_hot
from holdall.checkpoint.partial_tensors import Saved
from holdall.checkpoint.protocols import TensorByRows
from holdall.checkpoint.saving import SHARD_BYTES, SavePlan, plan_save, write
from holdall.common.errors import ProcessError
from holdall.common.memory import available_memory
from holdall.common.sizes import readable_bytes
from holdall.common.worker_thread import WorkerThread
from holdall.distributed.processes import CONTROL_TIMEOUTS, SINGLE_PROCESS, PeerError, Processes

MAX_MEMORY_FRACTION = 0.25
"""Fraction of the free memory that a copy may take; a larger one is not made."""

ABORT_SECONDS = 1.0
"""Seconds that a save is waited for when another process is lost: it needs all of them, so it can only fail."""


class BackgroundSaver:
    """Writer of checkpoints, one at a time, on a thread. All calls are collective.

    An error of a save is raised by the next call, on all processes. As a context manager it waits at the end for the
    last save; otherwise `close` must be called before the process group ends.
    """

    def __init__(self, processes: Processes = SINGLE_PROCESS):
        self.processes = processes
        self._writers: Processes | None = processes
        """The same processes, with a group for the threads; None when closed."""
        if processes.world_size > 1:
            self._writers = replace(
                processes, groups={"control": processes.new_group(backend="gloo", timeouts=CONTROL_TIMEOUTS)}
            )
        self._thread: WorkerThread | None = None
        self._last: Future[Path] | None = None
        """The last save, until `wait` has seen its result."""
        self._has_warned = False
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        """Bytes of `_memory` that were ever written to."""

    def save(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Tensor | TensorByRows],
        state: Mapping[str, Any],
        *,
        keep: int = 2,
        shard_bytes: int = SHARD_BYTES,
    ) -> Path:
        """Like `checkpoint.save`, but returns once the host copy exists; first waits for the last save.

        Returns the path that the checkpoint will have. Where a copy would take more than a quarter of the free memory
        of some host, the checkpoint is complete when this returns, with a warning the first time. All saves into a
        folder should go through one saver: a save removes incomplete ones.
        """
        writers = self._wait_for_last()
        planned = plan_save(folder, step, tensors, state, keep=keep, shard_bytes=shard_bytes, processes=writers)
        return self._start(planned, writers)

    def save_hot(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Saved],
        state: Mapping[str, Any],
        *,
        base: int,
        shard_bytes: int = SHARD_BYTES,
    ) -> Path:
        """Like `checkpoint.save_hot`, in the background as `save` is."""
        writers = self._wait_for_last()
        planned = plan_hot(folder, step, tensors, state, base=base, shard_bytes=shard_bytes, processes=writers)
        return self._start(planned, writers)

    def wait(self) -> Path | None:
        """Wait until the last save is complete; its path, or None when there was none since the last `wait`."""
        if self._last is None:
            return None
        wait([self._last])  # an interrupt leaves the save to `__exit__`
        last, self._last = self._last, None
        return last.result()

    @property
    def is_busy(self) -> bool:
        """Whether this process has not finished a save; others may have."""
        return self._last is not None and not self._last.done()

    def close(self) -> None:
        """Wait for the last save, and release its process group and memory."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._last is not None:  # it may wait for a lost process: wait no longer for it than a step does
            is_lost = isinstance(error, ProcessError) and not isinstance(error, PeerError)
            wait([self._last], ABORT_SECONDS if is_lost else self.processes.timeout)
        self._release()

    def _release(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=not self.is_busy)
            self._thread = None
        writers, self._writers = self._writers, None
        if writers is not None and writers is not self.processes and not self.is_busy:
            writers.groups.clear()  # also where `writers` is still referenced, as by the traceback of an error
        self._memory, self._used = torch.empty(0, dtype=torch.uint8), 0

    def _wait_for_last(self) -> Processes:
        assert self._writers is not None, "closed"
        self.wait()
        return self._writers

    def _start(self, planned: SavePlan, writers: Processes) -> Path:
        if not self._has_memory(planned.copy_bytes, writers):
            path = write(planned, writers)
            self._last = Future()
            self._last.set_result(path)
            return path
        copied = on_all_ranks(writers, lambda: planned.copied(self._copy_buffer(planned.copy_bytes)))
        if self._thread is None:
            self._thread = WorkerThread("save")
        self._last = self._thread.submit(write, copied, writers)
        return planned.path

    def _copy_buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, the same memory from save to save, because allocating new pages is slow.

        It has a quarter more, so that it seldom has to grow; pages that are never written to take no memory.
        """
        if num_bytes > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8)
            self._used = 0
        self._used = max(self._used, num_bytes)
        return self._memory[:num_bytes]

    def _has_memory(self, num_bytes: int, writers: Processes) -> bool:
        """Whether the copies of all processes fit their hosts; memory that earlier ones used counts as free."""
        own = {
            "host": socket.gethostname(),
            "bytes": num_bytes,
            "used": self._used,
            "free": available_memory()["host"],
        }
        hosts: dict[str, list[dict[str, Any]]] = {}
        for theirs in writers.gather(own):
            hosts.setdefault(theirs["host"], []).append(theirs)
        for on_host in hosts.values():
            needed = sum(theirs["bytes"] for theirs in on_host)
            free = min(theirs["free"] for theirs in on_host) + sum(theirs["used"] for theirs in on_host)
            if needed > MAX_MEMORY_FRACTION * free:
                self._warn(needed, free)
                return False
        return True

    def _warn(self, needed: int, free: int) -> None:
        if self.processes.rank == 0 and not self._has_warned:
            warnings.warn(
                f"checkpoints are not written in the background: a copy of their tensors would take "
                f"{readable_bytes(needed)} where {readable_bytes(free)} of memory are free, of which it may take a "
                f"quarter: training waits for each",
                stacklevel=5,
            )
        self._has_warned = True
