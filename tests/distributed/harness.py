"""Harness that runs a function on several gloo processes of this host, and returns the result of each.

A clean server process imports torch once and forks the workers from there: a test pays for no import, and nothing of
the test process (threads, locks) is forked.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ("torch._dynamo", "torch.utils.tensorboard", "pytest", "holdall.cli", "holdall.training.train")
"""Modules that are slow to import: once here, not once per worker. (torch's optimizers import dynamo.)"""
CONTEXT.set_forkserver_preload([*PRELOAD, "tests.distributed.harness", "tests.distributed.frozen"])


class WorkerFailed(Exception):  # noqa: N818
    """Failure of the first worker that did not return; the message is its traceback."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(function: str, num: int, *arguments: Any, timeout: float = 60.0) -> list[Any]:
    """Results of `function`, given as `package.module:name`, on each of `num` ranks, called with `arguments`.

    The environment is that of torchrun. No worker is left, whatever happens: the first failure, or the timeout, ends
    all of them.
    """
    environment = {"WORLD_SIZE": str(num), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pipes, workers = [], []
    for rank in range(num):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        worker = CONTEXT.Process(
            target=_work, args=(theirs, function, {**environment, "RANK": str(rank)}, arguments), daemon=True
        )
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    try:
        return _collect(pipes, timeout)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            left = [rank for rank in range(len(pipes)) if rank not in results]
            raise WorkerFailed(f"ranks {left} did not end within {timeout:g} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                good, results[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise WorkerFailed(f"rank {rank} died without a word") from None
            if not good:
                raise WorkerFailed(f"rank {rank}:\n{results[rank]}")
    return [results[rank] for rank in range(len(pipes))]


def _work(pipe: Connection, function: str, environment: dict[str, str], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(environment)
    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*arguments)
        pipe.send((True, _plain(result)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _plain(value: Any) -> Any:
    """Tensors as arrays, which are sent through the pipe itself."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
