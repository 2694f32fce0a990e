"""Collectives that count the bytes they send, take uneven sizes, and say which rank failed at which step.

Bytes are those that this rank puts on the wire with the usual algorithms: a ring sends `2 * (W - 1) / W` of a tensor to
reduce it, a gather sends a rank's part to the W - 1 others, an all-to-all what is not for the rank itself.
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
class Traffic:
    """What one kind of collective has sent from this rank."""

    bytes: int = 0
    calls: int = 0


class Pending:
    """A collective under way; `wait` gives its result."""

    def __init__(self, finish: Callable[[], Tensor]):
        self._finish = finish

    def wait(self) -> Tensor:
        return self._finish()


class Collectives:
    """The collectives of a run. In a world of one they copy nothing and send nothing.

    Calls of one object must come in the same order on every rank; `own_group` makes a group of processes for it alone,
    so that its calls may come between those of another object in any order (itself a collective call).
    """

    def __init__(self, processes: Processes, *, own_group: bool = False):
        self.processes = processes
        self.rank, self.world_size = processes.rank, processes.world_size
        self.step = 0
        """Step under way, for errors."""
        self.traffic: dict[str, Traffic] = {}
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
        """Inside, whatever is sent is counted as of one kind."""
        self._counted_as = kind
        try:
            yield
        finally:
            self._counted_as = None

    def count(self, kind: str, num_bytes: int) -> None:
        """Note that this rank sends so many bytes."""
        kind = self._counted_as or kind
        traffic = self.traffic.setdefault(kind, Traffic())
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
        """`all_reduce` that goes on meanwhile; `tensor` is not to be touched until `wait`."""
        if self.world_size == 1:
            return Pending(lambda: tensor)
        self.count(kind, self.reduce_bytes(tensor.nbytes))
        return self._started(kind, tensor, lambda: dist.all_reduce(tensor, group=self._group, async_op=True))

    def reduce_bytes(self, num_bytes: int) -> int:
        """What a rank sends to reduce a tensor of so many bytes."""
        return 2 * num_bytes * (self.world_size - 1) // self.world_size

    def all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int] | None = None, *, kind: str = "all_to_all"
    ) -> Tensor:
        """Rows for rank 0, then 1, ...: `send[r]` of them; gives what the others sent, in their order.

        `receive[r]` is how many rows rank r sends here; exchanged first (a collective of its own) when None.
        """
        return self.start_all_to_all(tensor, send, receive, kind=kind).wait()

    def start_all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int] | None = None, *, kind: str = "all_to_all"
    ) -> Pending:
        """`all_to_all` that goes on meanwhile."""
        assert len(send) == self.world_size, "one number for each rank"
        assert sum(send) == tensor.shape[0], "send says where every row goes"
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
        """How many rows each rank will send here, when this one sends `send[r]` to rank r."""
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
        """The numbers of every rank, by rank."""
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
        """What each rank passed, by rank; first dimensions may differ: `sizes`, gathered first when None.

        Parts are padded to the longest on the way; the padding is sent, and counted.
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
        """A tensor as the backend takes it: NCCL on the GPU of this process."""
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
            del sent_until_now[:]
            return result

        sent_until_now = [sent]  # gloo reads it until it is done
        return Pending(finish)


def share_of_mean(own: int, all_sizes: Sequence[int]) -> float:
    """What the gradient of a mean over `own` samples counts in that of the mean over all processes' samples."""
    return own / max(1, sum(all_sizes))
