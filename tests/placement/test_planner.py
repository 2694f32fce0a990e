"""Planning: the places that are best where that can be told by hand, within the memory, and clear when it cannot be."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdall.errors import ConfigError
from holdall.placement.cost import Problem, step_seconds
from holdall.placement.explain import explain_table
from holdall.placement.forecast import forecast
from holdall.placement.hardware import Hardware, Line
from holdall.placement.lookups import Lookups
from holdall.placement.plan import Plan
from holdall.placement.planner import PlanConfig, find_limits, make_problem, plan, plan_tables, predict
from holdall.popularity.measure import profile
from holdall.tables import Dense, Frobenius, TensorTrain
from tests.placement.made_up_hardware import ELSEWHERE, hardware, lookups, schema_of

ROWS = {"users": 30_000, "items": 5000, "hours": 24}
SMALL = PlanConfig(dim=8, bottom=(16,), top=(16,), batch_size=256)
ROW = 8 * 4 + 4


def seconds(made: Plan) -> float:
    assert made.forecast is not None
    return made.forecast.step_seconds


def planned(config: PlanConfig, rates: Hardware | None = None, rows: dict[str, int] = ROWS) -> Plan:
    return plan_tables(schema_of(rows), lookups(rows), config, rates or hardware())


def bare() -> int:
    """Bytes of the device that a plan takes without any table there."""
    made = planned(replace(SMALL, preset="dlrm"))
    assert made.forecast is not None
    return made.forecast.total("device")


def slow_host() -> Hardware:
    """A machine on whose host lookups take forever, so that rows are worth fetching."""
    return hardware(
        host_tables=tuple(replace(cost, lookup=replace(cost.lookup, base=1.0)) for cost in hardware().host_tables)
    )


def test_everything_on_the_device_when_it_fits() -> None:
    made = planned(SMALL)
    assert made.strategy == "plain"
    assert {table.tail for table in made.tables} == {"device"}
    assert made.forecast is not None
    assert made.forecast.memory["device"]["tables"] == sum(ROWS.values()) * 32
    assert made.forecast.memory["device"]["table_state"] == sum(ROWS.values()) * 4
    assert "of the step" in made.forecast.binds


def test_lookups_on_the_host_when_that_is_cheapest() -> None:
    made = planned(replace(SMALL, device_memory=str(bare() + 100_000), host_memory="10MB"))
    assert made.strategy == "host"


@pytest.mark.parametrize("extra", [100_000, 150_000, 400_000])
def test_the_most_popular_rows_are_hot_within_the_memory(extra: int) -> None:
    cap = bare() + extra
    made = planned(replace(SMALL, device_memory=str(cap), host_memory="10MB"), slow_host())
    assert made.strategy == "split"
    assert made.forecast is not None
    used = made.forecast.total("device")
    assert cap - 2 * ROW <= used <= cap  # all of it, to the last row
    users, items = made.table("users"), made.table("items")
    assert made.table("hours").tail == "device"
    known = lookups(ROWS)
    last = min(known["users"].touched(256, users.hot_rows - 1), known["items"].touched(256, items.hot_rows - 1))
    following = [known[t.name].touched(256, t.hot_rows) for t in (users, items) if t.tiered]
    assert last >= max(following)  # no far row is looked up more often than a hot one
    assert made.forecast.staging_rows >= sum(t.forecast.far_rows for t in made.tables if t.forecast is not None)


def test_more_memory_is_never_slower() -> None:
    times = [
        seconds(planned(replace(SMALL, device_memory=str(bare() + extra), host_memory="10MB"), slow_host()))
        for extra in (100_000, 200_000, 400_000, 800_000, 2_000_000)
    ]
    assert times == sorted(times, reverse=True)


def test_the_shares_of_lookups_by_tier() -> None:
    made = planned(replace(SMALL, device_memory=str(bare() + 300_000), host_memory="10MB"), slow_host())
    users = made.table("users")
    assert users.forecast is not None
    assert users.forecast.lookups["device"] == pytest.approx(lookups(ROWS)["users"].share(users.hot_rows))
    assert sum(users.forecast.lookups.values()) == pytest.approx(1.0)


def test_what_the_host_cannot_hold_goes_to_disk() -> None:
    config = replace(SMALL, device_memory=str(bare() + 100_000), host_memory="500KB", disk_memory="2MB")
    made = planned(config)
    assert {table.tail for table in made.tables} == {"device", "disk"}
    assert made.forecast is not None
    assert made.forecast.memory["disk"]["tables"] == sum(ROWS.values()) * 32  # the hot ones' home too
    assert made.forecast.memory["host"]["tables"] == 0
    assert made.notes == ()
    less = planned(replace(config, host_memory="100KB"))
    assert seconds(less) > seconds(made)  # the host's memory keeps what is looked up most
    users = made.table("users").forecast
    assert users is not None
    assert users.lookups["host"] > 0
    assert sum(users.lookups.values()) == pytest.approx(1.0)


def test_exactness_is_given_up_only_when_nothing_else_fits() -> None:
    config = replace(SMALL, device_memory=str(bare() + 300_000), host_memory="500KB", disk_memory="100KB")
    made = planned(config)
    assert made.table("users").tail == "compressed"
    assert isinstance(made.table("items").method, Dense)
    assert "no longer exact: users" in made.notes[0]


def test_compression_where_it_was_allowed_and_is_faster() -> None:
    slow = hardware(
        gather={tier: {"64": Line(0.0, 1e-3)} for tier in ("device", "host", "disk")},
        host_tables=slow_host().host_tables,
    )
    config = replace(SMALL, device_memory=str(bare() + 300_000), host_memory="10MB")
    assert {t.tail for t in planned(config, slow).tables} <= {"device", "host"}
    allowed = planned(replace(config, allow_compression="1/20"), slow)
    assert allowed.table("users").tail == "compressed"
    assert seconds(allowed) < seconds(planned(config, slow))


def test_a_plan_that_cannot_fit_says_by_how_much_and_what_would() -> None:
    config = replace(SMALL, preset="device", device_memory=str(bare() + 100_000))
    with pytest.raises(ConfigError, match=r"'device' does not fit: it takes 1.2 MB more on the device") as error:
        planned(config)
    assert "--preset auto" in str(error.value)
    enough = str(error.value).split("--device-memory ")[1].split(",")[0]
    assert planned(replace(config, device_memory=enough)).strategy == "plain"
    with pytest.raises(ConfigError, match=r"--device-memory 10.0 KB is less than the .* lower --batch-size"):
        planned(replace(SMALL, device_memory="10KB"))
    tiny = replace(SMALL, device_memory=str(bare() + 20_000), host_memory="10KB", disk_memory="10KB")
    with pytest.raises(ConfigError, match="plan 'auto' does not fit"):
        planned(tiny)


def test_what_prefetching_hides() -> None:
    problem = make_problem(schema_of(ROWS), lookups(ROWS), SMALL, hardware(overlap=1.0))
    stages = {"read": 1.0, "find": 1.0, "fetch": 3.0, "lookup": 2.0, "dense": 4.0, "update": 1.0, "send_back": 1.0}
    stages["communicate"] = 0.0

    def step(**changes: object) -> float:
        changed: Problem = replace(problem, **changes)  # type: ignore[arg-type]
        return step_seconds(changed, stages, "split")

    assert step(prefetch=0) == 1 + 3 + 4 + 1 + 1  # the lookup of hot rows hides behind the fetch
    assert step(prefetch=1) == 7  # everything far behind what computes
    assert step(prefetch=1, hardware=hardware(overlap=0.0)) == 13


# --- presets ---------------------------------------------------------------------------------------------------------


def test_presets() -> None:
    rows = {"a": 200_000, "b": 100_000, "c": 90_000, "d": 80_000, "e": 70_000, "f": 60_000, "g": 10}
    device = planned(replace(SMALL, preset="device"), rows=rows)
    assert device.strategy == "plain"
    host = planned(replace(SMALL, preset="dlrm"), rows=rows)
    assert (host.strategy, set(host.hot_rows().values())) == ("host", {0})
    trains = planned(replace(SMALL, preset="tt-rec"), rows=rows)
    largest = {"a", "b", "c", "d", "e"}
    assert {n for n, m in trains.methods().items() if m == TensorTrain(rank=32)} == largest
    assert trains.table("f").tail == "device"
    factors = planned(replace(SMALL, preset="fpd"), rows=rows)
    assert {n for n, m in factors.methods().items() if m == Frobenius(rank=8, terms=4)} == largest
    assert trains.forecast is not None
    cap = str(trains.forecast.total("device") - 1_000_000)
    both = planned(replace(SMALL, preset="el-rec", device_memory=cap), rows=rows)
    assert (both.strategy, both.table("f").tail, both.table("a").tail) == ("split", "host", "compressed")
    assert 0 < both.table("f").hot_rows < 60_000
    with pytest.raises(ConfigError, match=r"no preset named 'tt_rec' \(did you mean 'tt-rec'"):
        replace(SMALL, preset="tt_rec")


def test_hot_batches(data: Path) -> None:
    config = PlanConfig(dim=4, bottom=(8,), top=(8,), batch_size=128, preset="dlrm")
    made = plan(data, config, hardware=hardware())
    assert made.forecast is not None
    cap = made.forecast.total("device") + 40_000
    fae = plan(data, replace(config, preset="fae", device_memory=str(cap)), hardware=hardware())
    assert fae.strategy == "hot-batches"
    assert fae.forecast is not None
    assert fae.forecast.total("device") <= cap
    split = forecast(replace(fae, strategy="split"), _problem(data, config))
    assert split.forecast is not None
    assert fae.forecast.seconds["fetch"] <= split.forecast.seconds["fetch"]


def _problem(data: Path, config: PlanConfig) -> Problem:
    from holdall.placement.planner import find_lookups
    from holdall.schema import Schema

    schema = Schema.load(data)
    return make_problem(schema, find_lookups(schema, data, None), config, hardware(), data)


def test_several_processes() -> None:
    config = replace(SMALL, world_size=2, host_memory="2MB", device_memory=str(bare() + 200_000))
    made = planned(config)
    assert made.strategy == "two-fold"
    assert made.forecast is not None
    assert made.forecast.seconds["communicate"] > 0
    users = made.table("users")
    assert users.tail == "sharded"
    assert users.forecast is not None
    assert users.forecast.bytes["host"].parameters == -(-(ROWS["users"] - users.hot_rows) // 2) * 32
    assert users.forecast.lookups["host"] == pytest.approx(users.forecast.lookups["remote"])
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2 -m holdall hardware"):
        planned(config, hardware(collectives=None))
    with pytest.raises(ConfigError, match="does not divide among 3 processes"):
        replace(SMALL, world_size=3)
    with pytest.raises(ConfigError, match="'p2res' shards tables over processes: give --world-size 2"):
        planned(replace(SMALL, preset="p2res"))


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["4gb", "4 GiB", "4GB", " 4e9 ", "4000000000"])
def test_sizes_as_people_write_them(size: str) -> None:
    assert PlanConfig(device_memory=size).caps().device in (4_000_000_000, 4 * 2**30)


@pytest.mark.parametrize("size", ["-1", "0", "4 gigs", "four", "", "4GBB"])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_sizes_that_are_none(size: str, tier: str) -> None:
    with pytest.raises(ConfigError, match=f"--{tier}-memory: .* is not a size"):
        PlanConfig(**{f"{tier}_memory": size})  # type: ignore[arg-type]


def test_other_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="--prefetch must be at least 0"):
        PlanConfig(prefetch=-1)
    with pytest.raises(ConfigError, match="unknown model 'dlmr'"):
        PlanConfig(model="dlmr")
    with pytest.raises(ConfigError, match="--batch-size must be at least 1"):
        PlanConfig(batch_size=0)
    with pytest.raises(ConfigError, match="is not a share"):
        PlanConfig(allow_compression="2/1")


# --- data sets -------------------------------------------------------------------------------------------------------


def test_a_profile_gives_the_same_plan_as_counting(data: Path, tmp_path: Path) -> None:
    config = PlanConfig(dim=4, bottom=(8,), top=(8,), batch_size=128, device_memory="60KB", host_memory="1MB")
    rates = slow_host()
    counted = plan(data, config, hardware=rates)
    profile([str(data)], tmp_path / "popularity.json")
    known = plan(data, config, hardware=rates, profile=tmp_path / "popularity.json")
    assert known == counted
    assert predict(replace(counted, forecast=None), data, hardware=rates) == counted
    counted.check(_schema(data))


def _schema(data: Path) -> object:
    from holdall.schema import Schema

    return Schema.load(data)


def test_rates_of_another_machine_are_said(data: Path) -> None:
    config = PlanConfig(dim=4, bottom=(8,), top=(8,), batch_size=128)
    with pytest.warns(UserWarning, match="measured on another machine .*cpu 'abacus' there"):
        made = plan(data, config, hardware=hardware(machine=ELSEWHERE))
    assert "measure this one with `holdall hardware`" in made.notes[-1]
    assert find_limits(config, hardware(machine=ELSEWHERE), data)["host"] == 1 << 62


def test_a_thousand_tables_in_seconds() -> None:
    generator = np.random.default_rng(0)
    rows = {f"t{i}": int(10**power) for i, power in enumerate(generator.uniform(1, 5, 1000))}
    known = {}
    for name, count in rows.items():  # as a profile's counts, already in groups
        groups = np.geomspace(1, count, 40).astype(np.int64)
        sizes = np.diff(np.concatenate([[0], np.unique(groups)]))
        counts = 1e6 / (np.cumsum(sizes) + 1.0)
        known[name] = Lookups(counts * 1e6 / (counts * sizes).sum(), sizes, 1_000_000)
    config = replace(SMALL, interaction="concat", device_memory="200MB", host_memory="10GB")
    start = time.process_time()
    made = plan_tables(schema_of(rows), known, config, slow_host())
    assert time.process_time() - start < 60  # seconds, with room for a busy machine; it is not a benchmark
    assert len(made.tables) == 1000
    assert made.forecast is not None
    assert 190e6 < made.forecast.total("device") <= 200e6


# --- why -------------------------------------------------------------------------------------------------------------


def test_why_a_table_has_its_place() -> None:
    config = replace(SMALL, device_memory=str(bare() + 300_000), host_memory="10MB")
    made = planned(config, slow_host())
    problem = make_problem(schema_of(ROWS), lookups(ROWS), config, slow_host())
    limits = find_limits(config, slow_host(), None)
    found = explain_table(made, "users", problem, limits)
    users = made.table("users")
    each = 1e-6 * (32 - 4) / (64 - 4)  # a row of 32 bytes, between those of 4, which cost nothing, and of 64
    assert found.next_row == pytest.approx(lookups(ROWS)["users"].touched(256, users.hot_rows) * 2 * each)
    assert found.cheapest is not None
    assert found.cheapest[1] >= found.next_row
    by_name = {other.what: other for other in found.alternatives}
    whole = by_name["all of it on the device"]
    assert whole.device_bytes > 0
    assert "too much on the device" in whole.too_large
    cold = by_name["no hot rows, all of it on the host"]
    assert cold.seconds > 0
    assert cold.device_bytes < 0
    assert by_name["the same hot rows, the rest on disk"].seconds == pytest.approx(0)  # the host's memory keeps it
    assert by_name["compressed to 1/20 as robe, no longer exact"].device_bytes < 0
    with pytest.raises(ConfigError, match="no table 'user'"):
        explain_table(made, "user", problem, limits)
