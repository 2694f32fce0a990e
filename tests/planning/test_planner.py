"""Planner: the best places where they are known by hand, within the memory limits, and clear errors where none fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from holdall.common.errors import ConfigError
from holdall.planning import hot_row_selector, planner
from holdall.planning.config import PlanConfig
from holdall.planning.explain import explain_table, show_explanation
from holdall.planning.forecast import forecast
from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.machine.hardware import Hardware, Line
from holdall.planning.memory_check import shortages
from holdall.planning.plan import Plan, Tail
from holdall.planning.planner import find_limits, make_problem, plan, plan_problem, plan_tables, predict
from holdall.planning.step_cost import Problem, step_seconds
from holdall.popularity.profiling import profile
from holdall.tables import Dense, Frobenius, HotCold, TensorTrain
from tests.planning.made_up_hardware import ELSEWHERE, hardware, lookups, schema_of, slow_files

ROWS = {"users": 30_000, "items": 5000, "hours": 24}
SMALL = PlanConfig.of(dim=8, bottom=(16,), top=(16,), batch_size=256)
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
    assert made.table("hours").hot_rows == 24
    known = lookups(ROWS)
    last = min(known["users"].touched(256, users.hot_rows - 1), known["items"].touched(256, items.hot_rows - 1))
    following = [known[t.name].touched(256, t.hot_rows) for t in (users, items) if t.tiered]
    assert last >= max(following)  # no other row is looked up more often than a hot one
    assert made.forecast.staging_rows["host"] >= sum(t.forecast.far_rows for t in made.tables if t.forecast is not None)


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
    config = replace(SMALL, device_memory=str(bare() + 100_000), host_memory="150KB", disk_memory="2MB")
    made = planned(config)
    assert {table.name: table.tail for table in made.tables} == {"users": "disk", "items": "disk", "hours": "device"}
    assert made.forecast is not None
    assert made.forecast.memory["disk"]["tables"] == 35_000 * 32  # hot rows have a place there too
    assert made.forecast.memory["host"]["tables"] == 0
    assert made.forecast.memory["host"]["table_buffers"] == 35_000  # a byte a row says whether it was touched
    assert made.notes == ()
    less = planned(replace(config, host_memory="100KB"))
    assert seconds(less) > seconds(made)  # the host's memory keeps what is looked up most
    users = made.table("users").forecast
    assert users is not None
    assert users.lookups["host"] > 0
    assert sum(users.lookups.values()) == pytest.approx(1.0)


def test_only_what_fetches_rows_fetches_them_ahead() -> None:
    assert planned(replace(SMALL, prefetch=2)).prefetch == 0  # everything is on the device
    tight = replace(SMALL, prefetch=2, device_memory=str(bare() + 300_000), host_memory="10MB")
    made = planned(tight, slow_host())
    assert (made.strategy, made.prefetch) == ("split", 2)


def test_many_hot_rows_where_few_would_leave_no_room_for_the_others() -> None:
    """With staging buffers for 17 steps, the fetched rows of a step need less memory the more rows are hot."""
    config = replace(SMALL, prefetch=8, host_memory="10MB")
    few = free_bytes(config, dict.fromkeys(ROWS, 0))
    many = free_bytes(config, {"users": 1000, "items": 1000, "hours": 24})
    assert many > 0 > few
    made = planned(replace(config, device_memory=str(DEVICE)), slow_host())
    assert made.strategy == "split"
    assert sum(table.hot_rows for table in made.tables) > 2000
    assert made.forecast is not None
    assert made.forecast.total("device") <= DEVICE


DEVICE = 400_000


def free_bytes(config: PlanConfig, hot: dict[str, int]) -> int:
    """Bytes that the device has left beside these hot rows and the staging buffers."""
    problem = make_problem(schema_of(ROWS), lookups(ROWS), config, hardware())
    limits = {"device": DEVICE, "host": 10_000_000, "disk": 0}
    selector = hot_row_selector.HotRowSelector(problem, limits, problem.prefetch, one_memory=False)
    return selector.available_bytes(hot, dict.fromkeys(ROWS, "host"), {}, 1.0) - sum(hot.values()) * ROW


# --- some tails in memory, others on disk ----------------------------------------------------------------------------


def with_tails(made: Plan, tail: Tail, config: PlanConfig) -> Plan:
    """The same hot rows with all tails in one place, whatever that takes."""
    tables = tuple(replace(table, tail=tail) if table.tiered else table for table in made.tables)
    problem = make_problem(schema_of(ROWS), lookups(ROWS), config, slow_files())
    changed = replace(made, tables=tables, forecast=None)
    return forecast(changed, problem, find_limits(config, slow_files(), None)["host"])


@pytest.mark.usefixtures("as_large_files")
def test_the_tails_that_are_fetched_most_for_their_bytes_stay_in_memory() -> None:
    """All of `items` fits the memory beside `users`, which has six times its rows, on disk."""
    config = replace(SMALL, device_memory=str(bare() + 100_000), host_memory="500KB", disk_memory="2MB")
    made = planned(config, slow_files())
    assert (made.table("items").tail, made.table("users").tail) == ("host", "disk")
    assert made.strategy == "split"
    assert made.forecast is not None
    assert made.forecast.memory["host"]["tables"] == 5024 * 32
    assert made.forecast.memory["disk"]["tables"] == 30_000 * 32
    assert made.forecast.total("host") <= 500_000
    assert set(made.forecast.staging_rows) == {"host", "disk"}
    # All in memory does not fit, and all on disk is slower, with these hot rows or those that are best for it.
    in_memory = with_tails(made, "host", config)
    assert shortages(in_memory, find_limits(config, slow_files(), None)).keys() == {"host"}
    on_disk = planned(replace(config, host_memory="150KB"), slow_files())  # too little for any whole table
    assert "host" not in {t.tail for t in on_disk.tables}
    roomy = with_tails(on_disk, "disk", config)
    assert seconds(made) < seconds(roomy)
    assert seconds(made) < seconds(with_tails(made, "disk", config))


def test_a_mix_where_neither_memory_nor_disk_holds_all() -> None:
    config = replace(SMALL, device_memory=str(bare() + 100_000), host_memory="500KB", disk_memory="1.1MB")
    made = planned(config)
    assert (made.table("users").tail, made.table("items").tail) == ("disk", "host")
    assert made.notes == ()  # every row is exact
    assert made.forecast is not None
    assert made.forecast.total("disk") <= 1_100_000
    assert made.forecast.total("host") <= 500_000
    turned = planned(replace(config, host_memory="1.2MB", disk_memory="190KB"))
    assert (turned.table("users").tail, turned.table("items").tail) == ("host", "disk")  # the largest fills best


def test_memory_enough_for_all_is_not_mixed() -> None:
    made = planned(
        replace(SMALL, device_memory=str(bare() + 100_000), host_memory="2MB", disk_memory="9MB"), slow_host()
    )
    assert {t.tail for t in made.tables} == {"host"}  # one storage: hot as a whole or not
    assert made.table("hours").hot_rows == 24


def test_more_host_memory_is_never_slower() -> None:
    times = [
        seconds(planned(replace(SMALL, device_memory=str(bare() + 100_000), host_memory=host, disk_memory="9MB")))
        for host in ("100KB", "200KB", "300KB", "500KB", "1MB", "2MB")
    ]
    assert times == sorted(times, reverse=True)


def test_one_memory_for_host_and_device() -> None:
    """A CPU without caps has one memory: hot rows fill it beside the staging buffers, and the rest is on disk."""
    limits = {"device": bare() + 300_000, "host": bare() + 300_000, "disk": 10_000_000}
    problem = make_problem(schema_of(ROWS), lookups(ROWS), SMALL, hardware())
    made = plan_problem(problem, SMALL, limits, "data", "")
    assert made.notes == ()
    assert made.forecast is not None
    assert {t.tail for t in made.tables} == {"disk"}
    both = made.forecast.total("device") + made.forecast.total("host")
    assert limits["host"] - 2000 <= both <= limits["host"]


def test_exactness_is_given_up_only_when_nothing_else_fits() -> None:
    config = replace(SMALL, device_memory=str(bare() + 300_000), host_memory="500KB", disk_memory="100KB")
    made = planned(config)
    assert made.table("users").tail == "compressed"
    assert isinstance(made.table("items").method, Dense)
    assert "no longer exact: users" in made.notes[0]


def test_compression_where_it_was_allowed_and_is_faster() -> None:
    slow = hardware(
        gather={tier: {"64": Line(0.0, 1e-3)} for tier in ("device", "host", "cached", "disk")},
        host_tables=slow_host().host_tables,
    )
    config = replace(SMALL, device_memory=str(bare() + 300_000), host_memory="10MB")
    assert {t.tail for t in planned(config, slow).tables} <= {"device", "host"}
    allowed = planned(replace(config, allow_compression="1/20"), slow)
    assert allowed.table("users").tail == "compressed"
    assert seconds(allowed) < seconds(planned(config, slow))


def test_popular_rows_of_a_compressed_table_are_exact_where_that_is_faster() -> None:
    """Computing a row takes ten times as long as looking it up, so the device's free bytes go to exact rows."""
    config = replace(SMALL, device_memory=str(bare() + 300_000), host_memory="10KB", disk_memory="10KB")
    made = planned(config)
    users = made.table("users")
    assert users.tail == "compressed"
    assert isinstance(users.method, HotCold)
    assert users.method.hot_rows == users.hot_rows > 100
    assert made.table("hours").tail == "device"
    assert made.forecast is not None
    assert bare() + 250_000 < made.forecast.total("device") <= bare() + 300_000
    assert users.forecast is not None
    assert users.forecast.bytes["device"].total < users.num_rows * ROW
    none_exact = replace(users, method=users.method.cold, hot_rows=0)
    tables = tuple(none_exact if table.name == "users" else table for table in made.tables)
    problem = make_problem(schema_of(ROWS), lookups(ROWS), config, hardware())
    assert seconds(forecast(replace(made, tables=tables), problem)) > seconds(made)


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
    stages = {"read": 1.0, "find": 1.0, "fetch": 3.0, "lookup": 2.0, "dense": 4.0, "update": 1.0, "write_back": 1.0}
    stages["communicate"] = 0.0

    def step(**changes: object) -> float:
        changed: Problem = replace(problem, **changes)  # type: ignore[arg-type]
        return step_seconds(changed, stages, "split")

    assert step(prefetch=0) == 1 + 3 + 2 + 4 + 1 + 1  # one after the other, but for the next batch
    assert step(prefetch=1) == 7  # the transfer hides behind the computation
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
    config = PlanConfig.of(dim=4, bottom=(8,), top=(8,), batch_size=128, preset="dlrm")
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
    from holdall.data.schema import Schema
    from holdall.planning.planner import find_lookups

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
        PlanConfig.of(**{f"{tier}_memory": size})  # type: ignore[arg-type]


