"""Worker functions of the checkpoint tests: planted tensors are saved and loaded, with and without faults."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from holdall import checkpoint
from holdall.checkpoint import HotPart
from holdall.common.errors import HoldallError
from holdall.distributed.processes import Processes, process_group

CPU = torch.device("cpu")
NUM_ROWS, HOT = 40, 6
TABLES = ("A", "B", "C")


class Spread:
    """[40, 3] rows, the first 6 on every process, the others sharded; those planted are i + version, others 0."""

    is_sharded = True
    initial: dict[str, Any] = {"std": 0.0, "seed": 0}  # noqa: RUF012
    shape, dtype = (NUM_ROWS, 3), torch.float32

    def __init__(self, processes: Processes, version: float | None = None):
        ids = torch.arange(NUM_ROWS)
        self.kept = (ids < HOT) | ((ids - HOT) % processes.world_size == processes.rank)
        self.writes = self.kept & ((ids >= HOT) | (processes.rank == 0))
        self.rows = torch.full(self.shape, torch.nan)
        self.rows[self.kept] = -1.0  # what was there before
        self.is_touched = self.kept.clone()
        if version is not None:
            self.rows[self.kept] = planted(version)[self.kept]
            self.is_touched = self.kept & (ids % 4 != 1)

    def touched(self) -> Tensor:
        return (self.is_touched & self.writes).nonzero()[:, 0]

    def read(self, rows: Tensor) -> Tensor:
        assert bool(self.kept[rows].all())
        return self.rows[rows]

    read_raw = read

    def decode_(self, rows: Tensor, raw: Tensor) -> Tensor:
        return raw

    def write(self, rows: Tensor, values: Tensor) -> None:
        mine = self.kept[rows]
        self.rows[rows[mine]] = values[mine]
        self.is_touched[rows[mine]] = True

    def reset(self) -> None:
        self.rows[self.kept] = 0.0

    def clear_touched(self) -> None:
        self.is_touched[:] = False


class Replicated(Spread):
    """The same rows, all of them on every process."""

    is_sharded = False

    def __init__(self, processes: Processes, version: float | None = None):
        super().__init__(Processes(), version)


def planted(version: float) -> Tensor:
    """[40, 3] what `Spread` holds: rows that were touched, and zeros."""
    ids = torch.arange(NUM_ROWS)
    rows = (ids[:, None] + version + torch.tensor([0.0, 0.25, 0.5])).float()
    rows[ids % 4 == 1] = 0.0
    return rows


def ordinary(version: float) -> dict[str, Tensor]:
    """Tensors that all processes have; `big` is large enough to be cut."""
    generator = torch.Generator().manual_seed(int(version))
    return {
        "dense": torch.randn(7, 3, generator=generator),
        "big": torch.randn(90_000, 8, generator=generator),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.empty(0, 4),
    }


def table(name: str, version: float) -> Tensor:
    return torch.arange(20.0).view(10, 2) + version + 100 * TABLES.index(name)


def own_tables(processes: Processes, version: float | None) -> dict[str, Tensor]:
    """Tables that are each on one process, which depends on the number of processes."""
    return {
        f"tables.{name}": torch.zeros(10, 2) if version is None else table(name, version)
        for number, name in enumerate(TABLES)
        if number % processes.world_size == processes.rank
    }


def state_of(processes: Processes, version: float) -> dict[str, Any]:
    return {
        **ordinary(version),
        **own_tables(processes, version),
        "spread": Spread(processes, version),
        "lazy": Replicated(processes, version),
    }


def save_planted(folder: str, version: float = 1.0, step: int = 1) -> str:
    with process_group(CPU, timeout=20) as processes:
        tensors = state_of(processes, version)
        return str(
            checkpoint.save(Path(folder), step, tensors, {"v": version}, shard_bytes=500_000, processes=processes)
        )


def load_planted(folders: list[str], version: float = 1.0) -> list[list[str]]:
    """Names of the tensors that are not as planted, for each folder; nothing else may be touched."""
    with process_group(CPU, timeout=20) as processes:
        return [_wrong(folder, version, processes) for folder in folders]


def _wrong(folder: str, version: float, processes: Processes) -> list[str]:
    path = checkpoint.latest_sound(Path(folder), processes)
    assert path is not None
    into: dict[str, Any] = {name: torch.full_like(tensor, -1) for name, tensor in ordinary(version).items()}
    into.update(own_tables(processes, None))
    into.update(spread=Spread(processes), lazy=Replicated(processes))
    if processes.world_size % 2 == 0:  # one of each kind into the other
        into.update(spread=torch.full((NUM_ROWS, 3), -1.0), lazy=Spread(processes))
    assert checkpoint.load_into(path, into, processes=processes) == {"v": version}
    expected: dict[str, Any] = {**ordinary(version), **own_tables(processes, version)}
    expected.update(spread=planted(version), lazy=planted(version))
    return [name for name, target in into.items() if not _same(target, expected[name])]


def _same(target: Any, expected: Tensor) -> bool:
    if isinstance(target, Tensor):
        return torch.equal(target, expected)
    return torch.equal(target.rows[target.kept], expected[target.kept]) and bool(
        target.rows[~target.kept].isnan().all()
    )


# --- what goes wrong -------------------------------------------------------------------------------------------------


@contextmanager
def patched(name: str, function: Callable[..., Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.saving, name, function)
        yield


def save_with_a_failure(folder: str, failing: int, function: str) -> tuple[str, str, list[str]]:
    """A full disk on one process: its error, the files left in the folder, and that all can save again."""

    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with process_group(CPU, timeout=20) as processes:
        tensors, original = state_of(processes, 2.0), getattr(checkpoint.saving, function)
        with (
            patched(function, full if processes.rank == failing else original),
            pytest.raises(HoldallError) as caught,
        ):
            checkpoint.save(Path(folder), 2, tensors, {}, processes=processes)
        processes.gather(None)
        left = sorted(path.name for path in Path(folder).iterdir())
        processes.gather(None)
        checkpoint.save(Path(folder), 3, tensors, {"v": 2.0}, processes=processes)
        return type(caught.value).__name__, str(caught.value), left


def save_and_die(folder: str, dying: int, function: str) -> None:
    """Kill one process at the moment it would call a function of the save."""

    def die(*_: object, **options: object) -> None:
        time.sleep(0.2)  # so that the others are where they would be
        os.kill(os.getpid(), signal.SIGKILL)

    with process_group(CPU, timeout=20) as processes:
        original = getattr(checkpoint.saving, function)
        with patched(function, die if processes.rank == dying else original):
            checkpoint.save(Path(folder), 2, state_of(processes, 2.0), {}, processes=processes)


def save_to_other_places(folders: list[str], make_partial: bool) -> tuple[str, str]:
    with process_group(CPU, timeout=20) as processes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.saving, "SHARED_SECONDS", 0.1)
        folder = Path(folders[processes.rank])
        if make_partial and processes.rank:
            (folder / "step-00000001.partial").mkdir(parents=True)
        with pytest.raises(HoldallError) as caught:
            checkpoint.save(folder, 1, {"x": torch.zeros(1 << 20)}, {}, processes=processes)
        return type(caught.value).__name__, str(caught.value)


def save_what_differs(folder: str) -> tuple[str, str]:
    with process_group(CPU, timeout=20) as processes:
        with pytest.raises(HoldallError) as caught:
            checkpoint.save(Path(folder), 1, {"x": torch.zeros(2 + processes.rank)}, {}, processes=processes)
        return type(caught.value).__name__, str(caught.value)


def load_what_does_not_fit(folder: str) -> tuple[str, str, float]:
    """A table that no process has, and one that only rank 1 has in another shape; the target afterwards."""
    with process_group(CPU, timeout=20) as processes:
        into = {**ordinary(1.0), "tables.A": torch.zeros(10, 2), "spread": Spread(processes)}
        if processes.rank == 1:
            into["tables.B"] = torch.zeros(11, 2)
        into["lazy"] = Replicated(processes)
        with pytest.raises(HoldallError) as caught:
            checkpoint.load_into(Path(folder) / "step-00000001", into, processes=processes)
        return type(caught.value).__name__, str(caught.value), float(into["tables.A"].abs().sum())


def find_sound(folder: str) -> list[Any]:
    """Checkpoint that is found, the warnings of this process, and the files that it hashed."""
    from holdall.common.files import sha256

    hashed = []

    def count(path: Path) -> str:
        hashed.append(f"{path.parent.name}/{path.name}")
        return sha256(path)

    with process_group(CPU, timeout=20) as processes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.loading, "sha256", count)
        with warnings.catch_warnings(record=True) as told:
            found = checkpoint.latest_sound(Path(folder), processes)
        assert found is not None
        return [found.name, [str(warning.message) for warning in told], hashed]


# --- in the background -----------------------------------------------------------------------------------------------


def save_in_the_background(folder: str) -> list[Any]:
    """Tensors change, and other collectives run, while a thread writes; then a save fails on rank 1 only."""
    written = checkpoint.saving.save_file
    go_on = threading.Event()

    def slow(*arguments: Any) -> None:
        assert go_on.wait(20)
        written(*arguments)

    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with process_group(CPU, timeout=20) as processes, checkpoint.BackgroundSaver(processes) as saver:
        tensors = state_of(processes, 1.0)
        with patched("save_file", slow):
            saver.save(Path(folder), 1, tensors, {"v": 1.0})
            absent = not (Path(folder) / "step-00000001").exists() and saver.is_busy
            tensors["spread"].rows.zero_()
            for tensor in tensors.values():
                if isinstance(tensor, Tensor):
                    tensor.zero_()
            totals = []
            for number in range(50):
                total = torch.tensor([float(processes.rank + number)])
                dist.all_reduce(total)
                totals.append(float(total))
                assert processes.gather(number) == [number] * processes.world_size
                if number == 25:
                    go_on.set()
            done = saver.wait()
        with patched("save_file", full if processes.rank == 1 else written):
            saver.save(Path(folder), 2, tensors, {})
            with pytest.raises(HoldallError) as caught:
                saver.save(Path(folder), 3, tensors, {})
        saver.save(Path(folder), 4, tensors, {"v": 0.0})
        assert saver.wait() == Path(folder) / "step-00000004"
        return [absent, totals, str(done), type(caught.value).__name__, str(caught.value)]


# --- hot rows --------------------------------------------------------------------------------------------------------


def save_hot_rows(folder: str) -> str:
    """Step 1 in full, then the hot rows and the dense part of step 5."""
    with process_group(CPU, timeout=20) as processes:
        checkpoint.save(Path(folder), 1, state_of(processes, 1.0), {"v": 1.0}, processes=processes)
        hot = torch.tensor([0, 2, 3, 5]) if processes.rank == 0 else torch.empty(0, dtype=torch.int64)
        tensors: dict[str, Any] = {
            **ordinary(2.0),
            "spread": HotPart(Spread(processes, 2.0), hot),
            "lazy": HotPart(Replicated(processes, 2.0), torch.tensor([7, 1, 38])),
        }
        for name, tensor in own_tables(processes, 2.0).items():
            tensors[name] = HotPart(tensor, torch.tensor([9, 0]))
        return str(checkpoint.save_hot(Path(folder), 5, tensors, {"v": 2.0}, base=1, processes=processes))


def load_hot_rows(folder: str) -> list[str]:
    with process_group(CPU, timeout=20) as processes:
        path = checkpoint.latest_sound(Path(folder), processes)
        assert path is not None
        into: dict[str, Any] = {**ordinary(3.0), **own_tables(processes, None)}
        into.update(spread=Spread(processes), lazy=Replicated(processes))
        checkpoint.load_into(path, into, verify=False, processes=processes)
        hot = checkpoint.latest_hot(Path(folder), 1, processes)
        assert hot is not None
        assert checkpoint.load_hot_into(hot, into, verify=False, processes=processes) == {"v": 2.0}
        expected: dict[str, Any] = {**ordinary(2.0), **own_tables(processes, 1.0)}
        for name, tensor in own_tables(processes, 2.0).items():
            expected[name][[0, 9]] = tensor[[0, 9]]
        for name, rows in (("spread", [0, 2, 3, 5]), ("lazy", [7, 1, 38])):
            expected[name] = planted(1.0)
            expected[name][rows] = planted(2.0)[rows]
        return [name for name, target in into.items() if not _same(target, expected[name])]
