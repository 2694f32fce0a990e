"""Start of a run: its log, and the check that all processes have the same settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdall.common.environment import versions
from holdall.common.errors import ConfigError
from holdall.common.output_folder import clear_mark
from holdall.common.settings import flag, settings_marked
from holdall.data.dataset import DataSet
from holdall.data.identity import data_fingerprint
from holdall.data.schema import Schema
from holdall.distributed.processes import Processes
from holdall.planning.plan import Plan
from holdall.tables import Method
from holdall.training.config import TrainConfig
from holdall.training.follow_plan import PLAN_FILE
from holdall.training.pretrained import pretrained_files
from holdall.training.same_data import made_from
from holdall.training.tracking import RunLog


def inputs_of(data: Path, config: TrainConfig) -> list[Path]:
    """Files and folders that a run reads, which its own folder must not replace."""
    named = (config.placement.plan, config.placement.hardware, config.placement.profile)
    vectors = pretrained_files(config.pretrained).values()
    return [data, *vectors, *(Path(path) for path in named if path is not None)]


def check_inputs(data: Path, config: TrainConfig) -> None:
    """Raise if the data set or the plan of a run cannot be read, before the run takes the place of an older one."""
    schema = DataSet(data, "train").schema
    if config.placement.plan is not None:
        Plan.load(config.placement.plan).check(schema)


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
    out: Path,
    data: Path,
    schema: Schema,
    config: TrainConfig,
    processes: Processes,
    found: Mapping[str, Any],
    resumed_at: int | None,
) -> RunLog | None:
    """The log of a run, on rank 0: that of the run resumed at a step, or a new one with its `run.json` and schema.

    `found` are further fields of a new `run.json`: what the settings and the data set gave.
    The other ranks wait, since a collective of their first step would time out sooner.
    """
    opened: list[RunLog] = []

    def open_log() -> None:
        if resumed_at is not None:
            opened.append(RunLog.resume(out, resumed_at))
            return
        out.mkdir(parents=True, exist_ok=True)
        schema.save(out)
        settings = {"data": str(data.resolve()), "train": config.to_json()}
        plan = None if config.placement.plan is None else out / PLAN_FILE
        opened.append(RunLog.create(out, settings, found={**made_from(schema, plan), **found}))
        clear_mark(out)  # the run has started: run.json tells what the folder is

    processes.on_rank_zero(open_log)
    return opened[0] if opened else None
