"""The processes of a run: who they are, that they were told the same, and who speaks for them.

`torchrun` starts W processes and tells each its rank; a process without it is a world of one, with no group and no
traffic. What is said between processes here is JSON over a gloo group of its own (a few hundred bytes): whatever the
device of the run is, nothing is pickled.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from holdall.common.errors import ConfigError, HoldallError, ProcessError
from holdall.distributed.addresses import cure, prepare_addresses
from holdall.distributed.rendezvous import rendezvous

Result = TypeVar("Result")

PATIENCE = 12
"""How many timeouts the others wait while rank 0 writes a checkpoint: an hour by default."""
START_SECONDS = 60.0
"""How long processes wait for each other at the start, at least: they import for seconds, and not all at once."""
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


CPU = torch.device("cpu")


class PeerError(ProcessError):
    """What another rank failed of, and reports: this rank ends with it, and need not say so again."""


@dataclass(frozen=True)
class Processes:
    """This process among those of the run."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    timeout: float = 300.0
    """Seconds that a collective may take."""
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict, compare=False, repr=False)
    """Groups beside the default one, held here alone: `joined` lets go of them, which ends their threads. One that
    outlived that would still free tensors while the interpreter ends, which aborts the process."""
    position: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """`step`, once training has begun: where errors say that they happened."""

    @property
    def control(self) -> dist.ProcessGroup | None:
        """What JSON goes over; None in a world of one."""
        return self.groups.get("control")

    def new_group(self, *, backend: str | None = None, patience: int = 1) -> dist.ProcessGroup:
        """Another group of all processes, whose collectives may take `patience` timeouts; all must call it.

        torch would let those of a group wait for half an hour, whatever the default group was told.
        """
        with explained("a new group", self, patience=patience):
            limit = datetime.timedelta(seconds=self.timeout * patience)
            return dist.new_group(backend=backend, timeout=limit)

    def gather(self, document: Any) -> list[Any]:
        """What each rank passed, by rank, on all of them; it must be JSON."""
        if self.world_size == 1:
            return [document]
        payload = _to_bytes(document)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with explained("gather", self, patience=PATIENCE):
            dist.all_gather(sizes, torch.tensor([payload.numel()]), group=self.control)
            longest = max(int(size) for size in sizes)
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
            padded = torch.nn.functional.pad(payload, (0, longest - payload.numel()))
            dist.all_gather(parts, padded, group=self.control)
        return [_from_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def first(self, task: Callable[[], Result]) -> Result:
        """Let rank 0 do what one must do alone, and give its result, which must be JSON, to all ranks.

        The others wait. An error on rank 0 is raised there, and as `PeerError` on the others.
        """
        if self.world_size == 1:
            return task()
        if self.rank != 0:
            said = self._broadcast(None)
            if "error" in said:
                raise PeerError(f"rank 0: {said['error']}")
            return said["result"]
        try:
            result = task()
        except (HoldallError, OSError) as error:
            self._broadcast({"error": str(error)})
            raise
        self._broadcast({"result": result})
        return result

    def _broadcast(self, document: Any) -> Any:
        payload = _to_bytes(document)
        size = torch.tensor([payload.numel()])
        with explained("broadcast", self, patience=PATIENCE):
            dist.broadcast(size, 0, group=self.control)
            if self.rank != 0:
                payload = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(payload, 0, group=self.control)
        return _from_bytes(payload)

    def agree(self, fields: Mapping[str, Any]) -> None:
        """Refuse, on every rank, when the fields of some rank are not those of rank 0."""
        given = self.gather(dict(fields))
        for rank, theirs in enumerate(given):
            for name in fields:
                if theirs.get(name) != given[0].get(name):
                    kind = ProcessError if self.rank == 0 else PeerError
                    raise kind(
                        f"the processes do not agree: {name} is {_short(theirs.get(name))} on rank {rank} and "
                        f"{_short(given[0].get(name))} on rank 0: start all of them with the same command, data set "
                        f"and installation"
                    )


SINGLE_PROCESS = Processes()


def in_group() -> Processes:
    """This process in the default group of `torch.distributed`, which someone else has started; alone without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return SINGLE_PROCESS
    gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else CPU
    return Processes(dist.get_rank(), dist.get_world_size(), device)


@contextmanager
def process_group(device: torch.device, timeout: float = 300.0) -> Iterator[Processes]:
    """The processes that torchrun started, joined for the time of the block: gloo on CPUs, NCCL on GPUs.

    A group that is there already is used, and left. In a world of one there is none.
    """
    found = dist.is_available() and dist.is_initialized()
    rank, world_size, local_rank = (
        (dist.get_rank(), dist.get_world_size(), dist.get_rank()) if found else _environment()
    )
    if world_size == 1:
        yield Processes(device=device, timeout=timeout)
        return
    if device.type == "cuda":
        device = _own_gpu(device, rank, int(os.environ.get("LOCAL_RANK", local_rank)))
    limit = datetime.timedelta(seconds=timeout)
    if not found:
        _start("nccl" if device.type == "cuda" else "gloo", rank, world_size, limit)
    processes = Processes(rank, world_size, device, timeout)
    try:
        with _meeting(rank, world_size):  # connects every process with every other
            processes.groups["control"] = dist.new_group(backend="gloo", timeout=limit * PATIENCE)
        yield processes
    except BaseException:
        processes.groups.clear()
        # The others are still in a collective: NCCL would wait for them here. The end of the process closes gloo.
        if not found and device.type != "cuda" and dist.is_initialized():
            dist.destroy_process_group()
        raise
    processes.groups.clear()
    if not found and dist.is_initialized():
        dist.destroy_process_group()


def _start(backend: str, rank: int, world_size: int, limit: datetime.timedelta) -> None:
    with _meeting(rank, world_size):
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)  # torch would try until the timeout
        prepare_addresses()
        at_start = max(limit, datetime.timedelta(seconds=START_SECONDS))
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=at_start))
        store = rendezvous(store, rank, world_size, at_start)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


@contextmanager
def _meeting(rank: int, world_size: int) -> Iterator[None]:
    """Say in a sentence why this process cannot meet the others."""
    try:
        yield
    except ProcessError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise ProcessError(f"rank {rank} cannot join the others at {where}: {cure(text, world_size)}") from error


def _environment() -> tuple[int, int, int]:
    """Rank, world size and local rank, as torchrun says."""
    if int(_number("WORLD_SIZE", "1")) == 1:
        return 0, 1, 0
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set: start with torchrun"
        )
    _number("MASTER_PORT", "")
    return _number("RANK", "0"), _number("WORLD_SIZE", "1"), _number("LOCAL_RANK", os.environ["RANK"])


def _number(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(f"the environment variable {name} is {text!r}, not a number: start with torchrun")
    return int(text)


def _own_gpu(device: torch.device, rank: int, local_rank: int) -> torch.device:
    if device.index is not None:
        raise ConfigError(f"--device {device} is one GPU for all processes: say --device cuda, and each takes its own")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {rank} is process {local_rank} of its host, which has {torch.cuda.device_count()} GPUs: start fewer "
            f"processes there (--nproc-per-node), or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def explained(what: str, processes: Processes, step: int | None = None, *, patience: int = 1) -> Iterator[None]:
    """Say which rank, at which step, could not finish a collective, which may take `patience` timeouts, and why."""
    try:
        yield
    except RuntimeError as error:
        step = processes.position.get("step") if step is None else step
        where = f"rank {processes.rank}" + ("" if step is None else f", step {step}")
        text = str(error).splitlines()[0]
        if re.search("time", text, re.IGNORECASE) and re.search("out", text, re.IGNORECASE):
            raise ProcessError(
                f"{where}: {what} waited {processes.timeout * patience:g} s or more for the other processes: one hangs "
                f"or is much slower; the last lines of the rank-*.log files say where, --timeout waits longer"
            ) from error
        if re.search("connection|peer|closed|reset|aborted", text, re.IGNORECASE):
            raise ProcessError(
                f"{where}: {what} lost another process, which has ended: its rank-*.log says why"
            ) from error
        raise ProcessError(f"{where}: {what} failed ({text})") from error


class RankLog:
    """`rank-N.log` of a run folder: lines with the time, written at once. `None` for a folder keeps nothing.

    What cannot be written, as on a full disk, is left out: it must not hide the error that it tells of.
    """

    def __init__(self, folder: Path | None, rank: int):
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"rank-{rank}.log").open("a", encoding="utf-8")

    def write(self, text: str) -> None:
        if self._file is not None:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            with suppress(OSError):
                self._file.write(f"{now} {text}\n")
                self._file.flush()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Write down what ends the block, and close."""
        try:
            yield
        except BaseException as error:
            self.write(f"{type(error).__name__}: {error}")
            raise
        finally:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
                self._file = None


def _to_bytes(document: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)


def _from_bytes(payload: torch.Tensor) -> Any:
    return json.loads(bytes(payload.tolist()))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
