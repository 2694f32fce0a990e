"""The benchmark of the planner: eight plans of different shape that learn the same where they keep every row exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plan as benchmark
from benchmarks.plan import STEPS_A_TURN, Planning, compared, measure, run_model
from holdall.data.schema import Schema
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.planning.config import PlanConfig
from holdall.planning.planner import find_lookups
from tests.planning.made_up_hardware import hardware

pytestmark = pytest.mark.slow

ROUNDS = 2
"""Enough to run the plans in both orders."""


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "ROUNDS", ROUNDS)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables large enough for compression to make them smaller."""
    out = tmp_path_factory.mktemp("data") / "clicks"
    write_prepared(SyntheticConfig(rows=20_000, cardinalities=(30_000, 20_000, 10), num_dense=2, zipf=0.3), out)
    return out


def test_eight_plans_run_one_after_the_other(clicks: Path, tmp_path: Path) -> None:
    base = PlanConfig.of(dim=8, bottom=(8,), top=(8,), batch_size=128)
    planning = Planning(clicks, find_lookups(Schema.load(clicks), clicks, None), base, hardware())
    plans = planning.eight()
    assert len(plans) == 8
    shapes = {(made.strategy, *made.methods().values(), *made.hot_rows().values(), *made.tails().values())
              for made in plans.values()}  # fmt: skip
    assert len(shapes) == 8
    assert {made.strategy for made in plans.values()} == {"plain", "host", "split"}
    stages = {"read", "lookup", "dense", "update"}
    for name, taken in measure(plans, clicks, 1, tmp_path / "sides").items():
        transfer = {"find", "fetch", "write_back"} if plans[name].strategy == "split" else set()
        assert set(taken.stages) == stages | transfer
        assert len(taken.steps) == ROUNDS * STEPS_A_TURN  # the first turns do not count
        found = compared(plans[name], taken, cpu_time=False)
        assert found["predicted_over_measured"] == found["predicted_seconds"] / found["measured_seconds"]["p50"]
    assert not (tmp_path / "sides").exists()  # rows on disk are gone


def test_what_auto_chooses_is_compared_with_exact_plans_that_fit(clicks: Path, tmp_path: Path) -> None:
    base = PlanConfig.of(dim=8, bottom=(8,), top=(8,), batch_size=128)
    planning = Planning(clicks, find_lookups(Schema.load(clicks), clicks, None), base, hardware())
    found = run_model(planning, clicks, tmp_path / "sides", 1, cpu_time=True).results(planning, cpu_time=True)
    device, auto = found["plans"]["device"], found["plans"]["auto: everything fits"]
    assert auto["measured_seconds"] == device["measured_seconds"]  # the same plan, measured once
    assert set(found["choices"]["everything fits"]["compared_with"]) == set(found["plans"]) - {
        "fpd",
        "el-rec",
        "auto: everything fits",
        "auto: little memory",
    }
    assert "mixed 1/100" in found["choices"]["little memory"]["compared_with"]
    assert not {"device", "dlrm", "fpd"} & set(found["choices"]["little memory"]["compared_with"])
