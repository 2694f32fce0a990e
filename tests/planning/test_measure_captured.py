"""Host seconds of steps on a GPU are split into costs; several measurements of a machine give their median."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdall.planning.machine import measure_captured
from holdall.planning.machine.hardware import Line, median_of
from holdall.planning.machine.measure_captured import COPIED, FEATURES, HIDDEN, LAUNCHED, fit_captured
from tests.planning.made_up_hardware import hardware


def test_host_seconds_are_split_into_their_costs() -> None:
    """A step takes 1 ms and 1 us a sample; one with fetched rows three times that; layers 10 ms each; copied rows 3 ms,
    and 1 us a lookup."""
    plain = [1e-3 + 1e-6 * samples for samples, _ in LAUNCHED]
    layers = [2 * (hidden + 1) * 1e-2 for hidden in HIDDEN]
    copied = [4e-3 + 1e-6 * samples + 1e-6 * FEATURES * samples for samples, _ in COPIED]
    found = fit_captured(plain, [3 * seconds for seconds in plain], layers, copied)
    assert found.launch_step.seconds(measure_captured._numbers(1000)) == pytest.approx(2e-3)
    assert found.launch_far.seconds(measure_captured._numbers(1000)) == pytest.approx(6e-3)
    assert found.launch_layers.seconds(6) == pytest.approx(6e-2)
    for (samples, _), (lookups, rows) in zip(COPIED, measure_captured._copied_work(), strict=True):
        assert lookups == FEATURES * samples
        assert found.copied.seconds(lookups, rows) == pytest.approx(3e-3 + 1e-6 * lookups, rel=1e-6)


def test_the_median_of_several_measurements() -> None:
    slow, right, fast = (
        hardware(device="cuda", call=call, read=Line(call, 2 * call), notes=(note,), date=note)
        for call, note in ((9.0, "a"), (2.0, "b"), (1.0, "a"))
    )
    found = median_of([slow, right, fast])
    assert found == replace(right, notes=("a", "b"), date="a")
    assert median_of([fast]) == fast


def test_batches_that_are_measured_lie_as_those_of_a_data_set() -> None:
    ids = measure_captured._ids(64, 1000, 1.0)
    batches = list(measure_captured._batches(ids))
    assert len(batches) == measure_captured.NUM_STEPS
    assert all(len(batch) == 64 and batch.ids.values.t().is_contiguous() for batch in batches)
    some_cold = measure_captured._ids(2048, 100_000, 0.1)
    assert 0.09 < (some_cold >= measure_captured.TIERED_HOT).mean() < 0.11
