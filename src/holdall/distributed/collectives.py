"""Collectives that count the bytes they send, take uneven sizes, and name the rank and step of an error.

Bytes are those that this rank sends with the usual algorithms: a ring all-reduce sends `2 * (W - 1) / W` of a tensor, a
gather sends a rank's part to the W - 1 others, an all-to-all sends everything but the rank's own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from holdall.distributed.processes import Processes, explained


@dataclass
class CollectiveTraffic:
    """Bytes and calls of one kind of collective, sent from this rank."""

    bytes: int = 0
    calls: int = 0


class Pending:
    """Collective in progress; `wait` returns its result."""

    def __init__(self, finish: Callable[[], Tensor]):
        self._finish = finish

    def wait(self) -> Tensor:
        return self._finish()


class Collectives:
    """Collectives of a run. In a world of one they copy nothing and send nothing.

    Calls of one object must come in the same order on every rank. `own_group` makes a process group for this object
    alone (a collective call), so that its calls may interleave with those of other objects in any order.
    """

    def __init__(self, processes: Processes, *, own_group: bool = False):
        self.processes = processes
        self.rank, self.world_size = processes.rank, processes.world_size
        self.step = 0
        """Current step, for error messages."""
        self.traffic: dict[str, CollectiveTraffic] = {}
        self._counted_as: str | None = None
        self._name: str | None = None
        if own_group and self.world_size > 1:
            self._name = f"own {len(processes.groups)}"
            processes.groups[self._name] = processes.new_group()

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return None if self._name is None else self.processes.groups[self._name]

    @contextmanager
    def counted_as(self, kind: str) -> Iterator[None]:
        """Context in which everything sent is counted as one kind."""
        self._counted_as = kind
        try:
            yield
        finally:
            self._counted_as = None

    def count(self, kind: str, num_bytes: int) -> None:
        """Count bytes that this rank sends."""
        kind = self._counted_as or kind
        traffic = self.traffic.setdefault(kind, CollectiveTraffic())
        traffic.bytes += num_bytes
        traffic.calls += 1

    def bytes_by_kind(self) -> dict[str, int]:
        return {kind: traffic.bytes for kind, traffic in self.traffic.items()}

    @property
    def total_bytes(self) -> int:
        return sum(traffic.bytes for traffic in self.traffic.values())

    def all_reduce(self, tensor: Tensor, *, kind: str = "all_reduce") -> Tensor:
        """The sum over ranks, in place: the same bits on all of them."""
        return self.start_all_reduce(tensor, kind=kind).wait()

    def start_all_reduce(self, tensor: Tensor, *, kind: str = "all_reduce") -> Pending:
        """Asynchronous `all_reduce`; `tensor` must not be used until `wait`."""
        if self.world_size == 1:
            return Pending(lambda: tensor)
        self.count(kind, self.reduce_bytes(tensor.nbytes))
        return self._started(kind, tensor, lambda: dist.all_reduce(tensor, group=self._group, async_op=True))

    def reduce_bytes(self, num_bytes: int) -> int:
        """Bytes that a rank sends to reduce a tensor of `num_bytes`."""
        return 2 * num_bytes * (self.world_size - 1) // self.world_size

    def all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int] | None = None, *, kind: str = "all_to_all"
    ) -> Tensor:
        """Send rows to each rank: `send[r]` of them to rank r, in order; the received rows, in the order of ranks.

        `receive[r]` is how many rows rank r sends here; if None, it is exchanged first (another collective).
        """
        return self.start_all_to_all(tensor, send, receive, kind=kind).wait()

    def start_all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int] | None = None, *, kind: str = "all_to_all"
    ) -> Pending:
        """Asynchronous `all_to_all`."""
        assert len(send) == self.world_size, "one number for each rank"
        assert sum(send) == tensor.shape[0], "send must cover every row"
        if self.world_size == 1:
            return Pending(lambda: tensor)
        receive = self.exchange_sizes(send) if receive is None else receive
        tensor = self._ready(tensor)
        result = tensor.new_empty(sum(receive), *tensor.shape[1:])
        row_bytes = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
        self.count(kind, row_bytes * (tensor.shape[0] - send[self.rank]))
        return self._started(
            kind,
            result,
            lambda: dist.all_to_all_single(result, tensor, list(receive), list(send), group=self._group, async_op=True),
            tensor,
        )

    def exchange_sizes(self, send: Sequence[int]) -> list[int]:
        """Rows that each rank will send here, if this one sends `send[r]` to rank r."""
        if self.world_size == 1:
            return list(send)
        sent = torch.tensor(send, dtype=torch.int64, device=self.processes.device)
        received = torch.empty_like(sent)
        self.count("sizes", sent.nbytes // self.world_size * (self.world_size - 1))
        return (
            self._started(
                "all_to_all of sizes",
                received,
                lambda: dist.all_to_all_single(received, sent, group=self._group, async_op=True),
                sent,
            )
            .wait()
            .tolist()
        )

    def gather_sizes(self, sizes: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, in the order of ranks."""
        if self.world_size == 1:
            return [list(sizes)]
        own = torch.tensor(sizes, dtype=torch.int64, device=self.processes.device)
        found = own.new_empty(self.world_size, own.numel())
        self.count("sizes", own.nbytes * (self.world_size - 1))
        self._gather_into(found.view(-1), own)
        return found.tolist()

    def all_gather(
        self, tensor: Tensor, sizes: Sequence[int] | None = None, *, kind: str = "all_gather"
    ) -> list[Tensor]:
        """The tensors of all ranks; their first dimensions may differ: `sizes`, gathered first if None.

        Tensors are padded to the longest one; the padding is sent, and counted.
        """
        if self.world_size == 1:
            return [tensor]
        if sizes is None:
            sizes = [found[0] for found in self.gather_sizes([tensor.shape[0]])]
        longest = max(sizes)
        padded = tensor = self._ready(tensor)
        if tensor.shape[0] < longest:
            padded = tensor.new_zeros(longest, *tensor.shape[1:])
            padded[: tensor.shape[0]] = tensor
        gathered = tensor.new_empty(self.world_size * longest, *tensor.shape[1:])
        self.count(kind, padded.nbytes * (self.world_size - 1))
        if longest:
            self._gather_into(gathered, padded)
        return [gathered[rank * longest : rank * longest + size] for rank, size in enumerate(sizes)]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of rank `source`, in place."""
        if self.world_size == 1:
            return tensor
        self.count("broadcast", tensor.nbytes * (self.world_size - 1) if self.rank == source else 0)
        return self._started(
            "broadcast", tensor, lambda: dist.broadcast(tensor, source, group=self._group, async_op=True)
        ).wait()

    def _ready(self, tensor: Tensor) -> Tensor:
        """Contiguous tensor on the device of the backend: for NCCL the GPU of this process."""
        return tensor.to(self.processes.device).contiguous()

    def _gather_into(self, result: Tensor, own: Tensor) -> None:
        parts = list(result.chunk(self.world_size))
        self._started(
            "all_gather", result, lambda: dist.all_gather(parts, own, group=self._group, async_op=True), own
        ).wait()

    def _started(
        self, kind: str, result: Tensor, start: Callable[[], dist.Work], sent: Tensor | None = None
    ) -> Pending:
        with explained(kind, self.processes, self.step):
            work = start()

        def finish() -> Tensor:
            with explained(kind, self.processes, self.step):
                work.wait()
            del in_flight[:]
            return result

        in_flight = [sent]  # gloo reads it until the collective is done
        return Pending(finish)


def share_of_mean(own: int, all_sizes: Sequence[int]) -> float:
    """Weight of the gradient of a mean over `own` samples in that of the mean over all processes' samples."""
    return own / max(1, sum(all_sizes))
