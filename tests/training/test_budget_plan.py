"""A plan with a budget: the cuts of `train --budget`, with their bytes foretold, and the same run to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdall import checkpoint
from holdall.cli import main
from holdall.common.errors import ConfigError
from holdall.data.schema import Schema
from holdall.planning.config import PlanConfig
from holdall.planning.hot_row_selector import compressed_table
from holdall.planning.inputs import find_lookups, make_problem
from holdall.planning.plan import Plan
from holdall.planning.planner import plan, plan_tables
from holdall.planning.step_cost import compressed_seconds
from holdall.tables import Bands, Dense, Shared, method_from_json
from holdall.training.config import TrainConfig
from holdall.training.tracking import read_metrics, read_run
from holdall.training.train import train
from tests.planning.made_up_hardware import hardware

MODEL: dict[str, Any] = {"dim": 8, "bottom": (8,), "top": (8,), "batch_size": 256}


def planned(data: Path, budget: str, **settings: Any) -> Plan:
    return plan(data, PlanConfig.of(**{**MODEL, **settings}, budget=budget), hardware=hardware())


@pytest.mark.parametrize("budget", ["1/4", "1/20"])
def test_a_run_by_the_plan_is_the_run_of_the_budget(budget: str, data: Path, tmp_path: Path) -> None:
    made = planned(data, budget)
    made.save(tmp_path / "plan.json")
    train(data, tmp_path / "planned", TrainConfig.of(plan=str(tmp_path / "plan.json"), device="cpu"), quiet=True)
    train(data, tmp_path / "given", TrainConfig.of(**MODEL, budget=budget, device="cpu"), quiet=True)
    chosen = {name: method_from_json(method) for name, method in (read_run(tmp_path / "given")["tables"] or {}).items()}
    assert made.methods() == chosen
    assert any(isinstance(method, Bands) for method in chosen.values())
    runs = [tmp_path / name for name in ("planned", "given")]
    curves = [[row.get("loss", row.get("logloss")) for row in read_metrics(run)] for run in runs]
    assert curves[0] == curves[1]
    tensors = []
    for run in runs:
        latest = checkpoint.latest(run / "checkpoints")
        assert latest is not None
        tensors.append(checkpoint.load(latest)[0])
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    foretold = made.forecast
    assert foretold is not None
    parts = [foretold.memory["device"][part] for part in ("tables", "table_state", "table_buffers")]
    assert sum(parts) == read_run(tmp_path / "given")["peak_bytes"]["total"]


def test_tables_keep_the_budget_and_stay_on_the_device(data: Path) -> None:
    whole, cut = planned(data, "1/1"), planned(data, "1/10")
    assert all(method == Dense() for method in whole.methods().values())
    assert {table.tail for table in whole.tables} == {"device"}
    assert {table.tail for table in cut.tables} <= {"device", "compressed"}
    sizes = []
    for made in (whole, cut):
        assert (made.strategy, made.prefetch) == ("plain", 0)
        assert made.forecast is not None
        sizes.append(made.forecast.memory["device"])
    assert sizes[1]["tables"] + sizes[1]["table_buffers"] <= sizes[0]["tables"] / 10


@pytest.mark.parametrize("budget", ["0.1", "10%", "1/10"])
def test_a_share_is_spelled_in_three_ways(budget: str, data: Path) -> None:
    assert planned(data, budget).methods() == planned(data, "0.10").methods()


def test_a_band_of_exact_rows_costs_what_dense_rows_do(data: Path) -> None:
    """A band has the lookups and the distinct rows of its ids; all ids of a shared row are one row."""
    schema = Schema.load(data)
    problem = make_problem(schema, find_lookups(schema, data, None), PlanConfig.of(**MODEL), hardware())
    bands = Bands(((20, Dense()), (None, Shared(1))))
    found = compressed_seconds(problem, compressed_table("C3", 400, bands))
    distinct = problem.lookups["C3"].distinct(256, 0, 20) + 1
    wanted = [cost.seconds(problem.batch_lookups("C3"), distinct) for cost in problem.table_costs(Dense())]
    assert found == pytest.approx(wanted)
    launched = compressed_seconds(problem, compressed_table("C3", 400, bands), shares_launch=True)
    bases = [cost.base for cost in problem.table_costs(Dense())]
    assert launched == pytest.approx([one - base for one, base in zip(wanted, bases, strict=True)])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": "1/0"}, "a budget of '1/0' is not a share"),
        ({"budget": "0.0"}, "a budget of '0.0' is not a share"),
        ({"budget": "much"}, "'much' is not a size"),
        ({"budget": "1/10", "preset": "dlrm"}, "--budget and --preset both choose the methods"),
        ({"budget": "1/10", "allow_compression": "1/20"}, "--budget and --allow-compression both choose"),
        ({"budget": "1/10", "world_size": 2}, "--budget plans for one process"),
    ],
)
def test_budgets_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PlanConfig(**settings)


def test_a_budget_needs_the_folder_of_the_data(data: Path) -> None:
    schema = Schema.load(data)
    config = PlanConfig.of(**MODEL, budget="1/10")
    with pytest.raises(ConfigError, match="plan with the folder of the data set"):
        plan_tables(schema, find_lookups(schema, data, None), config, hardware())
    with pytest.raises(ConfigError, match="too small for these 3 tables"):
        planned(data, "40B")
    with pytest.raises(ConfigError, match=r"does not fit: it takes .* more on the device .* a smaller --budget"):
        planned(data, "1/2", device_memory="126KB")


def test_the_command(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    hardware().save(tmp_path / "hardware.json")
    words = ["plan", str(data), "--hardware", str(tmp_path / "hardware.json"), "--budget", "1/10", "--dim", "8"]
    main([*words, "--out", str(tmp_path / "plan.json"), "--explain", "C3"])
    assert "for the rest" in capsys.readouterr().out
    main(["plan", str(data), "--edited", str(tmp_path / "plan.json"), "--hardware", str(tmp_path / "hardware.json")])
    assert "for the rest" in capsys.readouterr().out
