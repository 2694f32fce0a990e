"""Training by a plan: its settings, its copy in the run folder, and its forecast compared with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdall.common.errors import CheckpointError, ConfigError
from holdall.common.files import write_json
from holdall.common.settings import flag
from holdall.data.schema import Schema
from holdall.distributed.addresses import processes_here
from holdall.distributed.processes import SINGLE_PROCESS, Processes
from holdall.planning.memory_check import check_free_memory
from holdall.planning.plan import Plan
from holdall.training.config import TrainConfig

PLAN_FILE = "plan.json"
"""Copy of the plan in the run folder."""
STAGES_FILE = "stages.json"
"""Predicted and measured seconds of the stages of a step, in the run folder."""


def follow(
    config: TrainConfig, schema: Schema, out: Path, *, resume: bool = False, processes: Processes = SINGLE_PROCESS
) -> tuple[TrainConfig, Plan]:
    """The settings of a run with those its plan decides, and the plan. A copy of it is left in the run folder.

    Raises unless the plan is for this data set and this number of processes, agrees with the other settings and fits
    this machine. Rank 0 reads the plan, the other ranks read its copy.
    """
    assert config.placement.plan is not None
    copy = out / PLAN_FILE
    processes.on_rank_zero(lambda: _keep_copy(config, schema, copy, resume, processes.world_size))
    plan = Plan.load(copy)
    return config.replace(**_settings(config, plan), plan=str(copy)), plan


def _keep_copy(config: TrainConfig, schema: Schema, copy: Path, resume: bool, world_size: int) -> None:
    """Check the plan of a run and copy it; for a resumed run, check that its copy has the same choices."""
    assert config.placement.plan is not None
    plan = Plan.load(config.placement.plan)
    plan.check(schema)
    if plan.world_size != world_size:
        raise ConfigError(
            f"{config.placement.plan} is for {plan.world_size} process{'es' * (plan.world_size > 1)}, and this run has "
            f"{world_size}: plan with --world-size {world_size}, or start {plan.world_size} (torchrun "
            f"--nproc-per-node {plan.world_size} -m holdall train ...)"
        )
    _settings(config, plan)  # raises on a contradiction
    if resume and copy.exists():
        if Plan.load(copy).choices_hash() != plan.choices_hash():
            raise CheckpointError(
                f"{copy.parent} was trained by another plan ({copy}): resume with that one, or start a new run"
            )
    else:
        check_free_memory(plan, copy.parent.parent, processes_here(world_size))
        copy.parent.mkdir(parents=True, exist_ok=True)
        plan.save(copy)


def _settings(config: TrainConfig, plan: Plan) -> dict[str, Any]:
    """What the plan decides, by the name of the setting."""
    settings, defaults = config.to_json(), TrainConfig().to_json()
    decided = {
        **plan.train_settings(),
        "strategy": plan.strategy,
        "prefetch": plan.prefetch,
        "tail": "disk" if "disk" in plan.tails().values() else "host",
    }
    for name, value in decided.items():
        given, default = settings[name], defaults[name]
        value = tuple(value) if isinstance(value, list) else value
        if given not in (default, value):
            raise ConfigError(
                f"{flag(name)} {given} is not what {config.placement.plan} was made for ({value}): leave it out, or "
                f"plan again"
            )
        decided[name] = value
    has_momentum, counts_momentum = bool(config.optimizer.momentum), plan.optimizer == "momentum_sgd"
    if has_momentum != counts_momentum:
        was, cure = ("with", "give it here") if counts_momentum else ("without", "plan again with it")
        raise ConfigError(f"{config.placement.plan} was made {was} --momentum, whose state takes memory: {cure}")
    return decided


ONE_CALL = ("dense", "update")
"""Stages that are compared as one: a plan counts the backward of tables with their update, and a run measures it with
that of the dense part."""
EXCHANGED = ("find", "fetch", "write_back", "communicate")
"""Stages of several processes that are compared as one: rows and gradients sent between them, measured where a step
waits for them (`fetch`, `exchange`)."""


Comparison = list[dict[str, float | str | None]]
"""Rows with `stage` and its `predicted` and `measured` seconds."""


def compare_with_plan(
    plan: Plan, measured: dict[str, float], step_seconds: float, folder: Path | None = None
) -> Comparison:
    """Predicted and measured seconds of every stage and of the step; written to a run folder if one is given."""
    backward = measured.get("backward", 0.0)  # a plan has one stage for forward and backward
    others = {stage: seconds for stage, seconds in measured.items() if stage != "backward"}
    rows = _compared(plan, {**others, "dense": measured.get("dense", 0.0) + backward}, step_seconds)
    if folder is not None:
        write_json(folder / STAGES_FILE, {"format": "holdall-stages", "version": 1, "stages": rows})
    return rows


def _compared(plan: Plan, measured: dict[str, float], step_seconds: float) -> Comparison:
    if plan.forecast is None:
        return []
    seconds = plan.forecast.seconds
    joined = (*ONE_CALL, *(EXCHANGED if plan.world_size > 1 else ()))
    rows: Comparison = [
        {"stage": stage, "predicted": predicted, "measured": measured.get(stage)}
        for stage, predicted in seconds.items()
        if stage not in joined and (stage in measured or predicted > 0)
    ]
    if plan.world_size > 1:
        predicted = sum(seconds[stage] for stage in EXCHANGED)
        waited = sum(measured.get(stage, 0.0) for stage in ("fetch", "exchange"))
        rows.append({"stage": "exchange", "predicted": predicted, "measured": waited})
    both = sum(measured.get(stage, 0.0) for stage in ONE_CALL)
    predicted = sum(seconds[stage] for stage in ONE_CALL)
    rows.append({"stage": " and ".join(ONE_CALL), "predicted": predicted, "measured": both})
    return [*rows, {"stage": "step", "predicted": plan.forecast.step_seconds, "measured": step_seconds}]
