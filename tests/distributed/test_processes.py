"""Processes: control messages, refusals, and error messages of failures."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import torch

from holdall.common.errors import ConfigError, ProcessError
from holdall.distributed import processes
from holdall.distributed.processes import process_group
from tests.distributed.harness import WorkerFailed, free_port, run

pytestmark = pytest.mark.slow

HERE = "tests.distributed.process_workers"
CPU = torch.device("cpu")


def test_collectives_take_uneven_sizes_and_count_their_bytes() -> None:
    results = run(f"{HERE}:every_collective", 3)
    for me, found in enumerate(results):
        np.testing.assert_array_equal(found["gathered"][:, 0], [1, 1, 2, 2, 2, 2])
        expected = [10 * other + me for other in range(3) for _ in range(other + me)]
        np.testing.assert_array_equal(found["received"][:, 0], expected)
        assert found["reduced"].tolist() == [3, 3]
        assert found["told"].tolist() == [0, 7]
        to_others = sum(me + other for other in range(3) if other != me)
        assert found["bytes"] == {
            "sizes": 8 * 2 + 8 * 2,  # a number to each of two others, for the gather and for the all-to-all
            "all_gather": 4 * 3 * 4 * 2,  # four rows, with padding, of three floats, to two others
            "all_to_all": to_others * 2 * 8,
            "all_reduce": 2 * 2 * 4 * 2 // 3,
            "broadcast": 2 * 8 * 2 if me == 0 else 0,
        }
        assert found["calls"]["sizes"] == 2
        assert found["json"] == [{"rank": r, "nan": [0.1, None]} for r in range(3)]
        assert found["first"] == {"by": 0}


def test_what_rank_zero_fails_of_ends_the_others() -> None:
    assert run(f"{HERE}:rank_zero_fails", 2) == ["HoldallError: no room", "PeerError: rank 0: no room"]


def test_ranks_that_do_not_agree_are_named() -> None:
    first, *others = run(f"{HERE}:disagree", 3)
    assert "--lr is 0.2 on rank 2 and 0.1 on rank 0" in first
    assert first.startswith("ProcessError")
    assert all(text.startswith("PeerError") for text in others)


def test_a_hang_ends_with_rank_and_step() -> None:
    found = run(f"{HERE}:one_hangs", 2)
    assert found[1] == "slept"
    assert "rank 0, step 12: all_reduce waited 1 s or more" in found[0]


def test_a_process_that_is_gone_is_noticed_at_once() -> None:
    assert "rank 0, step 3: all_reduce lost another process" in run(f"{HERE}:one_dies", 2)[0]


def test_the_harness_gives_the_traceback_and_leaves_no_one_waiting() -> None:
    with pytest.raises(WorkerFailed, match="no_such_function"):
        run(f"{HERE}:no_such_function", 2)
    with pytest.raises(WorkerFailed, match=r"ranks \[0, 1\] did not end within 1 s"):
        run("time:sleep", 2, 30, timeout=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set: start with torchrun"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a number"),
        ({"MASTER_ADDR": "no-such-host.invalid", "RANK": "1"}, "the name of that host is not known here"),
        ({"RANK": "1"}, "is rank 0 running"),
    ],
)
def test_addresses_and_ports_that_do_not_work(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    good = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    monkeypatch.setattr(processes, "START_SECONDS", 1.0)
    for name, value in {**good, **changes}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ProcessError, ConfigError), match=message), process_group(CPU, timeout=1.0):
        raise AssertionError("joined")


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        good = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": other.getsockname()[1]}
        for name, value in good.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ProcessError, match="the port is taken on this host"), process_group(CPU, timeout=1.0):
            raise AssertionError("joined")


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with process_group(CPU) as alone:
        assert (alone.rank, alone.world_size, alone.control) == (0, 1, None)
        assert alone.gather("x") == ["x"]
        assert not torch.distributed.is_initialized()
