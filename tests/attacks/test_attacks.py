"""Short form of the attacks: a few trials of every kind. The long form is `python -m benchmarks.attacks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.artifacts import ARTIFACTS, GOOD, Trial
from tests.attacks.command import in_process
from tests.attacks.interruptions import WRITERS
from tests.attacks.trials import attacks
from tests.attacks.workspace import build

ATTACKS = tuple(attacks(0, {"artifacts": len(ARTIFACTS), "kills": len(WRITERS), "errors": 4, "paused pairs": 3}))
"""Every artifact damaged and every writer killed, once; none depends on how fast the machine is."""


@pytest.mark.slow
def test_attacks_end_identical_or_refused(tmp_path: Path) -> None:
    trials = in_process(_make, tmp_path)
    assert len(trials) == len(ATTACKS)
    defects = [trial for trial in trials if trial.outcome not in GOOD]
    assert not defects, "\n".join(map(str, defects))


def _make(folder: Path) -> list[Trial]:
    healthy = folder / "healthy"
    healthy.mkdir()
    build(healthy)
    made = [attack.make(healthy) for attack in ATTACKS]
    return [trial for trial in made if trial is not None]
