"""Sums of the recovery benchmark over the notes of its processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.recovery import choose_kills, cost_of_saves, lost_to, refuse_different

pytestmark = pytest.mark.slow


def note(what: str, time: float, attempt: int = 0, **more: Any) -> dict[str, Any]:
    return {"what": what, "time": time, "attempt": attempt, **more}


def test_kills_lie_between_saves_on_either_rank() -> None:
    assert choose_kills(400, 40, 3) == [(60, 1), (180, 0), (300, 1)]
    with pytest.raises(SystemExit, match="--kills must be 1 to 9"):
        choose_kills(400, 40, 10)


def test_time_lost_by_part() -> None:
    again = [
        [note("load begins", 14.0, 1), note("load ends", 15.0, 1), note("step", 15.4, 1, step=40, begun=15.1)],
        [note("begin", 9.0, 1, begun=8.5), note("load begins", 14.5, 1), note("load ends", 15.0, 1)],
    ]
    notes = [
        [
            note("run fails", 5.25),
            note("begin", 9.0, 1, begun=8.0),
            *again[0],
            note("step", 18.0, 1, step=60, begun=17.0),
        ],
        [note("step", 4.9, step=59, begun=4.8), note("kill", 5.0, step=60), *again[1]],
    ]
    assert lost_to((60, 1), notes) == {
        "step": 60,
        "rank": 1,
        "noticed": 0.25,
        "restarted": 3.25,
        "started": 6.0,
        "loaded": 0.5,
        "repeated": 2.0,
        "lost": 12.0,
        "repeated_steps": 20,
    }


def test_what_a_save_costs() -> None:
    rows = [note("step", t + 0.5, step=t, begun=float(t), alone=True, beside=False) for t in range(8)]
    rows += [note("step", t + 0.75, step=t, begun=float(t), alone=False, beside=True) for t in range(8, 10)]
    rows += [note("save", 1.5, begun=1.0, side="background"), note("save", 13.0, begun=10.0, side="foreground")]
    rows += [note("save", 20.25, begun=20.0, side="background"), note("complete", 23.25, begun=20.0)]
    found = cost_of_saves([rows, []], 64)
    assert (found["first_blocked_s"], found["step_s"]) == (0.5, 0.5)
    foreground, background = found["sides"]
    assert (foreground["blocked_s"], foreground["lost_s"], foreground["steps_slower"]) == (3.0, 3.0, None)
    assert (background["blocked_s"], background["complete_s"], background["steps_slower"]) == (0.25, 3.25, 0.5)
    assert background["lost_s"] == pytest.approx(0.25 + 3.0 * (1 - 1 / 1.5))  # a third of three seconds
    assert background["lost_of_a_minute"] == pytest.approx(1.25 / 60)


def test_other_results_are_refused() -> None:
    first = {"x": torch.zeros(2)}
    refuse_different(first, {"x": torch.zeros(2)})
    with pytest.raises(SystemExit, match="different tensors"):
        refuse_different(first, {"x": torch.ones(2)})
