"""Threads of torch: from affinity and cgroup quotas, unless a variable or an option says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from holdall.common import threads
from holdall.common.threads import available_cores, torch_threads


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of 64 cores, on which nobody has chosen a number of threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name in (*threads.SET_BY, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("files", "process", "expected"),
    [
        ({}, "", 64),
        ({"cpu.max": "max 100000"}, "0::/\n", 64),
        ({"cpu.max": "200000 100000"}, "0::/\n", 2),
        ({"cpu.max": "250000 100000"}, "0::/\n", 3),
        ({"cpu.max": "50000 100000"}, "0::/\n", 1),
        ({"jobs/mine/cpu.max": "400000 100000"}, "0::/jobs/mine\n", 4),
        ({"jobs/cpu.max": "300000 100000", "jobs/mine/cpu.max": "max 100000"}, "0::/jobs/mine\n", 3),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "800000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, "", 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/\n", 64),
        (
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "500000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            "4:cpu,cpuacct:/a\n3:memory:/a\n",
            5,
        ),
        ({"cpu.max": "nonsense"}, "nonsense", 64),
    ],
)
def test_cores_of_a_cgroup(tmp_path: Path, files: dict[str, str], process: str, expected: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "process").write_text(process)
    assert available_cores(tmp_path, tmp_path / "process") == expected


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch with four threads on a host where this process has two cores."""
    now = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: now.__setitem__(0, number))
    monkeypatch.setattr(threads, "available_cores", lambda: 2)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("environment", "chosen", "expected"),
    [
        ({}, None, 2),
        ({"LOCAL_WORLD_SIZE": "2"}, None, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, None, 1),
        ({"OMP_NUM_THREADS": "4"}, None, 4),
        ({"OMP_NUM_THREADS": "4"}, 3, 3),
        ({}, 8, 8),
    ],
)
def test_chosen_threads(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], chosen: int | None, expected: int
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with torch_threads(chosen) as found:
        assert found == torch.get_num_threads() == expected
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_a_smaller_number_that_was_set_stays() -> None:
    torch.set_num_threads(1)
    with torch_threads() as found:
        assert found == 1
