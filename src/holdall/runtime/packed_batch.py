"""Batch in one block of memory: one copy to a GPU, and one into the fixed buffers of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from holdall.data.batch import Batch, Ids

ALIGNED = 256
"""Alignment of every tensor in the block, in bytes."""

TensorLayout: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int] | None
"""Type, shape, strides and storage offset (in elements) of a tensor in the block; None if the batch has none."""


@dataclass(frozen=True)
class PackedBatch(Batch):
    """Batch whose tensors are views of `memory`."""

    memory: Tensor = field(kw_only=True)
    """[bytes] uint8."""
    layouts: tuple[TensorLayout, ...] = field(kw_only=True)
    """Layouts of dense values, ids, offsets and weights of ids, labels, and weights of samples."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        return _views(self.memory.to(device, non_blocking=non_blocking), self.layouts, self.ids.num_features)

    def to_memory(self, memory: Tensor, non_blocking: bool = False) -> PackedBatch:
        """Copy into the first bytes of `memory`."""
        taken = memory[: self.memory.numel()]
        return _views(taken.copy_(self.memory, non_blocking=non_blocking), self.layouts, self.ids.num_features)

    def empty_like(self) -> PackedBatch:
        return _views(torch.empty_like(self.memory), self.layouts, self.ids.num_features)

    def fill(self, other: Batch) -> None:
        if isinstance(other, PackedBatch) and other.layouts == self.layouts:
            self.memory.copy_(other.memory)
        else:
            super().fill(other)


def packed(batch: Batch, *, pin: bool = False) -> PackedBatch:
    """Copy in one block; with `pin`, in pinned memory, from which a GPU copies asynchronously."""
    layouts: list[TensorLayout] = []
    size = 0
    tensors = (batch.dense, batch.ids.values, batch.ids.offsets, batch.ids.weights, batch.label, batch.weight)
    for tensor in tensors:
        if tensor is None:
            layouts.append(None)
            continue
        strides = torch.empty_like(tensor, device="meta").stride()  # kept where they are dense
        layouts.append((tensor.dtype, tuple(tensor.shape), strides, size // tensor.element_size()))
        size += -(-tensor.nbytes // ALIGNED) * ALIGNED
    made = _views(torch.empty(size, dtype=torch.uint8, pin_memory=pin), tuple(layouts), batch.ids.num_features)
    made.fill(batch)
    return made


def _views(memory: Tensor, layouts: tuple[TensorLayout, ...], num_features: int) -> PackedBatch:
    def view(layout: TensorLayout) -> Tensor | None:
        return None if layout is None else memory.view(layout[0]).as_strided(*layout[1:])

    dense, values, offsets, weights, label, weight = map(view, layouts)
    assert dense is not None
    assert values is not None
    assert label is not None
    ids = Ids(values, offsets, num_features, weights)
    return PackedBatch(dense, ids, label, weight, memory=memory, layouts=layouts)


def checked_and_pinned(check: Callable[[Batch], None]) -> Callable[[Batch], PackedBatch]:
    """Function that checks a batch and packs it into pinned memory."""

    def make(batch: Batch) -> PackedBatch:
        check(batch)
        return packed(batch, pin=True)

    return make
