"""Tables of bands as the lookup kernel reads them, and the gradients of what their bands store.

A table of one of the methods of a band counts as one band. See `kernels.bands`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from holdall.kernels.bands import FLOATS, StoredBand
from holdall.kernels.row_gradient import RowGradient
from holdall.tables.bands import BandsTable
from holdall.tables.codes import CodesTable
from holdall.tables.dense import DenseTable
from holdall.tables.quantized import QuantizedTable, StochasticRoundingTable
from holdall.tables.shared import SharedTable
from holdall.tables.table import Table


def stored_bands(table: Table) -> list[StoredBand] | None:
    """Bands of a table with the tensors that they have now; None where the kernel does not know a band's method."""
    if table.padding_idx is not None or table.row_dtype not in FLOATS:
        return None
    found = []
    for start, part in _parts(table):
        end = start + part.num_rows
        if type(part) is DenseTable:
            found.append(StoredBand(start, end, "rows", part.weight))
        elif isinstance(part, SharedTable):
            found.append(StoredBand(start, end, "rows", part.stored))
        elif isinstance(part, QuantizedTable):
            found.append(StoredBand(start, end, "grid", part.codes, part.grid, part.method.bits))
        elif isinstance(part, CodesTable):
            method, book = part.method, part.codebook
            found.append(
                StoredBand(start, end, "words", part.codes, book.words, method.bits, method.parts, book.num_words)
            )
        else:
            return None
    return found


def tensor_places(table: Table) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the modules of a table have the tensors of its bands: they change when a table moves or is replaced."""
    for module in table.modules():
        for tensors in (module._parameters, module._buffers):
            yield from ((tensors, name) for name in tensors)


def collects_gradients(table: Table) -> bool:
    """Whether a band of the table stores its gradients itself, without a parameter."""
    return any(isinstance(part, StochasticRoundingTable) for _, part in _parts(table))


class BandParameters:
    """Parameters of several tables in bands as they are now, each once, and their gradients from those of rows.

    Gradients are what autograd gives for `Table.forward` on a GPU: sparse ones name the same rows. Where a batch has
    more lookups than a parameter has rows, they are summed by row at once, in float32 and, on a GPU, in any order. A
    band that collects its gradients gets them at once. Nothing synchronizes.
    """

    def __init__(self, tables: Sequence[Table]):
        self.tensors: list[Tensor] = []
        self._positions: dict[tuple[Table, str], int] = {}
        known: dict[int, int] = {}
        for _, part in (each for table in tables for each in _parts(table)):
            for name, parameter in part.row_parameters().items():
                if id(parameter) not in known:
                    known[id(parameter)] = len(self.tensors)
                    self.tensors.append(parameter)
                self._positions[part, name] = known[id(parameter)]

    def gradients(self, lookups: Iterable[tuple[Table, Tensor, Tensor]]) -> list[Tensor | None]:
        """Gradient of each tensor, for (table, int64 ids [B], gradient [B, dim] of its rows), B at least 1."""
        found: dict[int, _RowSums | _RowList] = {}
        for table, ids, grad in lookups:
            grad = grad.to(table.row_dtype)
            for part, inside, local in self._learning_parts(table, ids):
                rows = grad if inside is None else torch.where(inside[:, None], grad, 0)
                if isinstance(part, StochasticRoundingTable):
                    part.collect(RowGradient(local, rows))
                for name in part.row_parameters():
                    position = self._positions[part, name]
                    if position not in found:
                        parameter = self.tensors[position]
                        summed = not part.sparse or parameter.shape[0] <= ids.numel()
                        found[position] = _RowSums(parameter, part.sparse) if summed else _RowList(parameter)
                    for places in _stored_rows(part, local):
                        found[position].add(places, inside, rows)
        return [found[i].gradient() if i in found else None for i in range(len(self.tensors))]

    def _learning_parts(self, table: Table, ids: Tensor) -> Iterator[tuple[Table, Tensor | None, Tensor]]:
        """Table of each band that learns, whether each id is in it (None: all are), and a row of it for each id."""
        learning = {part for _, part in _parts(table) if self._learns(part)}
        if not isinstance(table, BandsTable):
            yield from ((part, None, ids) for part in learning)
        elif learning:
            yield from (each for each in table.by_band(ids) if each[0] in learning)

    def _learns(self, part: Table) -> bool:
        wanted = (self.tensors[self._positions[part, name]].requires_grad for name in part.row_parameters())
        return isinstance(part, StochasticRoundingTable) or any(wanted)


class _RowList:
    """Sparse gradient with a row for each lookup."""

    def __init__(self, parameter: Tensor):
        self.parameter = parameter
        self.places: list[Tensor] = []
        self.rows: list[Tensor] = []

    def add(self, places: Tensor, inside: Tensor | None, rows: Tensor) -> None:
        self.places.append(places)
        self.rows.append(rows.to(self.parameter.dtype))

    def gradient(self) -> Tensor:
        return _sparse(torch.cat(self.places), torch.cat(self.rows), self.parameter)


class _RowSums:
    """Gradient of a parameter with few rows, summed by row."""

    def __init__(self, parameter: Tensor, sparse: bool):
        self.parameter, self.sparse = parameter, sparse
        self.sums = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        self.touched = torch.zeros(parameter.shape[0], dtype=torch.bool, device=parameter.device)
        self.every = torch.arange(parameter.shape[0], device=parameter.device)

    def add(self, places: Tensor, inside: Tensor | None, rows: Tensor) -> None:
        self.touched.index_fill_(0, places, True)
        if inside is not None:  # zeros are spread: additions to one row would wait for each other
            spread = torch.arange(places.numel(), device=places.device) % len(self.every)
            places = torch.where(inside, places, spread)
        self.sums.index_add_(0, places, rows.float())

    def gradient(self) -> Tensor:
        """The sums; sparse ones name touched rows alone, one of them again, with zeros, in the place of each other."""
        sums = self.sums.to(self.parameter.dtype)
        if not self.sparse:
            return sums
        return _sparse(torch.where(self.touched, self.every, self.touched.int().argmax()), sums, self.parameter)


def _sparse(places: Tensor, rows: Tensor, parameter: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(places[None], rows, parameter.shape, check_invariants=False)


def _stored_rows(part: Table, ids: Tensor) -> Sequence[Tensor]:
    """Stored rows that are added up to the rows of `ids`: one, or one for each code."""
    if isinstance(part, SharedTable):
        return [part.places(ids)]
    if isinstance(part, CodesTable):
        return part.places(part.codes.index_select(0, ids)).unbind(1)
    return [ids]


def _parts(table: Table) -> Iterator[tuple[int, Table]]:
    """(start, table) of each band."""
    if isinstance(table, BandsTable):
        yield from ((band.start, part) for band, part in zip(table.bands, table.parts, strict=True))
    else:
        yield 0, table
