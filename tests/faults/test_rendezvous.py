"""Rendezvous in a store with keys of an earlier restart, and refusal of processes with other settings."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from holdall.distributed.rendezvous import PREFIX_KEY, rendezvous
from holdall.training.config import TrainConfig
from tests.distributed.harness import run

pytestmark = pytest.mark.slow

SOON = datetime.timedelta(seconds=20)


def meet_all(store: dist.Store, order: list[int], pause: float = 0.1) -> dict[int, dist.Store]:
    """Prefix of each of three ranks, when they start in this order."""
    found: dict[int, dist.Store] = {}
    threads = []
    for rank in order:
        clone = store.clone()
        threads.append(threading.Thread(target=lambda r=rank, s=clone: found.update({r: rendezvous(s, r, 3, SOON)})))
        threads[-1].start()
        threads[-1].join(pause)
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_what_was_said_before_is_not_heard(order: list[int]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(3):
        found = meet_all(store, order)
        for own in found.values():
            assert not any(own.check([f"address of {rank}"]) for rank in range(3)), "from an attempt before"
        for rank, own in found.items():
            own.set(f"address of {rank}", f"{attempt}.{rank}")
        for own in found.values():
            assert [own.get(f"address of {rank}").decode() for rank in range(3)] == [f"{attempt}.{r}" for r in range(3)]


def test_processes_that_died_while_they_met_are_not_waited_for() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set(PREFIX_KEY, "holdall/old")
    store.set("holdall/old/1", "a token of one that is dead")
    found = meet_all(store, [1, 2, 0])
    found[0].set("key", "new")
    assert found[1].get("key") == found[2].get("key") == b"new"


def test_who_does_not_come_is_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set(PREFIX_KEY, "holdall/old")
    soon, told = datetime.timedelta(seconds=0.5), []

    def come() -> None:
        try:
            rendezvous(store.clone(), 2, 4, soon)
        except TimeoutError as error:
            told.append(str(error))

    other = threading.Thread(target=come)
    other.start()
    with pytest.raises(TimeoutError, match=r"after 0\.5 s without rank 1, 3"):
        rendezvous(store, 0, 4, soon)
    other.join()
    assert told == ["timed out after 0.5 s without rank 0, or another one it waits for"]


def test_other_versions_are_refused(clicks: Path, tmp_path: Path) -> None:
    settings = TrainConfig.of(strategy="data-parallel", timeout=20).to_json()
    for name in ("torch", "holdall"):
        out = tmp_path / name
        for text in run("tests.faults.inject:train_with_another_version", 2, str(clicks), str(out), settings, name):
            assert f"the version of {name} is '0.0.1' on rank 1 and " in text
            assert "on rank 0: start all of them with the same command, data set and installation" in text
        assert not (out / "metrics.jsonl").exists()
