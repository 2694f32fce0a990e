"""Cost model of a step: each part of it, planted on a machine with round numbers."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.planning.config import PlanConfig
from holdall.planning.inputs import make_problem
from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.machine import clock as clocks
from holdall.planning.machine.clock import Clock
from holdall.planning.machine.hardware import Cost, Line, TableCost
from holdall.planning.machine.measure_initial_rows import initial_value_costs
from holdall.planning.machine.transfer_path import PINNED, PINNED_DURING_STEPS
from holdall.planning.plan import TablePlan, Tail
from holdall.planning.step_cost import (
    FAULT_AROUND,
    Load,
    Problem,
    num_packs,
    page_faults,
    stage_seconds,
    step_seconds,
    table_load,
    transfer_seconds,
)
from holdall.planning.table_cost import COMPRESSED_ROWS, parameter_ratio
from holdall.tables import Dense, Frobenius, Hashed, TensorTrain
from holdall.tiers.mapped_file import RESIDENT_BYTES
from tests.planning.made_up_hardware import hardware, lookups, schema_of

ROWS = {"a": 40_000, "b": 20_000}


def problem(**rates: object) -> Problem:
    config = PlanConfig.of(dim=16, bottom=(8,), top=(8,), batch_size=256, optimizer="sgd")
    return make_problem(schema_of(ROWS), lookups(ROWS, exponent=0.3), config, hardware(**rates))


def placed(**tails: Tail) -> list[TablePlan]:
    return [
        TablePlan(name=name, num_rows=ROWS[name], method=Dense(), hot_rows=1000, tail=tail)
        for name, tail in tails.items()
    ]


def test_rows_that_are_not_stored_cost_their_initial_values() -> None:
    """Each fetched row costs its 16 initial values on the fetch and on the write-back, beyond its transfer."""
    tables = placed(a="host", b="host")
    plain = problem()
    with_initial = problem(begin={"read": Cost(1e-3, 1e-9, 1e-8), "write": Cost(2e-3, 2e-9, 0.0)})
    loads = {table.name: table_load(plain, table) for table in tables}
    fetched = sum(load.fetched for load in loads.values())
    before, after = transfer_seconds(plain, tables, loads), transfer_seconds(with_initial, tables, loads)
    assert after["fetch"] - before["fetch"] == pytest.approx(1e-3 + fetched * (16e-9 + 1e-8))
    assert after["write_back"] - before["write_back"] == pytest.approx(2e-3 + fetched * 32e-9)
    assert after["find"] == before["find"]
    assert with_initial.row_seconds("host") - plain.row_seconds("host") == pytest.approx(16e-9 + 1e-8 + 32e-9)


@pytest.mark.usefixtures("as_large_files")
def test_pages_of_files_are_mapped_once_between_two_times_of_letting_go() -> None:
    """Tables so small that every page of theirs is mapped in between: each costs one fault then."""
    tables = placed(a="disk", b="disk")
    known = {name: LookupCounts.from_counts(torch.full((rows,), 5).numpy(), 100_000) for name, rows in ROWS.items()}
    made = replace(problem(), lookups=known)
    loads = {table.name: table_load(made, table, cached_rows=ROWS[table.name]) for table in tables}
    steps = RESIDENT_BYTES / mmap.PAGESIZE / (2 * sum(load.fetched for load in loads.values()))
    rows = sum(ROWS.values()) - 2000  # a row has 64 bytes
    reads, writes = page_faults(made, tables, loads)
    assert reads * steps == pytest.approx(rows * 64 / FAULT_AROUND, rel=1e-3)
    assert writes * steps == pytest.approx(rows * 64 / mmap.PAGESIZE, rel=1e-3)
    in_memory = transfer_seconds(
        made, placed(a="host", b="host"), {n: replace(x, from_cache=0.0) for n, x in loads.items()}
    )
    on_disk = transfer_seconds(made, tables, loads)
    assert on_disk["fetch"] == pytest.approx(in_memory["fetch"] + reads * made.fault_seconds("read"))
    assert on_disk["write_back"] == pytest.approx(in_memory["write_back"] + writes * made.fault_seconds("write"))


def test_small_files_stay_mapped() -> None:
    made = problem()
    tables = placed(a="disk", b="disk")
    loads = {table.name: table_load(made, table, cached_rows=ROWS[table.name]) for table in tables}
    assert page_faults(made, tables, loads) == (0.0, 0.0)


def test_tables_in_several_places_are_looked_up_one_place_after_the_other() -> None:
    costs = tuple(
        TableCost({"method": "dense"}, 16, "sgd", Cost(1e-3, 1e-8, 0.0), Cost(2e-3, 1e-8, 0.0)) for _ in range(1)
    )
    made = problem(tables=costs, host_tables=costs, stack={"forward": Line(3e-3), "backward": Line(4e-3)})
    apart, together = placed(a="disk", b="host"), placed(a="host", b="host")
    assert (num_packs(apart, "split"), num_packs(together, "split"), num_packs(apart, "plain")) == (2, 1, 1)

    def stages(tables: list[TablePlan]) -> dict[str, float]:
        return stage_seconds(made, tables, "split", {table.name: table_load(made, table) for table in tables})

    assert stages(apart)["lookup"] - stages(together)["lookup"] == pytest.approx(1e-3 + 3e-3)
    assert stages(apart)["update"] - stages(together)["update"] == pytest.approx(2e-3 + 4e-3)


def test_what_a_step_does_to_all_parameters_grows_with_them() -> None:
    known = hardware().tables
    train = TensorTrain(rank=32)
    assert parameter_ratio(known, train, COMPRESSED_ROWS, 4) == pytest.approx(1.0)
    small = parameter_ratio(known, train, COMPRESSED_ROWS // 8, 4)
    assert small == pytest.approx(0.5, rel=0.05)  # a core is as long as the third root of the rows
    frobenius = parameter_ratio(known, Frobenius(rank=8, terms=4), COMPRESSED_ROWS // 4, 4)
    assert frobenius == pytest.approx(0.5, rel=0.05)  # as the second root
    assert parameter_ratio(known, Hashed(buckets=5), 10, 4) == 1.0
    made = problem()
    lookup, update = made.table_costs(train, num_rows=COMPRESSED_ROWS // 8)
    whole = made.table_costs(train)
    part = parameter_ratio(made.hardware.tables, train, COMPRESSED_ROWS // 8, 16)
    assert (lookup.base, update.base) == pytest.approx((whole[0].base * part, whole[1].base * part))
    assert lookup.per_lookup == whole[0].per_lookup


def test_a_cold_clock_fills_the_caches_before_every_run() -> None:
    runs = []
    buffer = clocks._eviction_buffer()
    before = float(buffer[0])
    Clock(torch.device("cpu"), repeats=2)(lambda: runs.append(1))
    assert float(buffer[0]) == before
    Clock(torch.device("cpu"), repeats=2, cold=True)(lambda: runs.append(float(buffer[0]) - before))
    assert runs[3:] == [1.0, 2.0, 3.0]


def test_initial_values_are_measured_by_numbers_and_rows() -> None:
    """A clock that counts: what is fitted are the calls' own times, so all of them are above 0."""
    found = initial_value_costs(Clock(torch.device("cpu"), repeats=1))
    for cost in (found["read"], found["write"]):
        assert cost.seconds(100_000, 5000) > cost.seconds(1000, 50) > 0


