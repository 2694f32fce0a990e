"""Tables of bands as the lookup kernel reads them, and the gradients of what their bands store.

A table of one of the methods of a band counts as one band. See `kernels.bands`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdall.kernels.bands import FLOATS, NOTHING, NUMBERED, SUMMED, StoredBand
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
        elif isinstance(part, QuantizedTable) and len(part.grid) == part.num_rows:
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


Lookup = tuple[Table, int, int]
"""Table, line of the ids and column of the vectors."""


class BandLearning(NamedTuple):
    """What the bands of several tables learn by one kernel: see `kernels.band_gradients_triton`."""

    lines: list[tuple[int, int]]
    """Mode and first number of each band, table by table."""
    coded: dict[StochasticRoundingTable, int]
    """First number of the rows of each table that trains as codes."""
    num_coded: int
    summed: dict[int, int]
    """First of the rows in which a parameter's gradient is summed, by the parameter's position."""
    num_summed: int


class BandParameters:
    """Parameters of several tables in bands as they are now, each once, and their gradients from those of rows.

    Gradients are what autograd gives for `Table.forward` on a GPU: sparse ones name the same rows. Where a batch has
    more lookups than a parameter has rows, they are summed by row at once, in float32 and, on a GPU, in any order. A
    band that collects its gradients gets its share of those of all tables. Nothing synchronizes.
    """

    def __init__(self, tables: Sequence[Table]):
        self.tensors: list[Tensor] = []
        self._sparse: list[bool] = []
        self._positions: dict[tuple[Table, str], int] = {}
        known: dict[int, int] = {}
        for _, part in (each for table in tables for each in _parts(table)):
            for name, parameter in part.row_parameters().items():
                if id(parameter) not in known:
                    known[id(parameter)] = len(self.tensors)
                    self.tensors.append(parameter)
                    self._sparse.append(part.sparse)
                self._positions[part, name] = known[id(parameter)]

    def learning(self, tables: Sequence[Table], num_lookups: int) -> BandLearning:
        """What bands of `tables`, in this order, learn from batches of `num_lookups` lookups of each."""
        lines: list[tuple[int, int]] = []
        coded: dict[StochasticRoundingTable, int] = {}
        summed: dict[int, int] = {}
        num_coded = num_summed = 0
        for _, part in (each for table in tables for each in _parts(table)):
            line = (NOTHING, 0)
            if isinstance(part, StochasticRoundingTable):
                if part not in coded:
                    coded[part] = num_coded
                    num_coded += part.num_rows
                line = (NUMBERED, coded[part])
            for position in self._learned(part):
                if self._is_summed(position, num_lookups):
                    if position not in summed:
                        summed[position] = num_summed
                        num_summed += self.tensors[position].shape[0]
                    line = (SUMMED, summed[position])
            lines.append(line)
        return BandLearning(lines, coded, num_coded, summed, num_summed)

    def _learned(self, part: Table) -> list[int]:
        """Positions of the parameters of a band that are not frozen."""
        positions = (self._positions[part, name] for name in part.row_parameters())
        return [position for position in positions if self.tensors[position].requires_grad]

    def _is_summed(self, position: int, num_lookups: int) -> bool:
        return not self._sparse[position] or self.tensors[position].shape[0] <= num_lookups

    def gradients(
        self,
        learning: BandLearning,
        sums: Tensor,
        touched: Tensor,
        lookups: Sequence[Lookup],
        values: Tensor,
        grad: Tensor,
    ) -> list[Tensor | None]:
        """Gradient of each tensor: from the `sums` [R, dim] of rows that were `touched` [R], or by lookup.

        `grad` [B, F', dim] is the gradient of the rows of ids `values` [F, B].
        """
        found: list[Tensor | None] = [None] * len(self.tensors)
        for position, first in learning.summed.items():
            place = slice(first, first + self.tensors[position].shape[0])
            found[position] = self._from_sums(position, sums[place], touched[place])
        listed: dict[int, _RowList] = {}
        for table, source, target in lookups:
            parts = [part for _, part in _parts(table)]
            if any(position not in learning.summed for part in parts for position in self._learned(part)):
                ids = values[source].long()
                self._list(learning, table, ids, grad[:, target].to(table.row_dtype), listed)
        for position, rows in listed.items():
            found[position] = rows.gradient()
        return found

    def _from_sums(self, position: int, sums: Tensor, touched: Tensor) -> Tensor:
        """The sums; sparse ones name touched rows alone, one of them again, with zeros, in the place of each other."""
        parameter = self.tensors[position]
        sums = sums.to(parameter.dtype)
        if not self._sparse[position]:
            return sums
        every = torch.arange(len(sums), device=sums.device)
        return _sparse(torch.where(touched, every, touched.int().argmax()), sums, parameter)

    def _list(
        self, learning: BandLearning, table: Table, ids: Tensor, grad: Tensor, listed: dict[int, _RowList]
    ) -> None:
        """Collect the gradients of a table whose parameters have more rows than the batch has lookups."""
        bands = table.by_band(ids) if isinstance(table, BandsTable) else [(table, None, ids)]
        for part, inside, local in bands:
            for position in self._learned(part):
                if position not in learning.summed:
                    rows = grad if inside is None else torch.where(inside[:, None], grad, 0)
                    to = listed.setdefault(position, _RowList(self.tensors[position]))
                    for places in _stored_rows(part, local):
                        to.add(places, rows)


class _RowList:
    """Sparse gradient with a row for each lookup."""

    def __init__(self, parameter: Tensor):
        self.parameter = parameter
        self.places: list[Tensor] = []
        self.rows: list[Tensor] = []

    def add(self, places: Tensor, rows: Tensor) -> None:
        self.places.append(places)
        self.rows.append(rows.to(self.parameter.dtype))

    def gradient(self) -> Tensor:
        return _sparse(torch.cat(self.places), torch.cat(self.rows), self.parameter)


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
