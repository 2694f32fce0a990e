"""Layout of a tiered pack's device memory: hot rows, then staging buffers of one size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def buffers_for(depth: int) -> int:
    """Staging buffers that a pipeline needs to fetch `depth` steps ahead."""
    return 2 * depth + 1


def with_spare(count: int) -> int:
    """Capacity to allocate for so many: a quarter more, so that it seldom has to grow."""
    return count + count // 4 + 16


@dataclass
class Staging:
    """Rows of the device's tensors: `num_hot` hot rows, then the staging buffers, `buffer_rows` each."""

    num_hot: int
    num_buffers: int
    """Buffers for steps; one more follows them, for lookups outside of steps."""
    buffer_rows: int = 0

    @property
    def outside_steps(self) -> int:
        """The buffer for lookups outside of steps."""
        return self.num_buffers

    def start(self, buffer: int) -> int:
        """The first row of a buffer."""
        return self.num_hot + buffer * self.buffer_rows

    def moved_to(self, buffer: int, rows: Tensor) -> Tensor:
        """Row numbers with those of the first buffer replaced by the same slots of another."""
        return rows if buffer == 0 else rows + (rows >= self.num_hot) * (buffer * self.buffer_rows)

    def grow(self, num_rows: int, tensors: list[Tensor]) -> list[Tensor]:
        """Larger copies of `tensors`, which is emptied, with buffers for `num_rows` rows and some to spare.

        One tensor after the other, and on a GPU through the host, so that the device never has one twice. The caller
        must keep no other reference to them.
        """
        old_rows, self.buffer_rows = self.buffer_rows, with_spare(num_rows)
        found = []
        while tensors:
            device, tensor = tensors[0].device, tensors.pop(0).cpu()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # else the allocator keeps the old tensor's memory, which is too small
            shape = (self.start(self.num_buffers + 1), *tensor.shape[1:])
            larger = torch.zeros(shape, dtype=tensor.dtype, device=device)
            larger[: self.num_hot].copy_(tensor[: self.num_hot])
            for buffer in range(self.num_buffers + 1 if old_rows else 0):
                old, new = self.num_hot + buffer * old_rows, self.start(buffer)
                larger[new : new + old_rows].copy_(tensor[old : old + old_rows])
            found.append(larger)
        return found
