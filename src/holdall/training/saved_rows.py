"""Tensors of a checkpoint of which only the touched rows are saved, and the way back into any kind of tensor.

Lazy tensor `X` is saved as two ordinary ones, `X.rows` [T] and `X.values` [T, ...], and an entry in the manifest that
says what `X` is and how its other rows begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdall.errors import CheckpointError
from holdall.tiers.lazy_tensor import LazyTensor, fill_initial

ROWS, VALUES = ".rows", ".values"


@dataclass(frozen=True)
class LazyEntry:
    """What the manifest says of a tensor of which only the touched rows are saved."""

    dtype: str
    shape: tuple[int, ...]
    initial: dict[str, Any]


@dataclass(frozen=True)
class TouchedValues:
    """The values of touched rows, read a piece at a time when they are written: what a shard needs of a tensor."""

    lazy: LazyTensor
    rows: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows.numel(), *self.lazy.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.lazy.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def dim(self) -> int:
        return len(self.shape)

    def piece(self, start: int, stop: int) -> Tensor:
        return self.lazy.read(self.rows[start:stop])


def expanded(
    tensors: Mapping[str, Tensor | LazyTensor],
) -> tuple[dict[str, Tensor | TouchedValues], dict[str, LazyEntry]]:
    """Lazy tensors as the two that are saved for each, and their entries."""
    plain: dict[str, Tensor | TouchedValues] = {}
    entries = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, LazyTensor):
            rows = tensor.touched()
            plain[name + ROWS], plain[name + VALUES] = rows, TouchedValues(tensor, rows)
            entries[name] = LazyEntry(str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.initial)
        else:
            plain[name] = tensor
    return plain, entries


def helpers(entries: Iterable[str]) -> set[str]:
    """Names of the tensors that are saved in the place of lazy ones."""
    return {name + suffix for name in entries for suffix in (ROWS, VALUES)}


def start_anew(targets: Mapping[str, Tensor | LazyTensor], entries: Mapping[str, LazyEntry], where: str) -> None:
    """Before rows are copied into them: let lazy targets begin as saved ones do, and ordinary ones like them."""
    lazy = {name: target for name, target in targets.items() if isinstance(target, LazyTensor)}
    for name, target in lazy.items():
        entry = entries.get(name)
        if entry is not None and entry.initial != target.initial:
            raise CheckpointError(
                f"{where}: the rows of '{name}' that were never touched begin with {entry.initial} there and with "
                f"{target.initial} here: train with the same --seed, model and data"
            )
        target.reset()
    for target in lazy.values():  # after all of them: weights and optimizer state share it
        target.all_touched[target.start : target.start + target.num_rows] = False
    for name, entry in entries.items():
        if name in targets and name not in lazy:
            ordinary = targets[name]
            assert isinstance(ordinary, Tensor)
            with torch.no_grad():
                fill_initial(ordinary, entry.initial)


def put_rows(target: Tensor | LazyTensor, rows: Tensor, values: Tensor) -> None:
    """Set rows of a target of either kind."""
    if isinstance(target, LazyTensor):
        target.write(rows, values)
    else:
        target.detach().index_copy_(0, rows.to(target.device), values.to(target.device))
