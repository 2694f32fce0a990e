"""Fixtures of the planning tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def as_large_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables on disk cost what large ones do, which a process cannot keep mapped as a whole."""
    monkeypatch.setattr("holdall.planning.step_cost.exceeds_resident", lambda num_bytes: True)
