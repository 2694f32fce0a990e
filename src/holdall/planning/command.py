"""The command `holdall plan`: counts once, then plans, prints, explains and writes."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path

from holdall.common.errors import ConfigError
from holdall.data.schema import Schema
from holdall.planning.explain import explain_table, show_explanation
from holdall.planning.inputs import PlanConfig, config_of, find_limits, find_lookups, make_problem
from holdall.planning.machine.hardware import Hardware, HardwareWarning, default_path
from holdall.planning.plan import Plan
from holdall.planning.planner import plan_problem, predict_problem
from holdall.planning.render import show
from holdall.popularity.profile import fingerprint


def run_plan(
    data: Path,
    config: PlanConfig,
    *,
    out: Path | None = None,
    hardware: Path | None = None,
    profile: Path | None = None,
    edited: Path | None = None,
    explain: str | None = None,
    as_json: bool = False,
) -> Plan:
    """Plan `data`, or predict an edited plan again; returns it."""
    schema = Schema.load(data)
    given = None if edited is None else Plan.load(edited)
    if given is not None:
        _refuse_settings(config, edited)
        given.check(schema)
        config = config_of(given)
    rates = hardware_here(hardware)
    lookups = find_lookups(schema, data, profile)
    problem = make_problem(schema, lookups, config, rates, data)
    limits = find_limits(config, rates, data)
    if given is None:
        made = plan_problem(problem, config, limits, data.name, fingerprint(schema))
    else:
        made = predict_problem(given, problem, limits)
    if explain is not None:
        made.table(explain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HardwareWarning)  # said as a note of the plan
        other = rates.check_machine()
    if other is not None and other not in made.notes:
        made = replace(made, notes=(*made.notes, other))
    if as_json:
        print(json.dumps(made.to_json(), indent=2))
    else:
        show(made)
        if explain is not None:
            show_explanation(explain_table(made, explain, problem, limits), made)
    if out is not None:
        try:
            made.save(out)
        except OSError as error:
            raise ConfigError(f"{out} cannot be written ({error.strerror}): name another file") from None
        start = "holdall" if made.world_size == 1 else f"torchrun --nproc-per-node {made.world_size} -m holdall"
        print(f"wrote {out}; next: {start} train {data} --out run --plan {out}", file=sys.stderr)
    return made


def _refuse_settings(config: PlanConfig, edited: Path | None) -> None:
    """An edited plan has its own settings: those given beside it would be left out in silence."""
    for field in fields(config):
        if getattr(config, field.name) != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            raise ConfigError(f"{flag} does not go with --edited: change it in {edited}, or plan anew without --edited")


def hardware_here(given: Path | None) -> Hardware:
    """The rates of a file, or this machine's own, measured now when they never were."""
    if given is not None:
        return Hardware.load(given)
    kept = default_path()
    if kept.exists():
        return Hardware.load(kept)
    from holdall.planning.machine.measure import measure_hardware

    print(
        f"this machine was not measured yet: measuring it now, a minute or two (a GPU: a few), into {kept}",
        file=sys.stderr,
    )
    measured = measure_hardware()
    measured.save(kept)
    return measured
