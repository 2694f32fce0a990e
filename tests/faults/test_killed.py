"""kill -9 to any rank, at any step, in any strategy: the run resumes from its last checkpoint, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.inject import Fault
from tests.faults.launch import launch

pytestmark = pytest.mark.slow

OFTEN = ["--save-every", "4", "--steps", "20"]
TWO_FOLD = ["--strategy", "two-fold", "--hot-bytes", "2KB"]
RUNS = {
    "data-parallel": (
        ["--strategy", "data-parallel"],
        [Fault("step", 0, 1), Fault("exchange", 6, 0), Fault("restore", 4, 1), Fault("evaluation", 10, 1)],
    ),
    "two-fold": (TWO_FOLD, [Fault("exchange", 3, 1), Fault("step", 9, 0), Fault("exchange", 19, 0)]),
    "two-fold, rows fetched ahead": (
        [*TWO_FOLD, "--prefetch", "1"],
        [Fault("exchange", 1, 0), Fault("step", 5, 1), Fault("exchange", 13, 1)],
    ),
    "table-wise": (["--strategy", "table-wise"], [Fault("step", 8, 0), Fault("exchange", 11, 1), Fault("step", 16, 1)]),
    "local": (
        ["--strategy", "local", "--merge-every", "3"],
        [Fault("exchange", 2, 1), Fault("step", 12, 0), Fault("evaluation", 20, 0)],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_run_ends_as_if_nothing_had_happened(
    name: str, clicks: Path, tmp_path: Path, same_as_undisturbed: Callable[..., None]
) -> None:
    words, faults = RUNS[name]
    found = launch(clicks, tmp_path / "run", [*OFTEN, *words], faults)
    same_as_undisturbed(found, [*OFTEN, *words] if "--prefetch" not in words else [*OFTEN, *TWO_FOLD])
    begun = [fault for fault in faults if fault.at != "restore"]  # one that ends there has not gone on
    for fault, step in zip(begun, found.resumed(), strict=True):
        # A checkpoint is complete some steps after it was begun: often the newest one is, always the one before.
        assert step % 4 == 0
        assert fault.step - 8 <= step <= fault.step
    for fault in faults:
        if fault.at in ("step", "exchange"):
            told = found.notes(1 - fault.rank)
            near = [f"rank {1 - fault.rank}, step {step}: " for step in (fault.step, fault.step + 1)]
            assert any(words in told for words in near), told
            assert "lost another process, which has ended" in told
