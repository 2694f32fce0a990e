"""Tensors of which a checkpoint saves some rows only, and loading of those rows into any kind of tensor.

Of a lazy tensor `X` the touched rows are saved, of a `HotPart` the named ones: as two ordinary tensors, `X.rows` [T]
and `X.values` [T, ...], and an entry in the manifest with the type and shape of `X` and the initial values of its other
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdall.checkpoint.protocols import TensorByRows
from holdall.common.decode import Count
from holdall.common.errors import CheckpointError
from holdall.tables.initial_rows import fill_with_initial_rows

ROWS, VALUES = ".rows", ".values"
CHUNK_BYTES = 64 << 20
"""Bytes of rows that are written into a target at a time: it may need several copies of them."""


@dataclass(frozen=True)
class PartialEntry:
    """Manifest entry of a tensor of which only some rows are saved."""

    ignores_unknown: ClassVar[bool] = True

    dtype: str
    shape: tuple[Count, ...]
    initial: dict[str, int | float] | None
    """Initial values of the other rows; None when those rows are in another checkpoint."""


@dataclass(frozen=True)
class HotPart:
    """Rows of a tensor that a checkpoint of hot rows holds. They are distinct, in any order."""

    tensor: Tensor | TensorByRows
    rows: Tensor
    """[T] int64."""


Saved = Tensor | TensorByRows | HotPart
"""Kinds of tensors that a checkpoint can save; it can be loaded into the first two."""


@dataclass(frozen=True)
class SelectedRows:
    """Values of some rows of a tensor, read a piece at a time when a shard is written."""

    tensor: Tensor | TensorByRows
    rows: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows.numel(), *self.tensor.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def piece(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of these, on the host, in memory of their own."""
        rows = self.rows[start:stop]
        if isinstance(self.tensor, Tensor):
            return self.tensor.detach().index_select(0, rows.to(self.tensor.device)).cpu()
        return self.tensor.read(rows)

    def copied(self, start: int, stop: int, buffer: Tensor, chunk: int) -> Tensor | SelectedRows:
        """Values `start` to `stop`, with everything that training changes copied to `buffer` [stop - start, ...]."""
        # A chunk at a time: reading allocates, and small blocks are reused from chunk to chunk.
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            values = (
                self.piece(first, last)
                if isinstance(self.tensor, Tensor)
                else self.tensor.read_raw(self.rows[first:last])
            )
            buffer[first - start : last - start].copy_(values)
        return buffer if isinstance(self.tensor, Tensor) else CopiedRows(self.tensor, self.rows[start:stop], buffer)


@dataclass(frozen=True)
class CopiedRows(SelectedRows):
    """Rows that were copied raw; they are decoded when they are written."""

    tensor: TensorByRows
    raw: Tensor

    def piece(self, start: int, stop: int) -> Tensor:
        return self.tensor.decode_(self.rows[start:stop], self.raw[start:stop].clone())


def stored_names(entries: Iterable[str]) -> set[str]:
    """Names of the tensors that are stored in the place of lazy ones."""
    return {name + suffix for name in entries for suffix in (ROWS, VALUES)}


def reset_targets(
    targets: Mapping[str, Tensor | TensorByRows], entries: Mapping[str, PartialEntry], where: str
) -> None:
    """Set targets to the initial values of the saved tensors, before rows are copied into them."""
    lazy = {name: target for name, target in targets.items() if not isinstance(target, Tensor)}
    for name, target in lazy.items():
        entry = entries.get(name)
        if entry is not None and entry.initial != target.initial:
            raise CheckpointError(
                f"{where}: the untouched rows of '{name}' have initial values {entry.initial} there and "
                f"{target.initial} here: train with the same --seed, model and data"
            )
    for target in lazy.values():
        target.reset()
    for target in lazy.values():  # after all of them were reset: weights and optimizer state share the marks
        target.clear_touched()
    for name, entry in entries.items():
        if name in targets and name not in lazy:
            ordinary = targets[name]
            assert isinstance(ordinary, Tensor)
            assert entry.initial is not None
            with torch.no_grad():
                _fill_initial(ordinary, entry.initial)


def _fill_initial(tensor: Tensor, initial: Mapping[str, Any]) -> None:
    """Give an ordinary tensor the initial values of a lazy one."""
    if initial["std"] == 0:
        tensor.zero_()
    else:
        fill_with_initial_rows(tensor, initial["seed"], initial["std"])


def write_rows(target: Tensor | TensorByRows, rows: Tensor, values: Tensor) -> None:
    """Write rows into a target of either kind, a chunk at a time; a sharded one ignores the rows of other processes."""
    row_bytes = max(1, values.nbytes // max(1, rows.numel()))
    per_chunk = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, rows.numel(), per_chunk):
        some, their = rows[start : start + per_chunk], values[start : start + per_chunk]
        if isinstance(target, Tensor):
            target.detach().index_copy_(0, some.to(target.device), their.to(target.device))
        else:
            target.write(some, their)
