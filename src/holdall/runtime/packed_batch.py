"""A batch in one piece of memory: it goes to a GPU in one copy, and to where a CUDA graph reads it in another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from holdall.data.batch import Batch, Ids

ALIGNED = 256
"""Bytes that every tensor starts at a multiple of."""

Part: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int] | None
"""Type, shape, strides and first number of a tensor in the memory, or that there is none."""


@dataclass(frozen=True)
class PackedBatch(Batch):
    """A batch whose tensors are views of `memory`."""

    memory: Tensor
    """[bytes] uint8."""
    parts: tuple[Part, ...]
    """Where dense values, ids, their offsets, their weights and labels are."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        return _views(self.memory.to(device, non_blocking=non_blocking), self.parts, self.ids.num_features)

    def to_memory(self, memory: Tensor, non_blocking: bool = False) -> PackedBatch:
        """A copy in memory that has place for it."""
        taken = memory[: self.memory.numel()]
        return _views(taken.copy_(self.memory, non_blocking=non_blocking), self.parts, self.ids.num_features)

    def empty_like(self) -> PackedBatch:
        return _views(torch.empty_like(self.memory), self.parts, self.ids.num_features)

    def fill(self, other: Batch) -> None:
        if isinstance(other, PackedBatch) and other.parts == self.parts:
            self.memory.copy_(other.memory)
        else:
            super().fill(other)


def packed(batch: Batch, *, pin: bool = False) -> PackedBatch:
    """A copy in one piece; with `pin`, in memory that a GPU can read while the host goes on."""
    parts: list[Part] = []
    size = 0
    tensors = (batch.dense, batch.ids.values, batch.ids.offsets, batch.ids.weights, batch.label)
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
            continue
        strides = torch.empty_like(tensor, device="meta").stride()  # its own, where it has no gaps
        parts.append((tensor.dtype, tuple(tensor.shape), strides, size // tensor.element_size()))
        size += -(-tensor.nbytes // ALIGNED) * ALIGNED
    made = _views(torch.empty(size, dtype=torch.uint8, pin_memory=pin), tuple(parts), batch.ids.num_features)
    made.fill(batch)
    return made


def _views(memory: Tensor, parts: tuple[Part, ...], num_features: int) -> PackedBatch:
    def view(part: Part) -> Tensor | None:
        return None if part is None else memory.view(part[0]).as_strided(*part[1:])

    dense, values, offsets, weights, label = map(view, parts)
    assert dense is not None
    assert values is not None
    assert label is not None
    return PackedBatch(dense, Ids(values, offsets, num_features, weights), label, memory, parts)


def checked_and_pinned(check: Callable[[Batch], None]) -> Callable[[Batch], PackedBatch]:
    """What makes a batch ready for a GPU: looks at it, and puts it where the GPU can copy it from."""

    def make(batch: Batch) -> PackedBatch:
        check(batch)
        return packed(batch, pin=True)

    return make
