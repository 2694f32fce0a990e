"""Rows in which two versions of a tensor differ, by bytes, and the replacement of such rows.

Bytes are compared, not numbers: -0.0 and 0.0 differ, and a NaN equals itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdall.serving.mapped_tensors import AnyTensor, MappedTensors, row_blocks

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Comparison:
    """Differences of new tensors to those of a file."""

    changed: dict[str, Rows]
    """Of every tensor, the rows that differ, ascending; [0] of a tensor without dimensions."""
    sha256: str
    """Hash of the file with the new tensors in the place of its own."""


def compare_tensors(file: MappedTensors, new: Mapping[str, AnyTensor]) -> Comparison:
    """Compare new tensors, of the same types and shapes, with those of a file: one pass over both, block by block."""
    digest = hashlib.sha256()
    changed: dict[str, Rows] = {}
    done = 0
    for name in sorted(file.names(), key=lambda name: file.place(name).start):
        place, own = file.place(name), file[name]
        digest.update(file.content[done : place.start].numpy().data)  # header and padding
        found = [np.empty(0, dtype=np.int64)]
        for start, block in row_blocks(new[name]):
            digest.update(block.reshape(-1).view(torch.uint8).numpy().data)
            before = own[start : start + len(block)] if own.dim() else own[None]
            found.append(_different(words(before), words(block)) + start)
        changed[name] = np.concatenate(found)
        done = place.stop
    digest.update(file.content[done:].numpy().data)
    return Comparison(changed, digest.hexdigest())


def words(rows: Tensor) -> npt.NDArray[np.generic]:
    """Contiguous rows [n, ...] as the integers [n, w], of at most 8 bytes, that their bytes are."""
    num_bytes = rows.numel() // max(1, len(rows)) * rows.element_size()
    width = next(width for width in (8, 4, 2, 1) if num_bytes % width == 0)
    flat = rows.detach().reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"i{width}").reshape(len(rows), num_bytes // width)


def _different(before: npt.NDArray[np.generic], after: npt.NDArray[np.generic]) -> Rows:
    """Rows of two arrays [n, w] that differ; far fewer than all, mostly, so that only their words are looked at."""
    places = np.flatnonzero(before != after) // max(1, before.shape[1])
    return places[np.concatenate(([True], places[1:] != places[:-1]))] if len(places) else places


def replace_rows(tensor: Tensor, rows: Rows, values: Tensor) -> None:
    """Store `values` [n, ...] at `rows` [n] of a contiguous tensor, bit for bit."""
    words(tensor)[rows] = words(values.contiguous())


class SelectedRows:
    """Some rows of a tensor, which are read when they are asked for."""

    def __init__(self, tensor: AnyTensor, rows: Rows):
        self.tensor, self.rows = tensor, torch.from_numpy(rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.tensor.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, rows: Tensor) -> Tensor:
        return read_rows(self.tensor, self.rows[rows])


class OverwrittenRows:
    """A tensor with the same content in some of its rows, which are sorted: that of another row, or zeros."""

    def __init__(self, tensor: AnyTensor, rows: Rows, source: int | None):
        self.tensor, self._rows = tensor, torch.from_numpy(rows)
        self._content = None if source is None else read_rows(tensor, torch.tensor([source]))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, rows: Tensor) -> Tensor:
        found = read_rows(self.tensor, rows)
        found[torch.isin(rows, self._rows)] = 0 if self._content is None else self._content
        return found


def read_rows(tensor: AnyTensor, rows: Tensor) -> Tensor:
    """Rows [U, ...] of a tensor, on the host, in memory of their own."""
    if isinstance(tensor, Tensor):
        return tensor.detach().index_select(0, rows.to(tensor.device)).cpu()
    return tensor.read(rows)


def num_rows(tensors: Iterable[AnyTensor]) -> int:
    """Rows of some tensors, one for each without dimensions."""
    return sum(tensor.shape[0] if tensor.shape else 1 for tensor in tensors)
