"""The device's memory of a tiered pack: hot rows, then rooms of one size; how large, and the same with larger ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def buffers_for(depth: int) -> int:
    """Staging buffers that a pipeline needs to fetch `depth` steps ahead."""
    return 2 * depth + 1


def with_spare(count: int) -> int:
    """Places to make for so many: a quarter more, so that they seldom have to grow."""
    return count + count // 4 + 16


def grown(tensors: list[Tensor], num_hot: int, num_buffers: int, sizes: Sequence[int]) -> list[Tensor]:
    """The same tensors with rooms of `sizes[1]` rows instead of `sizes[0]`; `tensors` is emptied.

    One after the other, and on a GPU through the host: the device never holds one twice. Nobody else may hold them.
    """
    found = []
    while tensors:
        device, tensor = tensors[0].device, tensors.pop(0).cpu()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # else the allocator would keep the old one's memory, which is too small
        shape = (num_hot + num_buffers * sizes[1], *tensor.shape[1:])
        larger = torch.zeros(shape, dtype=tensor.dtype, device=device)
        larger[:num_hot].copy_(tensor[:num_hot])
        for room in range(num_buffers if sizes[0] else 0):
            before, after = num_hot + room * sizes[0], num_hot + room * sizes[1]
            larger[after : after + sizes[0]].copy_(tensor[before : before + sizes[0]])
        found.append(larger)
    return found
