"""The collectives that move rows between processes, with the bytes that each kind of message sent.

Bytes are those that leave this process for others: what it sends in an all-to-all but for its own part; its part times
(W - 1) in an all-gather; 2 (W - 1) / W of the tensor in an all-reduce (a ring's). W is the number of processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Collectives of one process group; of one process alone where `torch.distributed` was not started.

    Every process must make the same calls in the same order. Tensors are moved to where the backend takes them, the
    GPU for NCCL, and what comes back is there.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        started = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if started else 0
        self.world_size = dist.get_world_size(group) if started else 1
        gpu = started and dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        self.sent: Counter[str] = Counter()
        """Bytes sent to other processes so far, by kind of message."""

    @property
    def total_sent(self) -> int:
        return sum(self.sent.values())

    def all_to_all(self, rows: Tensor, to: Sequence[int], of: Sequence[int], kind: str) -> Tensor:
        """Send the first `to[0]` rows to process 0, the next `to[1]` to process 1...; `of[r]` rows come from r.

        What comes back is in the order of the processes it comes from.
        """
        assert sum(to) == rows.shape[0]
        assert len(to) == len(of) == self.world_size
        if self.world_size == 1:
            return rows
        row_bytes = rows.element_size() * (rows.numel() // rows.shape[0] if rows.shape[0] else 0)
        self.sent[kind] += (rows.shape[0] - to[self.rank]) * row_bytes
        received = torch.empty(sum(of), *rows.shape[1:], dtype=rows.dtype, device=self.device)
        sent = rows.to(self.device).contiguous()
        dist.all_to_all_single(received, sent, list(of), list(to), group=self.group)
        return received

    def all_to_all_counts(self, counts: Sequence[int]) -> list[int]:
        """Tell process r the number `counts[r]`; the numbers that the processes told this one."""
        each = [1] * self.world_size
        return [int(count) for count in self.all_to_all(torch.tensor(counts), each, each, "counts").tolist()]

    def all_gather(self, tensor: Tensor, kind: str) -> list[Tensor]:
        """The tensors of all processes, which must have one shape, in the order of processes."""
        if self.world_size == 1:
            return [tensor]
        self.sent[kind] += tensor.nbytes * (self.world_size - 1)
        tensor = tensor.to(self.device).contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor, group=self.group)
        return gathered

    def all_gather_numbers(self, *numbers: int) -> list[list[int]]:
        """A few whole numbers of every process, `found[rank][i]`."""
        return [[int(n) for n in told.tolist()] for told in self.all_gather(torch.tensor(numbers), "counts")]

    def all_reduce(self, tensor: Tensor, kind: str) -> Tensor:
        """The sum over processes, with the same bits on all of them; may be in the place of `tensor`."""
        if self.world_size == 1:
            return tensor
        self.sent[kind] += self.all_reduce_bytes(tensor.nbytes)
        tensor = tensor.to(self.device)
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_bytes(self, num_bytes: int) -> int:
        """What a process sends in an all-reduce of so many bytes."""
        return 2 * (self.world_size - 1) * num_bytes // self.world_size


def share_of_mean(own: int, all_sizes: Sequence[int]) -> float:
    """What the gradient of a mean over `own` samples counts in that of the mean over all processes' samples."""
    return own / max(1, sum(all_sizes))