def test_other_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="--prefetch must be 0 or more"):
        PlanConfig(prefetch=-1)
    with pytest.raises(ConfigError, match="unknown model 'dlmr'"):
        PlanConfig.of(model="dlmr")
    with pytest.raises(ConfigError, match="--batch-size must be at least 1"):
        PlanConfig(batch_size=0)
    for share in ("2/1", "20", "0", "much"):
        with pytest.raises(ConfigError, match=f"--allow-compression takes a share of a table's bytes.* not '{share}'"):
            PlanConfig(allow_compression=share)
    assert (
        PlanConfig(allow_compression="5%").compression_share()
        == PlanConfig(allow_compression="0.05").compression_share()
    )


# --- data sets -------------------------------------------------------------------------------------------------------


def test_a_profile_gives_the_same_plan_as_counting(data: Path, tmp_path: Path) -> None:
    config = PlanConfig.of(dim=4, bottom=(8,), top=(8,), batch_size=128, device_memory="60KB", host_memory="1MB")
    rates = slow_host()
    counted = plan(data, config, hardware=rates)
    profile([str(data)], tmp_path / "popularity.json")
    known = plan(data, config, hardware=rates, profile=tmp_path / "popularity.json")
    assert known == counted
    assert predict(replace(counted, forecast=None), data, hardware=rates) == counted
    counted.check(_schema(data))


