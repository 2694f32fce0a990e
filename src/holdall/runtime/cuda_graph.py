"""Kernels that are launched one by one, captured as a CUDA graph: replaying that launches all of them at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_turns = threading.RLock()
"""Held by those who capture a graph or replay one: CUDA lets two threads do so at once, but torch keeps one state of
random numbers for both."""


def replay(graph: torch.cuda.CUDAGraph) -> None:
    """Launch what was captured, while nobody captures."""
    with _turns:
        graph.replay()


def captured(
    launch: Callable[[], Any], *, stream: torch.cuda.Stream | None = None, beside: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph:
    """What `launch` does, on `stream` if there is one, which is then not waited for; `beside` lends its memory.

    Run it as usual before: kernels must have been compiled. Other threads may use the device meanwhile; `replay` makes
    them wait. Graphs with the same memory must not run at the same time, and have the same stream here.
    """
    graph = torch.cuda.CUDAGraph()
    with _turns, _nothing_collected():
        if stream is None:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                launch()
            return graph
        with torch.cuda.stream(stream):  # without emptying caches, which waits for the device
            graph.capture_begin(pool=None if beside is None else beside.pool(), capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
    return graph


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Inside, garbage stays: its finalizers might wait for the device, which cannot be done while a stream is
    captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, an operation that waits for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
