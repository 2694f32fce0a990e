"""Simulated plans: at its own number of processes a plan is its forecast, at others what is computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdall
from holdall.cli import main
from holdall.common.errors import ConfigError
from holdall.planning.config import PlanConfig
from holdall.planning.inputs import make_problem
from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.machine.hardware import CollectiveRates
from holdall.planning.plan import Plan
from holdall.planning.planner import plan_tables
from holdall.planning.simulation import SimulatedStep, SimulatedStrategy, parse_world_sizes, simulate_steps
from holdall.planning.step_cost import Problem
from holdall.tables import TensorTrain
from tests.planning.made_up_hardware import hardware, lookups, schema_of

ROWS = {"users": 30_000, "items": 5000, "hours": 24}
CONFIG = PlanConfig.of(dim=8, bottom=(16,), top=(16,), batch_size=1024, world_size=4, device_memory="600KB")
ROW, STATE = 32, 4
STRATEGIES: tuple[SimulatedStrategy, ...] = ("two-fold", "row-wise", "table-wise", "data-parallel")


def rates(**changes: Any) -> Any:
    """A gigabyte a second in either collective, which is twice as fast for all-reduce: some rows are worth it."""
    seconds = {str(size): size / 1e9 for size in (1024, 1048576)}
    links = CollectiveRates("gloo", 4, seconds, seconds)
    return hardware(collectives=links, **changes)


def planned(rows: dict[str, int] = ROWS, config: PlanConfig = CONFIG, **changes: Any) -> tuple[Plan, Problem]:
    known = lookups(rows, samples=1_000_000)
    made = plan_tables(schema_of(rows), known, config, rates(**changes))
    return made, make_problem(schema_of(rows), known, config, rates(**changes))


def simulated(world_sizes: list[int], strategy: SimulatedStrategy = "two-fold", **options: Any) -> list[SimulatedStep]:
    return simulate_steps(*planned(), world_sizes, strategy, schema_of(ROWS), **options)


# --- numbers of processes --------------------------------------------------------------------------------------------


def test_numbers_of_processes() -> None:
    assert parse_world_sizes("8") == [8]
    assert parse_world_sizes("4,1, 2") == [1, 2, 4]
    assert parse_world_sizes("8..4096") == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert parse_world_sizes("3..9") == [4, 8]
    assert parse_world_sizes("2..2") == [2]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("4096..8", r"is not ascending: write 8\.\.4096"),
        ("0", "0 processes are not possible"),
        ("x", r"'x' is not a number of processes: write 8, 1,2,4 or 8\.\.4096"),
        ("-2", "is not a number"),
        ("1,,2", "is not a number"),
        ("8..", "is not a number"),
        ("8..16..32", "is not a number"),
        ("5..7", "no power of two in it: name the numbers, such as 5,7"),
        ("9999999", "9999999 processes are not possible"),
        ("", "is not a number"),
        ("1e3", "is not a number"),
    ],
)
def test_numbers_that_are_none(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_world_sizes(text)


# --- against the plan ------------------------------------------------------------------------------------------------


def test_at_its_own_number_of_processes_a_plan_is_its_forecast() -> None:
    made, _ = planned()
    assert made.strategy == "two-fold"
    assert 0 < made.table("users").hot_rows < ROWS["users"]
    assert made.forecast is not None
    (found,) = simulated([4])
    assert found.memory == made.forecast.memory
    assert found.batch_size == 256
    for stage, seconds in made.forecast.seconds.items():
        if stage != "update":  # of which a forecast counts the rows of one process's samples
            assert found.seconds[stage] == pytest.approx(seconds), stage
    assert found.seconds["update"] >= made.forecast.seconds["update"]
    assert sum(found.exchange.values()) == pytest.approx(found.seconds["communicate"])


def test_the_step_is_the_sum_of_its_stages() -> None:
    for strategy in STRATEGIES:
        (found,) = simulated([16], strategy)  # this machine overlaps nothing
        assert found.step_seconds == pytest.approx(sum(found.seconds.values()))
        assert found.samples_per_second == pytest.approx(16 * 256 / found.step_seconds)


# --- bytes -----------------------------------------------------------------------------------------------------------


def one_row_tables(strategy: SimulatedStrategy, world_size: int) -> SimulatedStep:
    """Two tables of one row, which every sample looks up: every number of bytes is certain."""
    rows = {"a": 1, "b": 1}
    made, problem = planned(rows)
    certain = LookupCounts.from_counts(np.array([1000]), 1000)
    problem = replace(problem, lookups={"a": certain, "b": certain})
    made = replace(made, tables=tuple(replace(t, hot_rows=1, tail="device") for t in made.tables))
    return simulate_steps(made, problem, [world_size], strategy, schema_of(rows))[0]


def test_bytes_that_are_certain() -> None:
    dense = one_row_tables("data-parallel", 4).sent["dense_gradients"]
    two = one_row_tables("two-fold", 4).sent
    # Sizes: a number to each of three, and three numbers to them. Both rows are hot, and reduced: 2 * 3 / 4 of them.
    assert two["sizes"] == 3 * 8 + 3 * 24
    assert two["hot_gradients"] == 2 * (ROW + 4) * 2 * 3 / 4
    assert two["cold_rows"] == two["cold_ids"] == two["cold_gradients"] == 0
    row = one_row_tables("row-wise", 4).sent
    assert (row["cold_ids"], row["cold_rows"], row["cold_gradients"]) == (2 * 4 * 3 / 4, *[2 * ROW * 3 / 4] * 2)
    assert "hot_gradients" not in row
    tables = one_row_tables("table-wise", 4).sent
    assert (tables["ids"], tables["sizes"]) == (2 * 256 * 4 * 3 / 4, 3 * 24)
    assert tables["pooled_vectors"] == tables["gradients_of_vectors"] == 2 * 256 * ROW * 3 / 4
    assert one_row_tables("data-parallel", 4).sent["row_gradients"] == two["hot_gradients"]
    assert {sent["dense_gradients"] for sent in (two, row, tables)} == {dense}


def test_one_process_sends_nothing() -> None:
    for strategy in STRATEGIES:
        (found,) = simulated([1], strategy)
        assert sum(found.sent.values()) == 0
        assert found.seconds["communicate"] == 0


def test_fewer_of_many_touched_rows_are_gathered_than_reduced() -> None:
    few, many = simulated([2, 256], "data-parallel")
    collectives = [{m.kind: m.collective for m in row.messages}["row_gradients"] for row in (few, many)]
    assert collectives == ["all_gather", "all_reduce"]
    assert many.sent["row_gradients"] == pytest.approx(2 * 255 / 256 * sum(ROWS.values()) * (ROW + 4))


def test_who_has_a_table_answers_everyone() -> None:
    few, many = simulated([64, 128], "table-wise")  # three tables, so three busy processes
    vectors = [{m.kind: m.num_bytes for m in row.messages}["pooled_vectors"] for row in (few, many)]
    assert vectors == [64 * 256 * ROW, 128 * 256 * ROW]
    assert many.seconds["lookup"] == pytest.approx(2 * few.seconds["lookup"])
    assert many.sent["pooled_vectors"] == pytest.approx(3 * 256 * ROW * 127 / 128)


def test_bags_send_their_lengths_and_all_their_ids() -> None:
    schema = schema_of(ROWS)
    bags = replace(schema, features=tuple(replace(feature, kind="bag", max_length=9) for feature in schema.features))
    assert not bags.one_hot
    made, problem = planned()
    fourfold = {name: replace(known, num_samples=known.num_samples // 4) for name, known in problem.lookups.items()}
    found = simulate_steps(made, replace(problem, lookups=fourfold), [4], "table-wise", bags)[0].sent
    plain = simulated([4], "table-wise")[0].sent
    assert found["lengths"] == 3 * 256 * 4 * 3 / 4
    assert found["ids"] == pytest.approx(4 * plain["ids"])
    assert found["pooled_vectors"] == plain["pooled_vectors"]
    assert "lengths" not in plain


def test_compressed_tables_are_summed_with_the_dense_part() -> None:
    method = TensorTrain(rank=2)
    made, problem = planned()
    tables = tuple(
        replace(t, method=method, hot_rows=0, tail="compressed", forecast=None) if t.name == "users" else t
        for t in made.tables
    )
    for strategy in ("two-fold", "data-parallel"):
        mixed = simulate_steps(replace(made, tables=tables), problem, [4], strategy, schema_of(ROWS))[0]  # type: ignore[arg-type]
        (plain,) = simulated([4], strategy)  # type: ignore[arg-type]
        more = mixed.sent["dense_gradients"] - plain.sent["dense_gradients"]
        assert more == method.num_bytes(ROWS["users"], 8) * 2 * 3 / 4
        assert sum(mixed.sent.values()) != sum(plain.sent.values())
    everything = simulate_steps(replace(made, tables=tables), problem, [4], "row-wise", schema_of(ROWS))[0]
    assert everything.memory["device"]["tables"] == method.num_bytes(ROWS["users"], 8)


# --- memory and time -------------------------------------------------------------------------------------------------


def test_memory_of_a_process() -> None:
    made, _ = planned()
    hot = sum(table.hot_rows for table in made.tables)
    for found in simulated([2, 8, 32]):
        shares = [-(-(t.num_rows - t.hot_rows) // found.world_size) for t in made.tables if t.tiered]
        assert found.memory["host"]["tables"] == sum(shares) * ROW
        assert found.memory["host"]["table_state"] == sum(shares) * STATE
        assert found.memory["device"]["tables"] == hot * ROW
    for found in simulated([2, 8], "data-parallel"):
        assert found.memory["device"]["tables"] == sum(ROWS.values()) * ROW
        assert found.total_bytes("host") == 0
    (found,) = simulated([8], "table-wise")
    assert found.memory["device"]["tables"] == ROWS["users"] * ROW
    (found,) = simulated([8], "row-wise")
    assert found.memory["device"]["tables"] == 0


def test_a_batch_of_all_processes_is_shared_out() -> None:
    few, many = simulated([2, 8], batch_size=1024)
    assert (few.batch_size, many.batch_size) == (512, 128)
    assert few.seconds["dense"] > 3 * many.seconds["dense"]
    kept, more = simulated([2, 8])
    assert kept.batch_size == more.batch_size == 256
    assert kept.seconds["dense"] == more.seconds["dense"]
    with pytest.raises(ConfigError, match="--batch-size 1000 does not divide among 16 processes"):
        simulated([16], batch_size=1000)
    with pytest.raises(ConfigError, match="--batch-size 8 does not divide among 16 processes"):
        simulated([16], batch_size=8)


def test_what_cannot_be_simulated() -> None:
    _, problem = planned()
    alone = plan_tables(schema_of(ROWS), lookups(ROWS), replace(CONFIG, world_size=1), rates())
    with pytest.raises(ConfigError, match=r"for one process.* plan with --world-size 2"):
        simulate_steps(alone, problem, [8], "two-fold", schema_of(ROWS))
    made, _ = planned()
    silent = replace(problem, hardware=hardware(collectives=None))
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2 -m holdall hardware"):
        simulate_steps(made, silent, [8], "two-fold", schema_of(ROWS))


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_file(data: Path, tmp_path: Path) -> str:
    hardware().save(tmp_path / "hardware.json")
    out = tmp_path / "plan.json"
    model = ["--dim", "4", "--bottom", "8", "--top", "8", "--batch-size", "128", "--world-size", "2"]
    main(["plan", str(data), "--hardware", str(tmp_path / "hardware.json"), *model, "--out", str(out)])
    return str(out)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    main(["simulate", *arguments])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["simulate", *arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_the_command(
    data: Path, plan_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_file = str(Path(plan_file).with_name("hardware.json"))
    given = [plan_file, "--hardware", rates_file, "--data", str(data)]
    for strategy in STRATEGIES:
        shown = said(capsys, *given, "--world-size", "8..32", "--strategy", strategy)
        assert strategy in shown
        assert [line.split()[0] for line in shown.splitlines() if line[:2] in ("8 ", "16", "32")] == [
            "8",
            "16",
            "32",
        ] * 4
        for words in ("samples/s", "exchange", "dense", "note: links as 2 processes measured them over gloo"):
            assert words in " ".join(shown.split())
    document = json.loads(said(capsys, *given, "--world-size", "1,2", "--json"))
    assert [row["world_size"] for row in document["rows"]] == [1, 2]
    assert document["rows"][0]["sent_bytes"]["cold_rows"] == 0 < document["rows"][1]["sent_bytes"]["cold_rows"]
    assert document["links"] == {"backend": "gloo", "world_size": 2}
    monkeypatch.chdir(data.parent)  # where the data set has the name that the plan knows
    assert json.loads(said(capsys, plan_file, "--hardware", rates_file, "--world-size", "2", "--json"))["rows"]


def test_the_function_returns_the_rows(data: Path, plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    rates_file = Path(plan_file).with_name("hardware.json")
    capsys.readouterr()
    found = holdall.simulate(plan_file, [4, 2], "row-wise", hardware=rates_file, data=data)
    assert [row.world_size for row in found.rows] == [2, 4]
    assert capsys.readouterr().out == ""
    said_json = said(
        capsys, plan_file, "--hardware", str(rates_file), "--data", str(data), "--world-size", "2,4",
        "--strategy", "row-wise", "--json",
    )  # fmt: skip
    assert json.loads(said_json) == found.to_json()
    with pytest.raises(ConfigError, match="is not a number of processes"):
        holdall.simulate(plan_file, [], hardware=rates_file, data=data)


def test_the_commands_of_the_docs(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(data)
    hardware().save(tmp_path / "hardware.json")
    plan = "plan data --world-size 8 --batch-size 16384 --hardware hardware.json --out plan.json"
    main(plan.split())
    for command, words in {
        "plan.json --world-size 8..4096 --hardware hardware.json": ("two-fold, simulated", "2,048", "4,096"),
        "plan.json --world-size 8,64 --hardware hardware.json --strategy table-wise --batch-size 16384": (
            "table-wise",
            "256",
        ),
        "plan.json --world-size 64 --hardware hardware.json --json": ('"world_size": 64', '"sent_bytes"'),
    }.items():
        shown = said(capsys, *command.split())
        assert all(word in shown for word in words), command


def test_mistakes(
    data: Path,
    bag_data: Path,
    plan_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [plan_file, "--hardware", str(tmp_path / "hardware.json")]
    assert "say where it is with --data DIR" in refused(capsys, *given)
    assert "is not ascending" in refused(capsys, *given, "--world-size", "4096..8")
    assert "the plan was made for another data set" in refused(capsys, *given, "--data", str(bag_data))
    hardware(collectives=None).save(tmp_path / "silent.json")
    silent = [plan_file, "--hardware", str(tmp_path / "silent.json"), "--data", str(data)]
    assert "torchrun --nproc-per-node 2 -m holdall hardware" in refused(capsys, *silent)
    assert "absent.json" in refused(capsys, str(tmp_path / "absent.json"), *given[1:])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    unmeasured = refused(capsys, plan_file, "--data", str(data))
    assert "`torchrun --nproc-per-node 2 -m holdall hardware`, or name a file with --hardware" in unmeasured


def test_too_little_memory_is_a_note(data: Path, plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(Path(plan_file).read_text())
    document["caps"]["device"] = 1000
    Path(plan_file).write_text(json.dumps(document))
    rates_file = str(Path(plan_file).with_name("hardware.json"))
    shown = said(capsys, plan_file, "--hardware", rates_file, "--data", str(data), "--world-size", "2,4")
    assert "more than the 1.0 KB that the plan may use of the device, at 2, 4 processes" in " ".join(shown.split())
