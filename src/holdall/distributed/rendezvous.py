"""Rendezvous of the processes in torchrun's store that ignores keys left by an earlier restart.

When torchrun restarts all processes, its store still has the keys of the processes before, such as the addresses of
processes that are dead. torch would read them and fail, or wait. So the processes agree on a key prefix of their own:
rank 0 publishes a random one, and every other rank writes a random token under it. When all tokens are there, rank 0
writes the list of them; a rank that finds its token in that list knows that the prefix is not an old one. The number
of restarts that torchrun counts cannot be the prefix: it may differ from host to host.
"""

from __future__ import annotations

import datetime
import json
import time
import uuid
from collections.abc import Iterator

import torch.distributed as dist

PREFIX_KEY = "holdall/prefix"
"""Key of the newest prefix."""


def rendezvous(store: dist.Store, rank: int, world_size: int, limit: datetime.timedelta) -> dist.Store:
    """`store` under the prefix of these processes, once all are there; else a TimeoutError that names the missing.

    Every process sends a few hundred bytes, and polls up to 50 times a second.
    """
    token = uuid.uuid4().hex
    if rank == 0:
        prefix = _publish_prefix(store, f"holdall/{token}", world_size, limit)
    else:
        prefix = _find_prefix(store, token, rank, limit)
    return dist.PrefixStore(prefix, store)


def _publish_prefix(store: dist.Store, prefix: str, world_size: int, limit: datetime.timedelta) -> str:
    """Publish the prefix, as rank 0, and confirm the tokens of all other ranks."""
    store.set(PREFIX_KEY, prefix)
    tokens = {rank: f"{prefix}/{rank}" for rank in range(1, world_size)}
    for _ in _polls(limit):
        if store.check(list(tokens.values())):
            store.set(f"{prefix}/all", json.dumps([store.get(key).decode() for key in tokens.values()]))
            return prefix
    missing = [str(rank) for rank, key in tokens.items() if not store.check([key])]
    raise TimeoutError(f"timed out after {limit.total_seconds():g} s without rank {', '.join(missing)}")


def _find_prefix(store: dist.Store, token: str, rank: int, limit: datetime.timedelta) -> str:
    """Write this rank's token under the newest prefix, until rank 0 confirms it."""
    written_under = None
    for _ in _polls(limit):
        if not store.check([PREFIX_KEY]):
            continue
        prefix = store.get(PREFIX_KEY).decode()
        if prefix != written_under:
            store.set(f"{prefix}/{rank}", token)
            written_under = prefix
        if store.check([f"{prefix}/all"]) and token in json.loads(store.get(f"{prefix}/all")):
            return prefix
    raise TimeoutError(f"timed out after {limit.total_seconds():g} s without rank 0, or another one it waits for")


def _polls(limit: datetime.timedelta) -> Iterator[None]:
    end, pause = time.monotonic() + limit.total_seconds(), 0.02
    while time.monotonic() < end:
        yield
        time.sleep(pause)
        pause = min(0.2, pause * 1.2)
