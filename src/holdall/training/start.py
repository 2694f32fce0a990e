"""The start of a run of several processes: one makes its folder, all check that they were told the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdall.common.environment import versions
from holdall.common.files import refuse_existing
from holdall.common.folder_lock import refuse_locked
from holdall.common.settings import flag, settings_marked
from holdall.data.schema import Schema
from holdall.distributed.processes import Processes, RankLog
from holdall.distributed.shared_folder import check_shared
from holdall.popularity.profile import fingerprint
from holdall.training.config import TrainConfig


@contextmanager
def make_run_folder(out: Path, processes: Processes, *, resume: bool, overwrite: bool) -> Iterator[RankLog | None]:
    """Let rank 0 see that the run folder is free, that nobody trains in it, and all ranks that they share it.

    Every rank of several logs to `rank-N.log` there. What ends the block with an error is written down too. A folder of
    a start that was refused, which has these logs alone, is free.
    """

    def free() -> None:
        refuse_locked(out)
        if not resume and not _was_refused(out):
            refuse_existing(out, overwrite=overwrite, what="run folder")

    processes.first(free)
    if processes.world_size == 1:
        yield None
        return
    check_shared(out, processes)
    notes = RankLog(out, processes.rank)
    with notes.errors():
        notes.write(f"rank {processes.rank} of {processes.world_size}, process {os.getpid()}, on {processes.device}")
        yield notes


def _was_refused(out: Path) -> bool:
    """Whether a folder holds nothing but what ranks wrote down before any of them trained."""
    found = list(out.iterdir()) if out.is_dir() else []
    return bool(found) and all(path.match("rank-*.log") for path in found)


def agree_on_run(config: TrainConfig, schema: Schema, processes: Processes) -> None:
    """Refuse ranks with other settings, data or versions than rank 0, by name."""
    if processes.world_size == 1:
        return
    own = settings_marked(TrainConfig, "may_differ_by_rank")
    settings = {flag(name): repr(value) for name, value in config.to_json().items() if name not in own}
    found = versions()
    installed = {f"the version of {name}": found.get(name) for name in ("holdall", "torch")}
    processes.agree({**installed, "the data set (its fingerprint)": fingerprint(schema), **settings})
