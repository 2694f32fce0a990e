"""Checkpoints written in the background: their content, one at a time, and errors."""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdall import checkpoint
from holdall.checkpoint import BackgroundSaver, HotPart
from holdall.common.errors import CheckpointError
from holdall.tables.initial_rows import initial_rows
from holdall.tiers.host_rows import HostRows, InitialValues, LazyRows
from holdall.tiers.lazy_tensor import LazyTensor


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No shard is written before it is set."""
    opened = threading.Event()
    write = checkpoint.saving.save_file

    def wait_and_write(*arguments: Any) -> None:
        assert opened.wait(20)
        write(*arguments)

    monkeypatch.setattr(checkpoint.saving, "save_file", wait_and_write)
    yield opened
    opened.set()


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_holds_the_values_at_the_time_of_the_call(tmp_path: Path, gate: threading.Event) -> None:
    buffer = torch.arange(24.0).view(6, 4)
    flags = torch.tensor([True, False, True])
    lazy = LazyTensor(HostRows(torch.ones(3, 2)), flags, 0, 3, {"std": 0.0, "seed": 0})
    state: dict[str, Any] = {"history": [1]}
    tensors = {"whole": buffer, "view": buffer[2:4], "turned": buffer.t(), "scalar": buffer[5, 3], "lazy": lazy}
    with BackgroundSaver() as saver:
        path = saver.save(tmp_path, 1, tensors, state)
        assert saver.is_busy
        buffer.zero_()
        lazy.rows.tensor.zero_()
        flags[:] = False
        state["history"].append(2)
        assert not path.exists()
        gate.set()
        assert saver.wait() == path == tmp_path / "step-00000001"
        assert saver.wait() is None
    found, loaded_state = checkpoint.load(path)
    before = torch.arange(24.0).view(6, 4)
    assert loaded_state == {"history": [1]}
    assert torch.equal(found["whole"], before)
    assert torch.equal(found["view"], before[2:4])
    assert torch.equal(found["turned"], before.t())
    assert found["scalar"] == 23
    assert found["lazy"].tolist() == [[1, 1], [0, 0], [1, 1]]


def test_rows_are_decoded_from_the_copy(tmp_path: Path, gate: threading.Event) -> None:
    """Of rows with random initial values only the changes are copied; the rest is computed when they are written."""
    beginnings = InitialValues(torch.tensor([0]), torch.tensor([5]), torch.tensor([0.1]))
    far = LazyRows(HostRows(torch.zeros(6, 4)), beginnings)
    lazy = LazyTensor(far, far.touched, 0, 6, {"std": 0.1, "seed": 5})
    planted = torch.arange(8.0).view(2, 4)
    lazy.write(torch.tensor([1, 4]), planted)
    with BackgroundSaver() as saver:
        path = saver.save(tmp_path, 1, {"lazy": lazy}, {})
        lazy.write(torch.tensor([1, 2]), torch.full((2, 4), -1.0))
        gate.set()
    found = checkpoint.load(path)[0]["lazy"]
    assert torch.equal(found[[1, 4]], planted)
    others = torch.tensor([0, 2, 3, 5])
    assert torch.equal(found[others], initial_rows(others, 4, 5, 0.1))


def test_the_next_save_waits_for_the_last(tmp_path: Path, gate: threading.Event) -> None:
    table = torch.zeros(3)
    with BackgroundSaver() as saver:
        saver.save(tmp_path, 1, {"table": table}, {}, keep=3)
        threading.Timer(0.1, gate.set).start()
        table += 1
        saver.save(tmp_path, 2, {"table": table}, {}, keep=3)
        assert (tmp_path / "step-00000001").exists()
        table += 1
        saver.save_hot(tmp_path, 3, {"table": HotPart(table, torch.tensor([2]))}, {}, base=2)
    assert [checkpoint.load(tmp_path / f"step-0000000{step}")[0]["table"].tolist() for step in (1, 2)] == [
        [0] * 3,
        [1] * 3,
    ]
    into = {"table": torch.ones(3)}
    checkpoint.load_hot_into(tmp_path / "hot-00000003", into)
    assert into["table"].tolist() == [1, 1, 2]


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_an_error_is_raised_by_the_next_call_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    checkpoint.save(tmp_path, 1, {}, {})
    saver = BackgroundSaver()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.saving, "save_file", fail)
        saver.save(tmp_path, 2, {"x": torch.zeros(1)}, {})
        with pytest.raises(CheckpointError, match=r"the disk is full while writing .*step-00000002"):
            saver.save(tmp_path, 3, {"x": torch.zeros(1)}, {}) if call == "save" else getattr(saver, call)()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    if call != "close":
        saver.save(tmp_path, 4, {"x": torch.zeros(1)}, {})
        assert saver.wait() == checkpoint.latest(tmp_path) == tmp_path / "step-00000004"
    saver.close()


@pytest.mark.parametrize("dtype", [*checkpoint.DTYPES.values()], ids=[*checkpoint.DTYPES])
def test_copies_every_type_bit_exactly_and_keeps_its_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (24, dtype.itemsize), dtype=torch.uint8)
    tensors = {"odd": torch.ones(3, dtype=torch.int8), "x": raw.view(dtype), "empty": torch.empty(0, 5, dtype=dtype)}
    with BackgroundSaver() as saver:
        for step in (1, 2):
            path = saver.save(tmp_path, step, {**tensors, "scalar": raw[step].view(dtype)[0]}, {})
    found = checkpoint.load(path)[0]
    assert torch.equal(found["x"].view(torch.uint8), raw)
    assert torch.equal(found["scalar"].view(1).view(torch.uint8), raw[2])
    assert found["empty"].shape == (0, 5)


def test_an_error_of_the_block_is_the_one_that_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.saving, "save_file", fail)

    def train() -> None:
        with BackgroundSaver() as saver:
            saver.save(tmp_path, 1, {"x": torch.zeros(1)}, {})
            raise KeyError("training")

    with pytest.raises(KeyError):
        train()
    assert list(tmp_path.iterdir()) == []


def test_without_memory_for_a_copy_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.background, "available_memory", lambda: {"host": 4000})
    with BackgroundSaver() as saver:
        with pytest.warns(
            UserWarning, match="not written in the background: .* 1.2 KB where 4.0 KB of memory are free"
        ):
            saver.save(tmp_path, 1, {"x": torch.zeros(300)}, {}, keep=9)
        assert (tmp_path / "step-00000001").exists()
        assert not saver.is_busy
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            saver.save(tmp_path, 2, {"x": torch.zeros(300)}, {}, keep=9)
            assert saver.wait() == tmp_path / "step-00000002"
            saver.save(tmp_path, 3, {"x": torch.zeros(250)}, {}, keep=9)  # fits
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000003"


def test_the_memory_of_earlier_copies_does_not_count_against_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [5000, 5000 - 1216]  # bytes of the first copy, in whole lines of 64
    monkeypatch.setattr(checkpoint.background, "available_memory", lambda: {"host": free.pop(0)})
    with BackgroundSaver() as saver, warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 2):
            saver.save(tmp_path, step, {"x": torch.zeros(300)}, {})
    assert free == []
