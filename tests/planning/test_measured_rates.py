"""Rates that cannot be, time that is up, a machine that is busy, and remembered rates that are off: no real clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdall.cli import main
from holdall.commands.hardware import check_plan_rates
from holdall.common.errors import ConfigError
from holdall.planning.machine import check_rates, measure_dense, measure_tables
from holdall.planning.machine.clock import Clock, OutOfTimeError, median_run, rising_line
from holdall.planning.machine.conditions import LoadWatch, busy_seconds, spread
from holdall.planning.machine.hardware import Conditions, Hardware, Line, default_path
from tests.planning.made_up_hardware import ELSEWHERE, hardware

CPU = torch.device("cpu")


def timed(*seconds: float) -> float:
    """Time of an operation whose runs take these seconds, two in each try; less than 1 is impossible."""
    time, runs = [0.0], iter(seconds)

    def run() -> None:
        time[0] += next(runs)

    return Clock(CPU, repeats=1, now=lambda: time[0])(run, least=1.0, what="reading")


def test_an_impossible_time_is_measured_again_then_refused() -> None:
    assert timed(9.0, 1e-9, 9.0, 2.0) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match=r"reading was measured at 1e-09 s, 3 times in turn, but cannot take less th"):
        timed(*(6 * [1e-9]))


def test_no_memory_reads_billions_of_random_rows() -> None:
    """64 bytes are read for a row of 4: at 10 GB/s, 32,768 rows take 210 us."""
    clock = Clock(CPU, bandwidth=1e10)
    assert clock.seconds_of_rows(32_768, 4) == pytest.approx(210e-6, rel=0.01)
    assert clock.seconds_of_rows(1, 512) == pytest.approx(51.2e-9)


def test_a_slope_that_noise_hides_is_the_rate_that_was_seen() -> None:
    """A larger size that took no longer promised any rate: it is measured again, and at last not extrapolated."""
    turns = iter([[5e-4, 4e-4], [5e-4, 5e-4], [1e-4, 9e-4]])
    line = rising_line((2_000, 32_000), lambda: next(turns), 1e-9)
    assert line.each == pytest.approx((9e-4 - 1e-4) / 30_000)
    assert rising_line((2_000, 32_000), lambda: [5e-4, 4e-4], 1e-9) == Line(0.0, 4e-4 / 32_000)
    assert rising_line((10, 20), lambda: [3.0, 5.0], 0.0) == Line(pytest.approx(1.0), pytest.approx(0.2))


def test_other_processes_only_add_time() -> None:
    assert median_run([100.0, 1.0, 50.0]) == 1.0
    assert median_run([100.0, 3.0, 1.0, 2.0]) == 2.0


def test_time_that_is_up_ends_repeats_and_later_passes() -> None:
    clock = Clock(CPU, repeats=5, now=lambda: 10.0, deadline=11.0)
    late = replace(clock, deadline=9.0)
    assert clock.wants_repeat([0.01, 0.01, 0.01])
    assert not late.wants_repeat([0.01, 0.01])
    assert late.wants_repeat([0.01])  # a run after the warm-up in any case
    assert not clock.wants_repeat([0.06, 0.06])  # a long operation
    assert late.hurries()
    assert late(lambda: None) == 0.0
    with pytest.raises(OutOfTimeError):
        replace(late, must_finish=False)(lambda: None)


def test_sizes_are_left_out_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(clock: Clock, bags: Any, method: Any, optimizer: str, **options: Any) -> Any:
        return (type(method).__name__, optimizer)

    monkeypatch.setattr(measure_tables, "_table_cost", cost)
    monkeypatch.setattr(measure_tables, "_bags", lambda *arguments: None)
    monkeypatch.setattr(measure_dense, "time_layer", lambda *arguments: 1.0)
    clock = Clock(CPU, now=lambda: 0.0)
    late = replace(clock, deadline=-1.0)
    dense = [len(list(measure_tables.dense_table_costs(c, 1, (16, 64), ("sgd", "adam")))) for c in (clock, late)]
    assert dense == [4, 2]
    found: list[Any] = list(measure_tables.compressed_table_costs(late, (16, 64)))
    assert {name for name, _ in found} == {"TensorTrain", "Frobenius", "Robe"}
    assert len(list(measure_tables.compressed_table_costs(clock, (16, 64)))) == 16
    layers = [list(measure_dense.layers(c)) for c in (clock, late)]
    assert [(len(found), len(found[0].seconds)) for found in layers] == [(16, 3), (4, 2)]


# --- a busy machine --------------------------------------------------------------------------------------------------


def watch(busy: list[float | None], own: list[float], *, cores: int = 2, wanted: int = 2) -> Conditions:
    """Conditions after 10 seconds in which all processes used the cores so long, and this one its own part."""
    times = [iter(busy), iter(own), iter([0.0, 10.0])]
    reads: list[Callable[[], Any]] = [lambda i=i: next(times[i]) for i in range(3)]  # type: ignore[misc]
    return LoadWatch(*reads, num_cores=cores, wanted=wanted).conditions()


def test_a_busy_machine_is_noticed() -> None:
    assert watch([100.0, 118.0], [3.0, 20.0]).busy() is None  # 18 core seconds, 17 of them its own
    assert watch([100.0, 120.0], [3.0, 7.0]).busy() == "other processes left 0.4 of 2 cores free"
    assert watch([0.0, 300.0], [0.0, 20.0], cores=64).busy() is None  # others use 28 of 64 cores
    assert watch([None, None], [0.0, 1.0]).busy() is None
    noisy = Conditions(passes=3, quick=False, spread=2.2, cores_wanted=2, cores_free=2.0)
    assert noisy.busy() == "the same operation took up to 2.2 times as long when it was repeated"


def test_seconds_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """User, nice, system, interrupts and stolen time of the cores of this process, in hundredths of a second."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1}, raising=False)
    monkeypatch.setattr("holdall.planning.machine.conditions.TICKS_PER_SECOND", 100)
    (tmp_path / "stat").write_text(
        "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 8 8 8 8 8 8 8 8 0 0\ncpu1 100 0 50 999 999 1 2 47 0 0\n"
    )
    assert busy_seconds(tmp_path / "stat") == 2.0
    assert busy_seconds(tmp_path / "absent") is None


