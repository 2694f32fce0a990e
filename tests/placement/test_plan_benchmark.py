"""The benchmark of the planner: eight plans of different shape that learn the same where they keep every row exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan import eight, measure
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.placement.planner import PlanConfig
from tests.placement.made_up_hardware import hardware


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables large enough for compression to make them smaller."""
    out = tmp_path_factory.mktemp("data") / "clicks"
    write_prepared(SyntheticConfig(rows=20_000, cardinalities=(30_000, 20_000, 10), num_dense=2, zipf=0.3), out)
    return out


def test_eight_plans_run_side_by_side(clicks: Path) -> None:
    base = PlanConfig(dim=8, bottom=(8,), top=(8,), batch_size=128)
    plans = eight(clicks, base, hardware())
    assert len(plans) == 8
    shapes = {(made.strategy, made.preset, tuple(made.hot_rows().items())) for made in plans.values()}
    assert len(shapes) == 8
    assert {made.strategy for made in plans.values()} == {"plain", "host", "split"}
    ticks = iter(range(10**6))
    sides = measure(plans, clicks, turns=1, now=lambda: float(next(ticks)))
    for side in sides.values():
        assert set(side.stages) == {"read", "find+fetch", "lookup", "dense", "update", "send_back"}
        assert {len(taken) for taken in side.stages.values()} == {4}  # the first turn does not count