def _schema(data: Path) -> object:
    from holdall.data.schema import Schema

    return Schema.load(data)


def test_rates_of_another_machine_are_said(data: Path) -> None:
    config = PlanConfig.of(dim=4, bottom=(8,), top=(8,), batch_size=128)
    with pytest.warns(UserWarning, match="measured on another machine .*cpu 'abacus' there"):
        made = plan(data, config, hardware=hardware(machine=ELSEWHERE))
    assert "measure this one with `holdall hardware`" in made.notes[-1]
    assert find_limits(config, hardware(machine=ELSEWHERE), data)["host"] == 1 << 62


def many_tables(count: int) -> dict[str, LookupCounts]:
    """Tables of 10 to 100,000 rows, as a profile's counts, already in groups."""
    generator = np.random.default_rng(0)
    known = {}
    for number, power in enumerate(generator.uniform(1, 5, count)):
        groups = np.unique(np.geomspace(1, int(10**power), 40).astype(np.int64))
        sizes = np.diff(np.concatenate([[0], groups]))
        counts = 1e6 / (np.cumsum(sizes) + 1.0)
        known[f"t{number}"] = LookupCounts(counts * 1e6 / (counts * sizes).sum(), sizes, 1_000_000)
    return known


@pytest.mark.slow
@pytest.mark.usefixtures("as_large_files")
@pytest.mark.parametrize("count", [26, 1000])
def test_the_work_of_planning(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans weighed, sorts of all rows by worth, and passes over a table's counts: none grow with the tables."""
    known = many_tables(count)
    rows = {name: found.num_rows for name, found in known.items()}
    config = SMALL.replace(interaction="concat", host_memory=str(sum(rows.values()) * ROW // 3), disk_memory="10GB")
    unplaced = plan_tables(schema_of(rows), known, replace(config, preset="dlrm", host_memory="10GB"), hardware())
    assert unplaced.forecast is not None
    step = unplaced.forecast.total("device")
    config = replace(config, device_memory=str(step + step // 2 + sum(rows.values()) * ROW // 5))
    done = {"forecast": 0, "choose_hot": 0, "touched_by_group": 0}

    def counted(owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*arguments: object, **options: object) -> object:
            done[name] += 1
            return inner(*arguments, **options)

        monkeypatch.setattr(owner, name, outer)

    counted(planner, "forecast")
    counted(hot_row_selector, "choose_hot")
    fresh = {name: replace(found) for name, found in known.items()}
    counted(LookupCounts, "touched_by_group")
    made = plan_tables(schema_of(rows), fresh, config, slow_files())
    assert {"host", "disk"} <= {table.tail for table in made.tables}  # the whole search was needed
    assert done["forecast"] <= 32
    assert done["choose_hot"] <= 96
    assert done["touched_by_group"] <= 150 * count


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
    assert found.worst_last is not None
    assert found.worst_last[1] >= found.next_row
    by_name = {other.what: other for other in found.alternatives}
    whole = by_name["all of it on the device"]
    assert whole.device_bytes > 0
    assert "too much on the device" in whole.too_large
    cold = by_name["no hot rows, all of it on the host"]
    assert cold.seconds > 0
    assert cold.device_bytes < 0
    assert by_name["the same hot rows, the rest on disk"].seconds == pytest.approx(
        0, abs=1e-5
    )  # the host's memory keeps it
    assert by_name["compressed to 1/20 as robe, no longer exact"].device_bytes < 0
    assert found.in_memory == ()
    with pytest.raises(ConfigError, match="no table 'user'"):
        explain_table(made, "user", problem, limits)


@pytest.mark.usefixtures("as_large_files")
def test_why_a_tail_is_on_disk() -> None:
    config = replace(SMALL, device_memory=str(bare() + 100_000), host_memory="500KB", disk_memory="2MB")
    made = planned(config, slow_files())
    problem = make_problem(schema_of(ROWS), lookups(ROWS), config, slow_files())
    found = explain_table(made, "users", problem, find_limits(config, slow_files(), None))
    (mine, my_worth), (other, its_worth) = found.in_memory
    assert (mine, other) == ("users", "items")
    assert my_worth < its_worth
    console = Console(record=True, width=200)
    show_explanation(found, made, console)
    assert "of 'items', in memory" in console.export_text()