# --- a GPU, whose steps are graphs -----------------------------------------------------------------------------------


def gpu(prefetch: int | None = None) -> Problem:
    known = hardware()
    by_kernel = {"64": Line(1e-6, 2e-9)}
    during_steps = {"64": Line(1e-6, 5e-9)}
    rates = {
        name: {**getattr(known, name), PINNED: by_kernel, PINNED_DURING_STEPS: during_steps}
        for name in ("gather", "scatter")
    }
    config = PlanConfig.of(dim=16, bottom=(8,), top=(8,), batch_size=256, optimizer="sgd", prefetch=prefetch)
    machine = hardware(device="cuda", find=Cost(1e-5, 0.0, 1e-9), **rates)
    return make_problem(schema_of(ROWS), lookups(ROWS, exponent=0.3), config, machine)


def numbers_of(made: Problem, loads: Mapping[str, Load]) -> float:
    """Of a batch: ids, dense values and labels."""
    return sum(load.lookups for load in loads.values()) + made.batch_size * (made.num_dense + 1)


@pytest.mark.parametrize(("prefetch", "each"), [(0, 2e-9), (None, 5e-9)])
def test_rows_that_kernels_reach(prefetch: int | None, each: float) -> None:
    """During steps, which is how a GPU fetches by default, few thread blocks transfer them."""
    made = gpu(prefetch)
    tables = placed(a="host", b="host")
    loads = {table.name: table_load(made, table) for table in tables}
    fetched = sum(load.fetched for load in loads.values())
    found = stage_seconds(made, tables, "split", loads)
    assert found["fetch"] == found["write_back"] == pytest.approx(1e-6 + fetched * each)
    assert found["find"] == pytest.approx(1e-5 + 1e-9 * sum(load.fetched_lookups for load in loads.values()))
    assert found["launch"] == pytest.approx(4e-4 + 2e-9 * numbers_of(made, loads))
    assert made.prefetch == (2 if prefetch is None else 0)


