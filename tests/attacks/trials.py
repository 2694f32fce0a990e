"""Trials of all attackers, in a fixed order for a seed; the short form takes a few of each, the long form many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.attacks.artifacts import ARTIFACTS, Trial, damage_artifact
from tests.attacks.full_disk import fill_disk
from tests.attacks.interruptions import WRITERS, interrupt
from tests.attacks.writers import PAIRS, two_at_once

ERRORS = ("ENOSPC", "EIO", "EROFS", "EACCES")


@dataclass(frozen=True)
class Attack:
    """One trial to make; its seed is the run's, its group and its number."""

    group: str
    number: int
    run_seed: int = 0

    @property
    def seed(self) -> str:
        return f"{self.run_seed}/{self.group}/{self.number}"

    def make(self, healthy: Path) -> Trial | None:
        """Make the trial in this process; None where the system does not allow it."""
        number = self.number
        writer = list(WRITERS)[number % len(WRITERS)]
        if self.group == "artifacts":
            return damage_artifact(healthy, list(ARTIFACTS)[number % len(ARTIFACTS)], self.seed)
        if self.group == "kills":
            return interrupt(healthy, writer, "kill", self.seed)
        if self.group == "timed kills":
            return interrupt(healthy, writer, "kill in time", self.seed)
        if self.group == "errors":
            return interrupt(healthy, writer, ERRORS[number // len(WRITERS) % len(ERRORS)], self.seed)
        if self.group == "full disks":
            return fill_disk(healthy, writer, self.seed)
        pair = PAIRS[number % len(PAIRS)]
        return two_at_once(healthy, pair, self.seed, pause=self.group == "paused pairs")


GROUPS = ("artifacts", "kills", "timed kills", "errors", "full disks", "paused pairs", "timed pairs")


def attacks(seed: int, numbers: dict[str, int]) -> Iterator[Attack]:
    """The trials of a run: so many of each group."""
    for group, number in numbers.items():
        assert group in GROUPS, group
        yield from (Attack(group, one, seed) for one in range(number))
