"""Measurement of a machine, on a small scale, and refusal of damaged files of rates."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.common.memory import available_memory
from holdall.planning.config import PlanConfig
from holdall.planning.layer_cost import interaction_seconds, layer_seconds
from holdall.planning.machine import measure_dense, measure_tables
from holdall.planning.machine.clock import fit, fit_line
from holdall.planning.machine.hardware import (
    Cost,
    Hardware,
    HardwareWarning,
    Interaction,
    Layer,
    Line,
    default_path,
    device_kind,
    machine_identity,
)
from holdall.planning.machine.measure import hardware as measure_hardware
from holdall.planning.machine.measure_disk import measure_disk
from holdall.planning.memory_check import check_free_memory
from holdall.planning.planner import plan_tables
from tests.planning.made_up_hardware import CAPTURED, ELSEWHERE, hardware, lookups, schema_of

pytestmark = pytest.mark.slow

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Hardware:
    """The whole measurement over tiny tables, with a clock that ticks a millisecond a look: nothing here is timed."""
    ticks = iter(range(10**9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_dense, "WIDTHS", (4, 8))
        patch.setattr(measure_tables, "COMPRESSED_ROWS", 500)
        patch.delenv("WORLD_SIZE", raising=False)
        folder = tmp_path_factory.mktemp("disk")
        stages: list[str] = []
        made = measure_hardware(
            "cpu",
            folder=folder,
            disk_bytes=1 << 20,
            table_bytes=1 << 16,
            repeats=1,
            passes=2,
            seconds=float("inf"),
            now=lambda: 1e-3 * next(ticks),
            note=stages.append,
            dims=(4, 8),
        )
        assert not list(folder.iterdir())
        assert stages[:3] == ["memory", "disk", "tables (pass 1)"]
        assert stages[-1] == "copies, layers, interaction (pass 2)"
        assert made.conditions is not None
        assert made.conditions.passes == 2
        return made


def test_a_measured_machine_can_be_planned_for(measured: Hardware, tmp_path: Path) -> None:
    measured.save(tmp_path / "hardware.json")
    loaded = Hardware.load(tmp_path / "hardware.json")
    assert loaded == measured
    assert loaded.machine == machine_identity()
    assert loaded.check_machine() is None
    assert loaded.gather.keys() == loaded.scatter.keys() == {"device", "host", "disk", "cached"}
    assert all(by_size.keys() == {"4", "64", "256", "512"} for by_size in loaded.gather.values())
    assert loaded.gather["disk"]["64"].each > 0  # by the real clock
    rows = {"a": 3000, "b": 20}
    for preset in ("device", "dlrm", "fpd", "tt-rec"):
        config = PlanConfig.of(dim=8, bottom=(8,), top=(8,), batch_size=32, preset=preset)
        made = plan_tables(schema_of(rows), lookups(rows), config, loaded)
        assert made.forecast is not None
        assert made.forecast.step_seconds > 0


def test_costs_are_fitted_and_never_negative() -> None:
    points = [(100, 10), (1000, 10), (1000, 500), (4000, 100)]
    cost = fit(points, [1e-3 + 2e-6 * lookups + 3e-6 * rows for lookups, rows in points])
    assert (cost.base, cost.per_lookup, cost.per_row) == pytest.approx((1e-3, 2e-6, 3e-6))
    falling = fit(points, [4e-3, 3e-3, 2e-3, 1e-3])
    assert min(asdict(falling).values()) >= 0
    assert fit_line([10, 20], [3.0, 5.0]) == Line(pytest.approx(1.0), pytest.approx(0.2))
    assert fit_line([10, 20], [5.0, 3.0]).each == 0


def test_shapes_between_and_beyond_the_measured_ones() -> None:
    def rising(work: int) -> dict[str, float]:
        return {"100": 1e-6 * work, "1000": 1e-5 * work}

    layers = [Layer(a, b, rising(a * b)) for a in (16, 256) for b in (16, 256)]
    assert layer_seconds(layers, 256, 16, 100) == pytest.approx(1e-6 * 256 * 16)
    assert layer_seconds(layers, 64, 128, 100) == pytest.approx(1e-6 * 64 * 128)  # a power law is met exactly
    assert layer_seconds(layers, 512, 256, 550) == pytest.approx(5.5e-6 * 512 * 256)
    assert layer_seconds(layers, 1, 16, 2000) == pytest.approx(2e-5 * 16 * 16)
    pairs = [Interaction(v, d, rising(v * v * d)) for v in (9, 27) for d in (16, 64)]
    assert interaction_seconds(pairs, 54, 32, 1000) == pytest.approx(1e-5 * 54 * 54 * 32)


def test_rates_of_another_machine() -> None:
    with pytest.warns(HardwareWarning, match="another machine .*measure this one with `holdall hardware`"):
        message = hardware(machine=ELSEWHERE).check_machine()
    assert message is not None
    assert "cpu 'abacus' there" in message


def _damage(change: Any) -> dict[str, Any]:
    document = json.loads(json.dumps({"format": "holdall-hardware", "version": 1, **asdict(hardware())}))
    change(document)
    return document


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(gathers={}), r"unknown field 'gathers' \(did you mean 'gather'\?\)"),
        (lambda d: d.pop("layers"), "'layers' is missing: measure again with `holdall hardware`"),
        (
            lambda d: d["layers"][1].update(seconds={"many": 1.0}),
            "rates are by size, and 'many' is not a size",
        ),
        (lambda d: d["find"].update(per_row=-1.0), r"'find\.per_row' must be a number of at least 0, not -1\.0"),
        (
            lambda d: d["tables"][0]["lookup"].update(per_row=float("nan")),
            r"'tables\[0\]\.lookup\.per_row' must be a finite",
        ),
        (lambda d: d["tables"][0].update(method={"method": "sparse"}), "unknown table method 'sparse'"),
        (lambda d: d["find"].update(speed=1), r"unknown field 'find\.speed'"),
        (lambda d: d["gather"].update(host={}), "rates are by size, and nothing is not a size"),
        (
            lambda d: d.update(captured={**asdict(CAPTURED), "launch_far": 3e-4}),
            r"'captured\.launch_far' must be an object, not 0\.0003: measure again",
        ),
    ],
)
def test_damaged_files(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(_damage(change)))
    with pytest.raises(ConfigError, match=message):
        Hardware.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*: make it with `holdall hardware --out"):
        Hardware.load(tmp_path / "hardware.json")


def test_where_rates_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "holdall" / "hardware.json"


def test_a_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(ConfigError, match=r"is too small to measure: it takes 2.1 MB, and 1.0 MB are free"):
        measure_disk(tmp_path, 1 << 20, (64,))
    with pytest.raises(ConfigError, match="there is no folder"):
        measure_disk(tmp_path / "absent", 1 << 20, (64,))


@needs_no_gpu
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="device 'cuda' does not exist: this machine has no GPU"):
        device_kind("cuda")
    with pytest.raises(ConfigError, match=r"no device kind 'gpu:1'"):
        device_kind("gpu:1")
    assert device_kind("auto") == "cpu"


# --- free memory of this machine -------------------------------------------------------------------------------------

ROWS = {"users": 3000, "items": 500}
CONFIG = PlanConfig.of(dim=8, bottom=(16,), top=(16,), batch_size=64)


def test_free_memory(tmp_path: Path) -> None:
    free = available_memory(tmp_path / "not" / "made" / "yet")
    assert free["device"] == free["host"] > 1 << 20
    assert free["disk"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.5)


def test_memory_is_checked_before_it_is_used(tmp_path: Path) -> None:
    made = plan_tables(schema_of(ROWS), lookups(ROWS), CONFIG, hardware())
    assert made.forecast is not None
    check_free_memory(made, tmp_path)
    check_free_memory(replace(made, forecast=None), tmp_path)
    for tier, words in {"host": "of the host", "disk": "of the disk at"}.items():
        memory = {**made.forecast.memory, tier: {"tables": 1 << 60}}
        too_large = replace(made, forecast=replace(made.forecast, memory=memory))
        with pytest.raises(ConfigError, match=f"the plan needs .* {words}.* too little.*--{tier}-memory"):
            check_free_memory(too_large, tmp_path)


@needs_no_gpu
def test_a_plan_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    made = plan_tables(schema_of(ROWS), lookups(ROWS), CONFIG, hardware())
    with pytest.raises(ConfigError, match="for a GPU and this machine has none"):
        check_free_memory(replace(made, device="cuda"), tmp_path)


# --- several processes -----------------------------------------------------------------------------------------------

TWO = """
import torch
from holdall.planning.machine.measure_collectives import measure_collectives
found = measure_collectives(torch.device("cpu"), sizes=(64, 4096))
print(found.world_size, found.backend, sorted(found.all_reduce), min(found.all_to_all.values()) > 0)
"""


def test_two_processes_measure_what_they_say_to_each_other() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    surroundings = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TWO],
            env={**surroundings, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process in running:
        out, _ = process.communicate(timeout=120)
        assert out.split() == ["2", "gloo", "['4096',", "'64']", "True"]


def test_costs() -> None:
    assert Cost(1.0, 2.0, 3.0).seconds(10, 100) == 321.0
    assert Cost(1.0, 2.0, 3.0).scaled(2.0) == Cost(1.0, 4.0, 6.0)
    assert Cost(0.0, 0.0, 0.0).between(Cost(4.0, 8.0, 2.0), 0.25) == Cost(1.0, 2.0, 0.5)
