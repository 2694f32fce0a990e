"""Rank that is stopped (SIGSTOP) and does not end: the others raise after --timeout, naming the step."""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.inject import Fault
from tests.faults.launch import launch

pytestmark = pytest.mark.slow

OFTEN = ["--save-every", "4", "--steps", "20"]
WAY = {
    "data-parallel": ["--strategy", "data-parallel"],
    "two-fold, rows fetched ahead": ["--strategy", "two-fold", "--hot-bytes", "2KB", "--prefetch", "1"],
}


@pytest.mark.parametrize("name", WAY)
def test_the_others_end_in_time_and_all_start_again(
    name: str, clicks: Path, tmp_path: Path, same_as_undisturbed: Callable[..., None]
) -> None:
    """The first continues when the others have ended, and must end too; the second is killed."""
    words = [*OFTEN, *WAY[name]]
    faults = [Fault("exchange", 6, 1, does="stop"), Fault("step", 13, 0, does="stop")]
    # On a busy machine a rank may seem to hang when it does not: that costs a restart, and changes nothing else.
    found = launch(clicks, tmp_path / "run", [*words, "--timeout", "3"], faults, max_restarts=6)
    same_as_undisturbed(found, [word for word in words if word not in ("--prefetch", "1")])
    for fault in faults:
        other = 1 - fault.rank
        told = re.findall(
            rf"ProcessError: rank {other}, step (\d+): [^:]+ waited 3 s or more for the other", found.notes(other)
        )
        assert {str(fault.step), str(fault.step + 1)} & set(told), found.notes(other)
        assert waited(found.notes(other), fault.step) < 20


def waited(notes: str, step: int) -> float:
    """Seconds from the last line of a log about a step before `step` to the error after it."""
    lines = [line for line in notes.splitlines() if line.split(" ", 1)[1].startswith(("step", "ProcessError", "start"))]
    for before, line in itertools.pairwise(lines):
        if re.search(rf"ProcessError: rank \d, step ({step}|{step + 1}): [^:]+ waited", line):
            times = [datetime.datetime.fromisoformat(one.split(" ", 1)[0]) for one in (before, line)]
            return (times[1] - times[0]).total_seconds()
    raise AssertionError(f"no one waited in step {step}")