def test_rows_that_the_host_of_a_gpu_copies() -> None:
    made, tables = gpu(), placed(a="disk", b="disk")
    loads = {table.name: table_load(made, table, cached_rows=ROWS[table.name]) for table in tables}
    fetched = sum(load.fetched for load in loads.values())
    found = stage_seconds(made, tables, "split", loads)
    assert found["find"] == pytest.approx(1e-9 * sum(load.lookups for load in loads.values()))
    assert found["launch"] == pytest.approx(1e-4 + 1e-9 * numbers_of(made, loads))
    assert found["fetch"] + found["write_back"] == pytest.approx(2e-3 + fetched * 4e-7)
    cold = {table.name: table_load(made, table) for table in tables}
    slower = stage_seconds(made, tables, "split", cold)["fetch"] - found["fetch"]
    assert slower == pytest.approx(fetched * 99e-6, rel=1e-3)  # 100 us a row of a disk, 1 us of the host


def test_the_slowest_sets_the_pace_of_a_gpu() -> None:
    stages = dict.fromkeys(
        ("read", "launch", "find", "fetch", "lookup", "dense", "update", "write_back", "communicate"), 0.0
    )
    stages |= {"launch": 2.0, "find": 0.5, "fetch": 4.0, "dense": 3.0, "update": 2.0, "write_back": 6.0}
    ahead, none = gpu(), gpu(0)
    assert step_seconds(ahead, stages, "plain") == 5.0
    assert step_seconds(ahead, stages, "split") == 6.0
    assert step_seconds(ahead, stages, "split", copied=True) == 12.5
    assert step_seconds(none, stages, "split") == 17.5
    assert step_seconds(ahead, stages, "host") == 15.5
    assert step_seconds(ahead, stages | {"launch": 7.0}, "host") == 19.5  # layers take longer to launch than to run
    assert step_seconds(ahead, stages | {"launch": 9.0}, "plain") == 9.0
    assert step_seconds(ahead, stages | {"launch": 9.0}, "split") == 9.0
    assert step_seconds(ahead, stages | {"write_back": 0.0, "fetch": 0.0}, "split") == 5.5


def test_tables_on_the_host_have_layers_launched_one_by_one() -> None:
    made = gpu()
    tables = placed(a="host", b="host")
    loads = {table.name: table_load(made, table) for table in tables}
    # Dense columns -> 8 -> 16, then pairs -> 8 -> 1.
    assert stage_seconds(made, tables, "host", loads)["launch"] == pytest.approx(2e-4 + 4 * 5e-5)


def test_compressed_tables_of_one_kind_share_their_kernels_on_a_gpu() -> None:
    method = Frobenius(rank=8, terms=4)
    tables = [
        TablePlan(name=name, num_rows=rows, method=method, hot_rows=0, tail="compressed") for name, rows in ROWS.items()
    ]
    for made, times in ((gpu(), 1), (problem(), 2)):
        loads = {table.name: table_load(made, table) for table in tables}
        both = stage_seconds(made, tables, "plain", loads)["lookup"]
        alone = [stage_seconds(made, [table], "plain", {table.name: loads[table.name]})["lookup"] for table in tables]
        base = made.table_costs(method, num_rows=1)[0].base if times == 1 else 0.0
        assert both == pytest.approx(sum(alone) - base)


def test_rates_of_a_gpu_without_its_host_are_refused() -> None:
    config = PlanConfig.of(dim=16, bottom=(8,), top=(8,), batch_size=256)
    old = hardware(device="cuda", captured=None)
    with pytest.raises(ConfigError, match="no rates for steps as CUDA graphs: measure again with `holdall hardware`"):
        make_problem(schema_of(ROWS), lookups(ROWS), config, old)
