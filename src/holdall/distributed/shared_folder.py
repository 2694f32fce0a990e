"""Check that all processes of a run see the same folder, which on several hosts needs a shared file system."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from holdall.common.errors import ProcessError
from holdall.distributed.processes import PeerError, Processes

VISIBLE_SECONDS = 15.0
"""Seconds until a new file must be visible to all processes: network file systems show it late."""


def check_shared(folder: Path, processes: Processes, timeout: float = VISIBLE_SECONDS) -> None:
    """Raise on every rank if the folder is not the same one on all of them. A collective call.

    Rank 0 makes an empty file with a random name, which the others must see, and removes it.
    """
    if processes.world_size == 1:
        return

    def make_file() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        name = f".seen-by-all-{secrets.token_hex(8)}"
        (folder / name).touch()
        return name

    name = processes.on_rank_zero(make_file)
    seen = processes.rank == 0 or _appears(folder, name, timeout)
    found = processes.gather({"seen": seen, "where": f"{folder.absolute()} on {socket.gethostname()}"})
    missing = [rank for rank, one in enumerate(found) if not one["seen"]]
    if processes.rank == 0:
        (folder / name).unlink(missing_ok=True)
        if missing:
            with suppress(OSError):
                folder.rmdir()  # fails if it has other files
    if missing:
        kind = ProcessError if processes.rank == 0 else PeerError
        raise kind(
            f"rank {missing[0]} does not see the run folder of rank 0 ({found[missing[0]]['where']}, and "
            f"{found[0]['where']}): --out must be one folder, on a file system that all hosts share"
        )


def _appears(folder: Path, name: str, timeout: float) -> bool:
    end = time.monotonic() + timeout
    while True:
        with suppress(OSError):
            if name in os.listdir(folder):  # reading the folder makes NFS ask its server again
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
