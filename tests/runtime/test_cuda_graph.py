"""Locking and garbage collection around a capture, with a fake graph that records calls."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from holdall.runtime import cuda_graph
from holdall.runtime.cuda_graph import capture, replay

STREAM: Any = object()


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    noted: list[str]

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.noted.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self.noted.append("end")

    def pool(self) -> str:
        return "its pool"

    def replay(self) -> None:
        self.noted.append("replay")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of the fake graphs."""
    found: list[str] = []
    monkeypatch.setattr(Graph, "noted", found, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    return found


def test_nothing_is_collected_while_a_stream_is_captured(noted: list[str]) -> None:
    graph = capture(lambda: noted.append(f"launch, collecting: {gc.isenabled()}"), stream=STREAM)
    assert gc.isenabled()
    capture(lambda: None, stream=STREAM, pool_of=graph)
    assert noted == [
        "begin in None, thread_local",
        "launch, collecting: False",
        "end",
        "begin in its pool, thread_local",
        "end",
    ]


def test_a_launch_that_fails_ends_the_capture(noted: list[str]) -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        capture(fail, stream=STREAM)
    assert noted[-1] == "end"
    assert gc.isenabled()
    assert cuda_graph._lock.acquire(blocking=False)
    cuda_graph._lock.release()


def test_collecting_stays_off_where_it_was(noted: list[str]) -> None:
    gc.disable()
    try:
        capture(lambda: None, stream=STREAM)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_others_replay_before_or_after_a_capture(noted: list[str]) -> None:
    other: Any = Graph()
    thread = threading.Thread(target=replay, args=(other,))

    def launch() -> None:
        thread.start()
        thread.join(timeout=0.05)
        noted.append("launch")

    capture(launch, stream=STREAM)
    thread.join()
    assert noted[1:] == ["launch", "end", "replay"]
