"""What depends on the host of a GPU is measured several times, and the middle of it counts."""

from __future__ import annotations

import pytest

from holdall.placement import measure_captured
from holdall.placement.hardware import Cost, TableCost
from holdall.placement.measure import _middle
from holdall.placement.measure_captured import COPIED, HIDDEN, LAUNCHED_SAMPLES, Round, captured_of

LOOKUPS = measure_captured.FEATURES


def planted(slower: float) -> Round:
    """A step takes 1 ms and 1 us a sample; far rows 2 ms more; layers 10 ms each; copied ones 3 ms, 1 us a lookup."""
    plain = [1e-3 + 1e-6 * samples for samples in LAUNCHED_SAMPLES]
    copied = [4e-3 + 1e-6 * samples + 1e-6 * LOOKUPS * samples for samples, _ in COPIED]
    layers = [2 * (hidden + 1) * 1e-2 for hidden in HIDDEN]
    return tuple([slower * seconds for seconds in part] for part in (plain, [plain[0] + 2e-3], layers, copied))


def test_what_a_step_costs_its_host_is_taken_apart() -> None:
    found = captured_of([planted(1.0), planted(9.0), planted(0.5)])  # the middle one counts
    assert found is not None
    numbers = measure_captured._numbers(1000)
    assert found.launch_step.seconds(numbers) == pytest.approx(2e-3)
    assert found.launch_far == pytest.approx(2e-3)
    assert found.launch_layers.seconds(6) == pytest.approx(6e-2)
    for (samples, _), (lookups, rows) in zip(COPIED, measure_captured._copied_work(), strict=True):
        assert lookups == LOOKUPS * samples
        assert found.copied.seconds(lookups, rows) == pytest.approx(3e-3 + 1e-6 * lookups, rel=1e-6)
    assert captured_of([]) is None


def test_the_middle_of_tables_that_were_measured_several_times() -> None:
    tables = [TableCost({}, 16, "sgd", Cost(base, 0.0, 0.0), Cost(0.0, each, 0.0)) for base, each in
              ((1.0, 2e-5), (0.0, 1e-5), (9.0, 0.0))]  # fmt: skip
    assert _middle(tables) is tables[0]
    assert _middle(tables[1:2]) is tables[1]


def test_batches_that_are_measured_lie_as_those_of_a_data_set() -> None:
    ids = measure_captured._ids(64, 1000, 1.0)
    batches = list(measure_captured._batches(ids))
    assert len(batches) == measure_captured.NUM_STEPS
    assert all(len(batch) == 64 and batch.ids.values.t().is_contiguous() for batch in batches)
    some_far = measure_captured._ids(2048, 100_000, 0.1)
    assert 0.09 < (some_far >= measure_captured.COPIED_HOT).mean() < 0.11
