"""The command `holdall plan`: a new plan, or the forecast of an edited one, and the explanation of one of its tables.

Lookups are counted once for the plan and its explanation, and a machine that has no rates yet is measured first.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from holdall.commands.hardware import load_or_measure
from holdall.common.errors import ConfigError
from holdall.common.settings import flag, flat_settings
from holdall.data.identity import data_fingerprint
from holdall.data.schema import Schema
from holdall.planning.config import PlanConfig, config_of
from holdall.planning.explain import Explanation, explain_table
from holdall.planning.inputs import find_limits, find_lookups, make_problem
from holdall.planning.plan import Plan
from holdall.planning.planner import plan_problem, predict_problem


def make_plan(
    data: Path,
    config: PlanConfig,
    *,
    hardware: Path | None = None,
    profile: Path | None = None,
    edited: Path | None = None,
    explain: str | None = None,
) -> tuple[Plan, Explanation | None]:
    """The plan for `data`, or the plan `edited` with a new forecast; and the explanation of table `explain`."""
    schema = Schema.load(data)
    given = None if edited is None else Plan.load(edited)
    if given is not None:
        _refuse_settings(config, edited)
        given.check(schema)
        config = config_of(given)
    rates = load_or_measure(hardware)
    lookups = find_lookups(schema, data, profile)
    problem = make_problem(schema, lookups, config, rates, data)
    limits = find_limits(config, rates, data)
    if given is None:
        made = plan_problem(problem, config, limits, data.name, data_fingerprint(schema))
    else:
        made = predict_problem(given, problem, limits)
    explanation = None if explain is None else explain_table(made, explain, problem, limits)
    remarks = (rates.machine_mismatch(), rates.busy_remark())
    new = tuple(remark for remark in remarks if remark is not None and remark not in made.notes)
    return replace(made, notes=(*made.notes, *new)) if new else made, explanation


def save_plan(plan: Plan, out: Path) -> None:
    """Write a plan to `out`; a ConfigError names the file where it cannot be written."""
    try:
        plan.save(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}): name another file") from None


def _refuse_settings(config: PlanConfig, edited: Path | None) -> None:
    """Refuse settings given beside an edited plan, which has its own: they would be ignored in silence."""
    defaults = flat_settings(PlanConfig())
    for name, value in flat_settings(config).items():
        if value != defaults[name]:
            raise ConfigError(
                f"{flag(name)} does not go with --edited: change it in {edited}, or plan anew without --edited"
            )
