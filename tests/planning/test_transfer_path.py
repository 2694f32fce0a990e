"""Transfer path of rows to a GPU: the faster one by the machine's rates, and a kernel where there are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdall.planning.machine.hardware import Hardware, Line, default_path
from holdall.planning.machine.transfer_path import kernel_is_faster, seconds_by_path
from tests.planning.made_up_hardware import ELSEWHERE, hardware

COPIES = {"to_device": Line(), "to_host": Line(), "to_device_pinned": Line(1e-5, 1e-9), "to_host_pinned": Line()}


def with_kernels(nanoseconds: float) -> Hardware:
    """Rates of a machine whose kernels take so long for a row of 64 or 512 bytes; the host takes 1 us."""
    lines = {size: Line(2e-6, nanoseconds * 1e-9) for size in ("64", "512")}
    known = hardware(device="cuda", copy=COPIES)
    return replace(known, gather={**known.gather, "pinned": lines}, scatter={**known.scatter, "pinned": lines})


def test_seconds_of_both_ways() -> None:
    seconds = seconds_by_path(with_kernels(500), 64, 100)
    assert seconds is not None
    assert seconds["kernel"] == pytest.approx(2 * (2e-6 + 100 * 5e-7))
    assert seconds["copy"] == pytest.approx(2 * 100 * 1e-6 + 1e-5 + 6400 * 1e-9)


def test_rates_from_before_it_was_measured_say_nothing(tmp_path: Path) -> None:
    hardware().save(tmp_path / "old.json")
    assert seconds_by_path(Hardware.load(tmp_path / "old.json"), 64, 100) is None


@pytest.mark.parametrize(("nanoseconds", "faster"), [(500.0, True), (5000.0, False)])
def test_the_machines_file_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nanoseconds: float, faster: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_is_faster(256, 1000)  # no file
    with_kernels(nanoseconds).save(default_path())
    assert kernel_is_faster(256, 1000) is faster
    replace(with_kernels(5000.0), machine=ELSEWHERE).save(default_path())
    assert kernel_is_faster(256, 1000)  # of another machine
    default_path().write_text("{", encoding="utf-8")
    assert kernel_is_faster(256, 1000)  # damaged
