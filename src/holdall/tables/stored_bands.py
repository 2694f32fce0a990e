"""Tables of bands as the lookup kernel reads them, and the gradients of what their bands store.

A table of one of the methods of a band counts as one band. See `kernels.bands`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from holdall.kernels.bands import FLOATS, StoredBand
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

    Gradients are what autograd gives for `Table.forward` on a GPU: sparse ones have a row for each lookup. A band that
    collects its gradients gets them at once. Nothing synchronizes.
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
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.tensors]
        sparse = [False for _ in self.tensors]
        for table, ids, grad in lookups:
            for part, local, its_grad in self._by_part(table, ids, grad.to(table.row_dtype)):
                if isinstance(part, StochasticRoundingTable):
                    part.collect(local, its_grad)
                for name in part.row_parameters():
                    position = self._positions[part, name]
                    places, rows = _stored_rows(part, local, its_grad)
                    found[position].append((places, rows.to(self.tensors[position].dtype)))
                    sparse[position] = part.sparse
        each = zip(self.tensors, found, sparse, strict=True)
        return [_sum(parameter, parts, is_sparse) if parts else None for parameter, parts, is_sparse in each]

    def _by_part(self, table: Table, ids: Tensor, grad: Tensor) -> Iterator[tuple[Table, Tensor, Tensor]]:
        """(table, its ids, gradient) of the bands that learn."""
        learning = {part for _, part in _parts(table) if self._learns(part)}
        if not isinstance(table, BandsTable):
            yield from ((part, ids, grad) for part in learning)
        elif learning:
            for part, inside, local in table.by_band(ids):
                if part in learning:
                    yield part, local, torch.where(inside[:, None], grad, 0)

    def _learns(self, part: Table) -> bool:
        wanted = (self.tensors[self._positions[part, name]].requires_grad for name in part.row_parameters())
        return isinstance(part, StochasticRoundingTable) or any(wanted)


def _stored_rows(part: Table, ids: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Stored rows that the rows of `ids` are made of, and the gradient of each."""
    if isinstance(part, SharedTable):
        return part.places(ids), grad
    if isinstance(part, CodesTable):
        places = part.places(part.codes.index_select(0, ids))
        return places.reshape(-1), grad[:, None].expand(-1, places.shape[1], -1).reshape(-1, grad.shape[1])
    return ids, grad


def _sum(parameter: Tensor, parts: Sequence[tuple[Tensor, Tensor]], sparse: bool) -> Tensor:
    places, rows = (torch.cat(each) if len(each) > 1 else each[0] for each in zip(*parts, strict=True))
    if sparse:
        return torch.sparse_coo_tensor(places[None], rows, parameter.shape, check_invariants=False)
    return torch.zeros_like(parameter).index_add_(0, places, rows)


def _parts(table: Table) -> Iterator[tuple[int, Table]]:
    """(start, table) of each band."""
    if isinstance(table, BandsTable):
        yield from ((band.start, part) for band, part in zip(table.bands, table.parts, strict=True))
    else:
        yield 0, table
