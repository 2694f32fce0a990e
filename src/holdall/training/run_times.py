"""Seconds of a run by what they were spent on: training, evaluation, saving, callbacks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


class RunTimes:
    """Clock of a run that tells training from evaluation, saving and callbacks."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._apart = {"evaluation": 0.0, "saving": 0.0, "callbacks": 0.0}

    @contextmanager
    def apart(self, kind: Literal["evaluation", "saving", "callbacks"]) -> Iterator[None]:
        """Context whose seconds are not of training."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._apart[kind] += time.perf_counter() - started

    @property
    def total(self) -> float:
        return time.perf_counter() - self._started

    @property
    def training(self) -> float:
        """Seconds of training so far."""
        return self.total - sum(self._apart.values())

    def to_json(self) -> dict[str, float]:
        """Seconds of the run, and those of its parts."""
        parts = {f"{kind}_seconds": seconds for kind, seconds in self._apart.items()}
        return {"seconds": self.total, "training_seconds": self.training, **parts}
