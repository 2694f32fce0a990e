"""Start of a run: its folder and its log, and the check that all processes have the same settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdall.common.environment import versions
from holdall.common.errors import ConfigError
from holdall.common.files import refuse_existing
from holdall.common.folder_lock import refuse_locked
from holdall.common.settings import flag, settings_marked
from holdall.data.identity import data_fingerprint
from holdall.data.schema import Schema
from holdall.distributed.processes import Processes, RankLog
from holdall.distributed.shared_folder import check_shared
from holdall.tables import Method
from holdall.training.config import TrainConfig
from holdall.training.tracking import RunLog


@contextmanager
def make_run_folder(out: Path, processes: Processes, *, resume: bool, overwrite: bool) -> Iterator[RankLog | None]:
    """Check, on rank 0, that the run folder is free and not locked, and on all ranks that they share it.

    Each of several ranks logs to `rank-N.log` there, also the error that ends the block. A folder with such logs alone
    is free: an earlier start was refused.
    """

    def check_free() -> None:
        refuse_locked(out)
        if not resume and not _was_refused(out):
            refuse_existing(out, overwrite=overwrite, what="run folder")

    processes.on_rank_zero(check_free)
    if processes.world_size == 1:
        yield None
        return
    check_shared(out, processes)
    log = RankLog(out, processes.rank)
    with log.errors():
        log.write(f"rank {processes.rank} of {processes.world_size}, process {os.getpid()}, on {processes.device}")
        yield log


def _was_refused(out: Path) -> bool:
    """Whether a folder has nothing but logs of ranks, none of which trained."""
    found = list(out.iterdir()) if out.is_dir() else []
    return bool(found) and all(path.match("rank-*.log") for path in found)


def refuse_frozen_tables(methods: Mapping[str, Method] | None) -> None:
    """Raise if the rows of a table would stay the random ones that it starts with."""
    for name, method in (methods or {}).items():
        if not method.trains:
            raise ConfigError(
                f"table '{name}' is stored by {method}, whose codes are fitted to trained rows and do not train: "
                f"choose codes that do (--method quantized --setting bits=8), or train dense tables and compress them "
                f"afterwards (holdall.compress with fit=True)"
            )


def agree_on_run(config: TrainConfig, schema: Schema, processes: Processes) -> None:
    """Raise if a rank has other settings, data or versions than rank 0, naming the difference."""
    if processes.world_size == 1:
        return
    own = settings_marked(TrainConfig, "may_differ_by_rank")
    settings = {flag(name): repr(value) for name, value in config.to_json().items() if name not in own}
    found = versions()
    installed = {f"the version of {name}": found.get(name) for name in ("holdall", "torch")}
    processes.agree({**installed, "the data set (its fingerprint)": data_fingerprint(schema), **settings})


def open_run_log(
    out: Path, data: Path, schema: Schema, config: TrainConfig, processes: Processes, resumed_at: int | None
) -> RunLog | None:
    """The log of a run, on rank 0: that of the run resumed at a step, or a new one with its `run.json` and schema.

    The other ranks wait, since a collective of their first step would time out sooner.
    """
    opened: list[RunLog] = []

    def open_log() -> None:
        if resumed_at is not None:
            opened.append(RunLog.resume(out, resumed_at))
            return
        out.mkdir(parents=True, exist_ok=True)
        schema.save(out)
        opened.append(RunLog.create(out, {"data": str(data.resolve()), "train": config.to_json()}))

    processes.on_rank_zero(open_log)
    return opened[0] if opened else None
