"""Check of remembered rates: a few are measured again, in about a second, and compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from holdall.common.threads import torch_threads
from holdall.planning.layer_cost import layer_seconds
from holdall.planning.machine.clock import Clock
from holdall.planning.machine.conditions import LoadWatch
from holdall.planning.machine.hardware import MAX_SPREAD, Conditions, Hardware, line_at, machine_identity
from holdall.planning.machine.measure_dense import stream_cost, time_layer
from holdall.planning.machine.measure_rows import rates_of_table

TABLE_BYTES = 1 << 27
ROW_BYTES, NUM_ROWS = 64, 1 << 15
WIDTH, SAMPLES = 256, {"cpu": 2_048, "cuda": 16_384}
REPEATS = 5
SECONDS = 1.0
"""Seconds after which nothing is repeated more often than it must be."""

Check = Callable[[Clock], float]


def checks(hardware: Hardware) -> dict[str, tuple[float, Check]]:
    """Operations to time, by name: the seconds that the rates predict, and how they are measured."""
    samples = SAMPLES[hardware.device]
    rows = line_at(hardware.gather["host"], ROW_BYTES).seconds(NUM_ROWS)
    return {
        "memory in order": (1 / hardware.stream, lambda clock: 1 / stream_cost(clock)),
        "layers": (
            layer_seconds(hardware.layers, WIDTH, WIDTH, samples),
            lambda clock: time_layer(clock, WIDTH, WIDTH, samples, "float32"),
        ),
        "random rows": (rows, lambda clock: _random_rows(replace(clock, device=torch.device("cpu"), cold=True))),
    }


def _random_rows(clock: Clock) -> float:
    """Seconds to read random rows of host memory."""
    with torch_threads(1):
        table = torch.ones(TABLE_BYTES // ROW_BYTES, ROW_BYTES // 4)
    return rates_of_table(clock, table, np.random.default_rng(4))[0].seconds(NUM_ROWS)


def off_rates(hardware: Hardware, now: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """How many times as long as by the rates some operations take now, of those that are off by `MAX_SPREAD` or more.

    An operation that is off is timed again, and the ratio that is nearer to 1 counts.
    """
    clock = Clock(torch.device(hardware.device), REPEATS, now=now, deadline=now() + SECONDS)
    found = {}
    with torch_threads():
        for name, (predicted, measure) in checks(hardware).items():
            ratio = measure(clock) / max(predicted, 1e-12)
            if _is_off(ratio):
                ratio = min(ratio, measure(clock) / max(predicted, 1e-12), key=lambda r: abs(np.log(r)))
            if _is_off(ratio):
                found[name] = ratio
    return found


def _is_off(ratio: float) -> bool:
    return not 1 / MAX_SPREAD <= ratio <= MAX_SPREAD


def rates_are_off(hardware: Hardware) -> str | None:
    """A sentence on rates of this machine that are not what they were; None if they are, or are another machine's."""
    if hardware.machine.get("id") != machine_identity()["id"]:
        return None
    watch = LoadWatch()
    off = off_rates(hardware)
    if not off:
        return None
    return describe_off(hardware, off, watch.conditions())


def describe_off(hardware: Hardware, off: dict[str, float], now: Conditions) -> str:
    """The sentence on rates that are `off`, and on what was or is wrong with the machine."""
    said = ", ".join(
        f"{name} {ratio:.1f} times as slow" if ratio > 1 else f"{name} {1 / ratio:.1f} times as fast"
        for name, ratio in off.items()
    )
    reasons = []
    if hardware.conditions is not None and (was := hardware.conditions.busy()) is not None:
        reasons.append(f"it was busy then ({was})")
    if (busy := now.busy()) is not None:
        reasons.append(f"it is busy now ({busy})")
    why = f"; {' and '.join(reasons)}" if reasons else ""
    return (
        f"this machine is not as fast as it was measured on {hardware.date[:10]}: {said}{why}. Times may be off as "
        f"much: measure it anew with `holdall hardware` when nothing else runs"
    )
