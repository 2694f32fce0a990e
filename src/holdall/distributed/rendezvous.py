"""The first thing processes do: meet in the store that torchrun keeps, and leave what is left of others behind.

When torchrun starts all processes again, its store still holds what those before have said, such as the addresses of
processes that are dead. torch would read them and fail, or wait, as it happens. So the processes agree on a part of the
store that is theirs alone: rank 0 draws its name, and every other process draws a token and shows it there; a process
knows that a name is not an old one when rank 0's answer holds its token. The number of restarts that torchrun counts
may differ from host to host, so it cannot be that name.
"""

from __future__ import annotations

import datetime
import json
import time
import uuid
from collections.abc import Iterator

import torch.distributed as dist

PLACE = "holdall/place"


def rendezvous(store: dist.Store, rank: int, world_size: int, limit: datetime.timedelta) -> dist.Store:
    """The part of `store` for these processes; returns when all have come, and raises TimeoutError naming the missing.

    Every process sends a few hundred bytes, and asks up to 50 times a second.
    """
    token = uuid.uuid4().hex
    place = _invite(store, token, world_size, limit) if rank == 0 else _come(store, token, rank, limit)
    return dist.PrefixStore(place, store)


def _invite(store: dist.Store, name: str, world_size: int, limit: datetime.timedelta) -> str:
    """Rank 0's part: name a place, and answer when all others are there."""
    place = f"holdall/{name}"
    store.set(PLACE, place)
    others = {rank: f"{place}/{rank}" for rank in range(1, world_size)}
    for _ in _polls(limit):
        if store.check(list(others.values())):
            store.set(f"{place}/all", json.dumps([store.get(key).decode() for key in others.values()]))
            return place
    missing = [str(rank) for rank, key in others.items() if not store.check([key])]
    raise TimeoutError(f"timed out after {limit.total_seconds():g} s without rank {', '.join(missing)}")


def _come(store: dist.Store, token: str, rank: int, limit: datetime.timedelta) -> str:
    """What the others do: show a token at the newest place, until rank 0's answer has it."""
    shown_at = None
    for _ in _polls(limit):
        if not store.check([PLACE]):
            continue
        place = store.get(PLACE).decode()
        if place != shown_at:
            store.set(f"{place}/{rank}", token)
            shown_at = place
        if store.check([f"{place}/all"]) and token in json.loads(store.get(f"{place}/all")):
            return place
    raise TimeoutError(f"timed out after {limit.total_seconds():g} s without rank 0, or another one it waits for")


def _polls(limit: datetime.timedelta) -> Iterator[None]:
    end, pause = time.monotonic() + limit.total_seconds(), 0.02
    while time.monotonic() < end:
        yield
        time.sleep(pause)
        pause = min(0.2, pause * 1.2)
