"""Tensors of a checkpoint of which only some rows are saved, and the way back into any kind of tensor.

Of a lazy tensor `X` the touched rows are saved, of a `HotPart` the named ones: as two ordinary tensors, `X.rows` [T]
and `X.values` [T, ...], and an entry in the manifest that says what `X` is and how its other rows begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdall.checkpoint.protocols import TensorByRows
from holdall.common.errors import CheckpointError
from holdall.tables.initial_rows import fill_with_initial_rows

ROWS, VALUES = ".rows", ".values"
CHUNK_BYTES = 64 << 20
"""Rows are put into their target so many bytes at a time: it may need several copies of them."""


@dataclass(frozen=True)
class LazyEntry:
    """What the manifest says of a tensor of which only some rows are saved."""

    dtype: str
    shape: tuple[int, ...]
    initial: dict[str, Any] | None
    """How the others begin; None when they are those of another checkpoint."""


@dataclass(frozen=True)
class HotPart:
    """The named rows of a tensor: what a checkpoint of hot rows holds of it. The rows are distinct, in any order."""

    tensor: Tensor | TensorByRows
    rows: Tensor
    """[T] int64."""


Saved = Tensor | TensorByRows | HotPart
"""What a checkpoint can be asked to save; of the first two kinds, also what it can be loaded into."""


@dataclass(frozen=True)
class RowsOf:
    """The values of some rows, read a piece at a time when they are written: what a shard needs of a tensor."""

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

    def copied(self, start: int, stop: int, room: Tensor, chunk: int) -> Tensor | RowsOf:
        """Values `start` to `stop`, with a copy in `room` [stop - start, ...] of all that changes of them."""
        # A chunk at a time: reading allocates, and small blocks are reused from chunk to chunk.
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            values = (
                self.piece(first, last)
                if isinstance(self.tensor, Tensor)
                else self.tensor.read_raw(self.rows[first:last])
            )
            room[first - start : last - start].copy_(values)
        return room if isinstance(self.tensor, Tensor) else CopiedRows(self.tensor, self.rows[start:stop], room)


@dataclass(frozen=True)
class CopiedRows(RowsOf):
    """Rows that were copied raw; they are decoded when they are written."""

    tensor: TensorByRows
    raw: Tensor

    def piece(self, start: int, stop: int) -> Tensor:
        return self.tensor.decode_(self.rows[start:stop], self.raw[start:stop].clone())


def helpers(entries: Iterable[str]) -> set[str]:
    """Names of the tensors that are saved in the place of lazy ones."""
    return {name + suffix for name in entries for suffix in (ROWS, VALUES)}


def start_anew(targets: Mapping[str, Tensor | TensorByRows], entries: Mapping[str, LazyEntry], where: str) -> None:
    """Before rows are copied into them: let lazy targets begin as saved ones do, and ordinary ones like them."""
    lazy = {name: target for name, target in targets.items() if not isinstance(target, Tensor)}
    for name, target in lazy.items():
        entry = entries.get(name)
        if entry is not None and entry.initial != target.initial:
            raise CheckpointError(
                f"{where}: the rows of '{name}' that were never touched begin with {entry.initial} there and with "
                f"{target.initial} here: train with the same --seed, model and data"
            )
    for target in lazy.values():
        target.reset()
    for target in lazy.values():  # after all of them: weights and optimizer state share it
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


def put_rows(target: Tensor | TensorByRows, rows: Tensor, values: Tensor) -> None:
    """Set rows of a target of either kind, a chunk at a time; one that is spread over processes takes its own."""
    row_bytes = max(1, values.nbytes // max(1, rows.numel()))
    per_chunk = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, rows.numel(), per_chunk):
        some, their = rows[start : start + per_chunk], values[start : start + per_chunk]
        if isinstance(target, Tensor):
            target.detach().index_copy_(0, some.to(target.device), their.to(target.device))
        else:
            target.write(some, their)
