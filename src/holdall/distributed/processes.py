"""Processes of a run: rank, process group, control messages and logs.

`torchrun` starts W processes and sets the rank of each. A process without it is a world of one, with no group and no
traffic. Control messages are JSON (a few hundred bytes) over a gloo group of their own, whatever the device of the run:
nothing is pickled.
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
from holdall.distributed.addresses import connection_advice, prepare_addresses
from holdall.distributed.rendezvous import rendezvous

Result = TypeVar("Result")

CONTROL_TIMEOUTS = 12
"""Timeouts that a control message may take, since the others wait while rank 0 writes a checkpoint: an hour by
default."""
START_SECONDS = 60.0
"""Least seconds that processes wait for each other at the start: imports take seconds, more on some than on others."""
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


CPU = torch.device("cpu")


class PeerError(ProcessError):
    """Error of another rank, which reports it: this rank ends too, without a report of its own."""


@dataclass(frozen=True)
class Processes:
    """Rank of this process, and its connection to the other processes of the run."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    timeout: float = 300.0
    """Seconds that a collective may take."""
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict, compare=False, repr=False)
    """Groups beside the default one. No other object may refer to them: `process_group` drops them at its end, which
    ends their threads. A group that lived longer would free tensors while the interpreter exits, which aborts it."""
    position: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """`step` of training, for error messages."""

    @property
    def control(self) -> dist.ProcessGroup | None:
        """Group of control messages; None in a world of one."""
        return self.groups.get("control")

    def new_group(self, *, backend: str | None = None, timeouts: int = 1) -> dist.ProcessGroup:
        """New group of all processes, whose collectives may take `timeouts` timeouts. A collective call.

        torch's own timeout of a new group is half an hour, whatever that of the default group.
        """
        with explained("a new group", self, timeouts=timeouts):
            limit = datetime.timedelta(seconds=self.timeout * timeouts)
            return dist.new_group(backend=backend, timeout=limit)

    def gather(self, document: Any) -> list[Any]:
        """The documents of all ranks, in the order of ranks; each must be JSON. A collective call."""
        if self.world_size == 1:
            return [document]
        payload = _to_bytes(document)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with explained("gather", self, timeouts=CONTROL_TIMEOUTS):
            dist.all_gather(sizes, torch.tensor([payload.numel()]), group=self.control)
            longest = max(int(size) for size in sizes)
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
            padded = torch.nn.functional.pad(payload, (0, longest - payload.numel()))
            dist.all_gather(parts, padded, group=self.control)
        return [_from_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def on_rank_zero(self, task: Callable[[], Result]) -> Result:
        """Run a task on rank 0 only, and return its result, which must be JSON, on all ranks. A collective call.

        The others wait. An error on rank 0 is raised there, and as `PeerError` on the others.
        """
        if self.world_size == 1:
            return task()
        if self.rank != 0:
            reply = self._broadcast(None)
            if "error" in reply:
                raise PeerError(f"rank 0: {reply['error']}")
            return reply["result"]
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
        with explained("broadcast", self, timeouts=CONTROL_TIMEOUTS):
            dist.broadcast(size, 0, group=self.control)
            if self.rank != 0:
                payload = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(payload, 0, group=self.control)
        return _from_bytes(payload)

    def agree(self, fields: Mapping[str, Any]) -> None:
        """Raise on every rank if the fields of some rank differ from those of rank 0. A collective call."""
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


def default_processes() -> Processes:
    """Processes of the existing default group of `torch.distributed`; a single process without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return SINGLE_PROCESS
    gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else CPU
    return Processes(dist.get_rank(), dist.get_world_size(), device)


@contextmanager
def process_group(device: torch.device, timeout: float = 300.0) -> Iterator[Processes]:
    """Context with the process group of the processes that torchrun started: gloo on CPUs, NCCL on GPUs.

    An existing default group is used, and not destroyed. In a world of one there is none.
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
        with _connecting(rank, world_size):  # connects every process with every other
            processes.groups["control"] = dist.new_group(backend="gloo", timeout=limit * CONTROL_TIMEOUTS)
        yield processes
    except BaseException:
        processes.groups.clear()
        # The others are still in a collective, and NCCL would wait for them here. Exiting closes gloo's connections.
        if not found and device.type != "cuda" and dist.is_initialized():
            dist.destroy_process_group()
        raise
    processes.groups.clear()
    if not found and dist.is_initialized():
        dist.destroy_process_group()


def _start(backend: str, rank: int, world_size: int, limit: datetime.timedelta) -> None:
    with _connecting(rank, world_size):
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)  # torch would try until the timeout
        prepare_addresses()
        at_start = max(limit, datetime.timedelta(seconds=START_SECONDS))
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=at_start))
        store = rendezvous(store, rank, world_size, at_start)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


@contextmanager
def _connecting(rank: int, world_size: int) -> Iterator[None]:
    """Raise errors of connecting as `ProcessError` with advice."""
    try:
        yield
    except ProcessError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise ProcessError(
            f"rank {rank} cannot join the others at {where}: {connection_advice(text, world_size)}"
        ) from error


def _environment() -> tuple[int, int, int]:
    """Rank, world size and local rank, as set by torchrun."""
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
        raise ConfigError(f"--device {device} is one GPU for all processes: use --device cuda, and each takes its own")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {rank} is process {local_rank} of its host, which has {torch.cuda.device_count()} GPUs: start fewer "
            f"processes there (--nproc-per-node), or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def explained(what: str, processes: Processes, step: int | None = None, *, timeouts: int = 1) -> Iterator[None]:
    """Raise errors of a collective, which may take `timeouts` timeouts, as `ProcessError` that names rank and step."""
    try:
        yield
    except RuntimeError as error:
        step = processes.position.get("step") if step is None else step
        where = f"rank {processes.rank}" + ("" if step is None else f", step {step}")
        text = str(error).splitlines()[0]
        if re.search("time", text, re.IGNORECASE) and re.search("out", text, re.IGNORECASE):
            raise ProcessError(
                f"{where}: {what} waited {processes.timeout * timeouts:g} s or more for the other processes: one hangs "
                f"or is much slower; the last lines of the rank-*.log files show where, --timeout waits longer"
            ) from error
        if re.search("connection|peer|closed|reset|aborted", text, re.IGNORECASE):
            raise ProcessError(
                f"{where}: {what} lost another process, which has ended: its rank-*.log has the reason"
            ) from error
        raise ProcessError(f"{where}: {what} failed ({text})") from error


class RankLog:
    """Log `rank-N.log` of a run folder: lines with the time, flushed at once. Without a folder nothing is written.

    Errors of writing, as on a full disk, are ignored: they must not hide the error that is logged.
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
        """Log the error that ends the block, and close the file."""
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
