"""Checks that a plan fits the memory: bytes needed and missing by tier, and errors that name a fix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from holdall.common.errors import ConfigError
from holdall.common.memory import available_memory
from holdall.common.sizes import readable_bytes
from holdall.planning.memory_cost import shares_memory
from holdall.planning.plan import TIERS, Plan


def needed_bytes(made: Plan) -> dict[str, int]:
    """Bytes that a plan takes by tier. Where host and device share one memory, the host's include the device's."""
    assert made.forecast is not None
    found = {tier: made.forecast.total(tier) for tier in TIERS}
    if shares_memory(made):
        found["host"] += found["device"]
        if made.caps.device is None:
            found.pop("device")
    return found


def shortages(made: Plan, limits: Mapping[str, int]) -> dict[str, int]:
    """Bytes by which a plan exceeds its limits, by tier."""
    return {tier: size - limits[tier] for tier, size in needed_bytes(made).items() if size > limits[tier]}


def refuse_too_large(made: Plan, limits: Mapping[str, int], *, edited: bool = False, has_budget: bool = False) -> None:
    """Raise a ConfigError when a plan does not fit; it names sizes and fixes.

    The plan may have been `edited` by hand, or its tables may keep to a budget.
    """
    short, needed = shortages(made, limits), needed_bytes(made)
    if not short:
        return
    assert made.forecast is not None
    excess = ", ".join(
        f"{readable_bytes(size)} more on the {tier} than the {readable_bytes(limits[tier])} it may use"
        for tier, size in short.items()
    )
    if edited:
        raise ConfigError(
            f"the edited plan does not fit: it takes {excess}; keep fewer rows there, or raise its caps: "
            f"{', '.join(f'{tier} {at_least(needed[tier])}' for tier in short)}"
        )
    fixes = [f"--{tier}-memory {at_least(needed[tier])}" for tier in short]
    if has_budget:
        fixes.append("a smaller --budget")
    elif made.preset != "auto":
        fixes.append("--preset auto, which moves rows away")
    else:
        fixes.append("--allow-compression 1/100")
    if made.forecast.memory["device"]["step"] > min(short.values()):
        fixes.append("a smaller --batch-size")
    raise ConfigError(f"plan '{made.preset}' does not fit: it takes {excess}; give {', or '.join(fixes)}")


def at_least(size: int) -> str:
    """A size in the format of a memory flag, rounded up."""
    for unit, power in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= 10 * power:
            return f"{-(-size // power)}{unit}"
    return f"{size}B"


def check_free_memory(plan: Plan, folder: str | Path = ".", num_processes: int = 1) -> None:
    """Raise unless this machine has the device and the free memory that a plan needs; `folder` is on the plan's disk.

    Where the device is the CPU, device and host bytes come from one memory. A plan's bytes are those of one of the
    `num_processes` that share this machine; each has a GPU of its own.
    """
    if plan.forecast is None:
        return
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "the plan is for a GPU and this machine has none that torch can use: plan again here, with the hardware "
            "measured here"
        )
    free = available_memory(folder, plan.device)
    needed = {tier: plan.forecast.total(tier) for tier in ("device", "host", "disk")}
    for tier in ("host", "disk") if plan.device == "cuda" else tuple(needed):
        needed[tier] *= num_processes
    if plan.device == "cpu":
        needed["host"] += needed.pop("device")
    for tier, size in needed.items():
        if size > free[tier]:
            where = f"the disk at {folder}" if tier == "disk" else f"the {tier}"
            raise ConfigError(
                f"the plan needs {readable_bytes(size)} of {where}, which has {readable_bytes(free[tier])} free "
                f"({readable_bytes(size - free[tier])} too little): free some, or plan with --{tier}-memory "
                f"{readable_bytes(free[tier]).replace(' ', '')}"
            )
