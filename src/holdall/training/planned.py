"""Training by a plan: what `--plan plan.json` decides, what it must not contradict, and the copy a run keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from holdall.errors import CheckpointError, ConfigError
from holdall.placement.memory import check_room
from holdall.placement.plan import Plan
from holdall.schema import Schema
from holdall.training.config import TrainConfig

PLAN_FILE = "plan.json"
"""The plan of a run, in its folder."""


def follow(config: TrainConfig, schema: Schema, out: Path, *, resume: bool = False) -> tuple[TrainConfig, Plan]:
    """The settings of a run with what its plan decides, and the plan; a copy of it is left in the run folder.

    Raises unless the plan is for this data set, goes together with the other settings and fits this machine.
    """
    assert config.plan is not None
    plan = Plan.load(config.plan)
    plan.check(schema)
    if plan.world_size > 1:
        raise ConfigError(
            f"{config.plan} is for {plan.world_size} processes, and this is one: plan with --world-size 1"
        )
    settings = _settings(config, plan)
    copy = out / PLAN_FILE
    if resume and copy.exists():
        if Plan.load(copy).choices_hash() != plan.choices_hash():
            raise CheckpointError(
                f"{out} was trained by another plan ({copy}): resume with that one, or start a new run"
            )
    else:
        check_room(plan, out.parent)
        out.mkdir(parents=True, exist_ok=True)
        plan.save(copy)
    return replace(config, **settings, plan=str(copy)), plan


def _settings(config: TrainConfig, plan: Plan) -> dict[str, Any]:
    """What the plan decides, by the name of the setting."""
    defaults = TrainConfig()
    decided = {
        **plan.train_settings(),
        "strategy": plan.strategy,
        "prefetch": plan.prefetch,
        "tail": "disk" if "disk" in plan.tails().values() else "host",
    }
    for name, value in decided.items():
        given, default = getattr(config, name), getattr(defaults, name)
        value = tuple(value) if isinstance(value, list) else value
        if given not in (default, value):
            raise ConfigError(
                f"--{name.replace('_', '-')} {given} is not what {config.plan} was made for ({value}): leave it out, "
                f"or plan again"
            )
        decided[name] = value
    return decided


def compared(plan: Plan, measured: dict[str, float], step_seconds: float) -> list[dict[str, float | str | None]]:
    """Predicted and measured seconds of every stage that has both, and of the step."""
    if plan.forecast is None:
        return []
    rows: list[dict[str, float | str | None]] = [
        {"stage": stage, "predicted": seconds, "measured": measured.get(stage)}
        for stage, seconds in plan.forecast.seconds.items()
        if stage in measured or seconds > 0
    ]
    return [*rows, {"stage": "step", "predicted": plan.forecast.step_seconds, "measured": step_seconds}]