def test_spread_of_passes() -> None:
    once = hardware()
    slower = replace(once, tables=tuple(replace(t, lookup=t.lookup.scaled(3.0)) for t in once.tables))
    assert spread([once]) == 1.0
    assert spread([once, once]) == 1.0
    assert spread([once, replace(slower, tables=tuple(replace(t, update=t.lookup) for t in slower.tables))]) > 1.5


def test_conditions_are_kept_in_the_file(tmp_path: Path) -> None:
    busy = Conditions(passes=1, quick=True, spread=1.0, cores_wanted=2, cores_free=0.4)
    hardware(conditions=busy).save(tmp_path / "busy.json")
    loaded = Hardware.load(tmp_path / "busy.json")
    assert loaded.conditions == busy
    assert "left 0.4 of 2 cores free): measure again" in str(loaded.busy_remark())
    document = {"format": "holdall-hardware", "version": 1, **asdict(hardware())}
    del document["conditions"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert Hardware.load(tmp_path / "old.json").busy_remark() is None


def test_a_plan_says_that_its_rates_are_of_a_busy_machine(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = Conditions(passes=1, quick=False, spread=1.0, cores_wanted=2, cores_free=0.4)
    hardware(conditions=busy).save(tmp_path / "busy.json")
    main(["plan", str(data), "--hardware", str(tmp_path / "busy.json"), "--dim", "4", "--bottom", "8", "--top", "8"])
    assert "left 0.4 of 2 cores free" in " ".join(capsys.readouterr().out.split())


# --- remembered rates that are off -----------------------------------------------------------------------------------


def planted(monkeypatch: pytest.MonkeyPatch, **ratios: list[float]) -> None:
    """Checks that find operations so many times as slow as by the rates, in turn."""
    turns = {name: iter(found) for name, found in ratios.items()}
    made = {name: (2.0, lambda clock, name=name: 2.0 * next(turns[name])) for name in ratios}
    monkeypatch.setattr(check_rates, "checks", lambda rates: made)


def test_rates_that_are_off_are_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, rows=[3.0, 1.2], layers=[0.2, 0.4], memory=[1.4], lookups=[9.0, 2.0])
    assert check_rates.off_rates(hardware()) == {"layers": 0.4, "lookups": 2.0}


def test_what_is_said_of_rates_that_are_off() -> None:
    busy = Conditions(passes=1, quick=False, spread=1.0, cores_wanted=2, cores_free=0.4)
    said = check_rates.describe_off(
        hardware(conditions=busy), {"rows": 0.25, "layers": 1.8}, replace(busy, cores_free=2.0)
    )
    assert "measured on 2026-01-01: rows 4.0 times as fast, layers 1.8 times as slow; it was busy then" in said
    assert "busy now" not in said
    assert "measure it anew with `holdall hardware`" in said
    assert "it is busy now (other" in check_rates.describe_off(hardware(), {"rows": 2.0}, busy)


def test_the_checks_measure_what_the_rates_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks a millisecond, on a small table."""
    monkeypatch.setattr(check_rates, "TABLE_BYTES", 1 << 16)
    ticks = iter(range(10**9))
    clock = Clock(CPU, 1, now=lambda: 1e-3 * next(ticks))
    found = check_rates.checks(hardware())
    assert found.keys() == {"memory in order", "layers", "random rows"}
    assert found["memory in order"][0] == 1e-10
    assert found["random rows"][0] == pytest.approx(32_768 * 1e-6)
    assert found["layers"][1](clock) == pytest.approx(1e-3)


def test_plan_and_train_say_that_remembered_rates_are_off(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hardware().save(default_path())
    planted(monkeypatch, rows=[3.0, 3.0, 2.0, 2.0, 1.0])
    plan = tmp_path / "plan.json"
    main(["plan", str(data), "--dim", "4", "--bottom", "8", "--top", "8", "--out", str(plan)])
    assert "rows 3.0 times as slow" in capsys.readouterr().err
    assert "rows 2.0 times as slow" in str(check_plan_rates(plan))
    assert check_plan_rates(plan) is None
    hardware(machine=ELSEWHERE).save(default_path())
    assert check_plan_rates(plan) is None
    assert check_rates.rates_are_off(hardware(machine=ELSEWHERE)) is None
