"""Whether all processes of a run see one folder: those on other hosts do only where a file system is shared."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from holdall.common.errors import ProcessError
from holdall.distributed.processes import PeerError, Processes

PATIENCE = 15.0
"""Seconds in which a new file must be seen everywhere: network file systems show it late."""


def check_shared(folder: Path, processes: Processes, patience: float = PATIENCE) -> None:
    """Refuse, on every rank, a folder that is not the same one on all of them.

    Rank 0 leaves an empty file of a random name there, which the others must see; then it is gone again.
    """
    if processes.world_size == 1:
        return

    def leave() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        name = f".seen-by-all-{secrets.token_hex(8)}"
        (folder / name).touch()
        return name

    name = processes.first(leave)
    seen = processes.rank == 0 or _appears(folder, name, patience)
    found = processes.gather({"seen": seen, "where": f"{folder.absolute()} on {socket.gethostname()}"})
    missing = [rank for rank, one in enumerate(found) if not one["seen"]]
    if processes.rank == 0:
        (folder / name).unlink(missing_ok=True)
        if missing:
            with suppress(OSError):
                folder.rmdir()  # unless it was there before, with something in it
    if missing:
        kind = ProcessError if processes.rank == 0 else PeerError
        raise kind(
            f"rank {missing[0]} does not see the run folder of rank 0 ({found[missing[0]]['where']}, and "
            f"{found[0]['where']}): --out must be one folder, on a file system that all hosts share"
        )


def _appears(folder: Path, name: str, patience: float) -> bool:
    end = time.monotonic() + patience
    while True:
        with suppress(OSError):
            if name in os.listdir(folder):  # reading the folder makes NFS ask its server again
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
