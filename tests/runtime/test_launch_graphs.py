"""Repeated launches: run directly the first time, captured the second, replayed from then on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdall.runtime import launch_graphs
from holdall.runtime.launch_graphs import LaunchGraphs, address_key


class Recorder:
    """Stands for a GPU: what was launched, captured and replayed, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[str] = []
        self.capturing = False
        monkeypatch.setattr(LaunchGraphs, "_capture", lambda _, launch: self.captured(launch))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: self.seen.append("synchronized"))

    def launch(self, name: str) -> Callable[[], None]:
        return lambda: self.seen.append(f"captured {name}" if self.capturing else f"ran {name}")

    def captured(self, launch: Callable[[], None]) -> object:
        self.capturing = True
        launch()
        self.capturing = False
        name = self.seen[-1].removeprefix("captured ")

        class Graph:
            def replay(graph) -> None:  # noqa: N805
                self.seen.append(f"replayed {name}")

        return Graph()


def test_runs_then_captures_then_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, launches = Recorder(monkeypatch), LaunchGraphs(torch.device("cuda"))
    launches.off = False
    for _ in range(3):
        for key in ("a", "b"):
            launches.run(key, gpu.launch(key))
    expected = ["ran a", "ran b", "captured a", "replayed a", "captured b", "replayed b", "replayed a", "replayed b"]
    assert gpu.seen == expected
    assert launches.num_graphs == 2


def test_launches_without_a_key_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, launches = Recorder(monkeypatch), LaunchGraphs(torch.device("cuda"))
    launches.off = False
    for _ in range(3):
        launches.run(None, gpu.launch("a"))
    assert gpu.seen == ["ran a"] * 3


def test_nothing_is_captured_when_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, launches = Recorder(monkeypatch), LaunchGraphs(torch.device("cuda"))
    for _ in range(3):
        launches.run("a", gpu.launch("a"))
    assert gpu.seen == ["ran a"] * 3


def test_cleared_graphs_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, launches = Recorder(monkeypatch), LaunchGraphs(torch.device("cuda"))
    launches.off = False
    for _ in range(2):
        launches.run("a", gpu.launch("a"))
    launches.clear()
    launches.run("a", gpu.launch("a"))
    assert gpu.seen == ["ran a", "captured a", "replayed a", "ran a"]


def test_keys_that_never_come_again_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_graphs, "MAX_KEYS", 3)
    gpu, launches = Recorder(monkeypatch), LaunchGraphs(torch.device("cuda"))
    launches.off = False
    for key in "aabcd":
        launches.run(key, gpu.launch(key))
    assert gpu.seen == ["ran a", "captured a", "replayed a", "ran b", "ran c", "synchronized", "ran d"]
    assert launches.num_graphs == 0


def test_keys_tell_addresses_and_shapes_apart() -> None:
    tensor = torch.zeros(4, 6)
    assert address_key(tensor, None) == address_key(tensor.view(4, 6), None)
    others = [tensor[1:], tensor[:3], tensor.view(24), tensor.clone(), None]
    assert len({address_key(tensor), *(address_key(other) for other in others)}) == 6
