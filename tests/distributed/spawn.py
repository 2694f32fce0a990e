"""Run of a function in several processes of a gloo group on loopback, with the result or error of each.

Processes are forked from a server that has imported torch and no more, so that starting one costs little.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def spawn(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """`function(rank, *arguments)` in `world_size` processes; their results by rank.

    The function is one of a module and its results are plain Python values. If a process raises, its traceback is
    raised here; if it dies or is not done in time, that is. All processes have ended when this returns.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)  # it takes a free port itself
    processes, pipes = [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        job = (function, rank, world_size, store.port, timeout, there, arguments)
        process = context.Process(target=_run, args=job, daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    try:
        return _collect(pipes, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"processes {sorted(set(range(len(pipes))) - set(results))} were not done in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                worked, value = pipes[rank].recv()
            except EOFError:
                raise RuntimeError(f"process {rank} died") from None
            if not worked:
                raise RuntimeError(f"process {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _run(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    timeout: float,
    pipe: Connection,
    arguments: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout))
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        result = function(rank, *arguments)
        dist.barrier()  # nobody leaves while another still needs it
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    pipe.send((True, result))
