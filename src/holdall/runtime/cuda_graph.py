"""Capture of kernel launches as a CUDA graph, and its replay, which launches all of them at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.RLock()
"""Serialises capture and replay: CUDA allows both on two threads at once, but torch has one random state for both."""


def replay(graph: torch.cuda.CUDAGraph) -> None:
    """Launch a graph, while no thread captures one."""
    with _lock:
        graph.replay()


def capture(
    launch: Callable[[], Any], *, stream: torch.cuda.Stream | None = None, pool_of: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph:
    """Graph of the kernels that `launch` launches, captured on `stream` if given, without synchronizing with it.

    Call `launch` once before: kernels must have been compiled. Other threads may use the device meanwhile; their
    `replay` waits. With `pool_of`, the graph shares the memory pool of another one: both must have been captured on the
    same stream, and must not run at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    with _lock, _no_garbage_collection():
        if stream is None:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                launch()
            return graph
        with torch.cuda.stream(stream):  # unlike torch.cuda.graph, does not empty caches, which would synchronize
            graph.capture_begin(pool=None if pool_of is None else pool_of.pool(), capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
    return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Context without garbage collection: finalizers might synchronize, which is illegal while a stream is captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def forbid_synchronization() -> Iterator[None]:
    """Context in which an operation that synchronizes with the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
