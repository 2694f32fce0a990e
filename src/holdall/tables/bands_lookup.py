"""Lookup of one id per bag in several tables of bands at once, on the CPU.

Ids are sorted into bands by comparisons, not by their order. Rows of one kind are then made together, whatever band and
table they are in: codes of one number of bits are dequantised in one operation, and codewords of one codebook are
gathered in one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from holdall.tables.code_updates import collect_jointly
from holdall.tables.codes import CodesTable
from holdall.tables.dense import DenseTable
from holdall.tables.fixed_grid import FixedGridTable
from holdall.tables.hashed import HashedTable
from holdall.tables.mixed_dimension import MixedDimensionTable
from holdall.tables.quantized import QuantizedTable, StochasticRoundingTable
from holdall.tables.rounding import unpack_pairs
from holdall.tables.shared import SharedTable
from holdall.tables.table import Table

CHEAP = (DenseTable, HashedTable, SharedTable, CodesTable, QuantizedTable)
"""Tables whose rows cost no more to make than to copy, so that finding distinct ids would cost more than it saves."""

Lookup = tuple[Any, Tensor]
"""Table of a band, and rows of it that are looked up."""


def rows_of_bands(tables: Sequence[Any], ids: Tensor) -> Tensor:
    """Rows [T, L, dim] of ids [T, L] in T `BandsTable`s of one dim and type; their bands are `CHEAP` ones."""
    kinds: dict[Hashable, list[Lookup]] = {}
    places: dict[Hashable, list[Tensor]] = {}
    lines = torch.arange(1, len(tables)) * ids.shape[1]
    for level, bands in enumerate(_levels(tables)):
        starts, ends = torch.tensor([[start for start, _ in bands], [end for _, end in bands]])[:, :, None]
        inside = ids < ends if level == 0 else (ids >= starts) & (ids < ends)
        found = inside.reshape(-1).nonzero()[:, 0]
        local = (ids - starts if level else ids).reshape(-1).index_select(0, found)
        cuts = [0, *torch.searchsorted(found, lines).tolist(), len(found)]
        for table, first, last in zip(tables, cuts[:-1], cuts[1:], strict=True):
            if first < last:
                part = table.parts[level]
                kind = _kind(part)
                kinds.setdefault(kind, []).append((part, local[first:last]))
                places.setdefault(kind, []).append(found[first:last])
    if not kinds:
        return torch.stack([table._rows(line) for table, line in zip(tables, ids, strict=True)])
    dtype = tables[0].row_dtype
    rows = [_rows_of_kind(lookups).to(dtype) for lookups in kinds.values()]
    order = torch.cat([place for kind in kinds for place in places[kind]])
    return _Placed.apply(torch.cat(rows), order).view(*ids.shape, -1)


def _levels(tables: Sequence[Any]) -> list[list[tuple[int, int]]]:
    """(start, end) of the first band of every table, of the second, ...; an empty range where a table has fewer."""
    depth = max(len(table.bands) for table in tables)
    empty = (0, 0)
    return [
        [(table.bands[level].start, table.bands[level].end) if level < len(table.bands) else empty for table in tables]
        for level in range(depth)
    ]


def _kind(table: Table) -> Hashable:
    """Key of the tables whose rows are made together."""
    if isinstance(table, QuantizedTable):
        return (type(table), table.method.bits, table.grid.dtype)
    if isinstance(table, CodesTable):
        return (CodesTable, id(table.codebook.words), table.method.parts, table.sparse)
    if isinstance(table, MixedDimensionTable):
        return (MixedDimensionTable, _kind(table.narrow), table.narrow.dim)
    return id(table)


def is_cheap(table: Table) -> bool:
    """Whether rows of a table are best made for each lookup: see `CHEAP`."""
    return isinstance(table, CHEAP) or (isinstance(table, MixedDimensionTable) and table.method.trainable)


def _rows_of_kind(lookups: Sequence[Lookup]) -> Tensor:
    first = lookups[0][0]
    if isinstance(first, MixedDimensionTable):
        narrow = _rows_of_kind([(table.narrow, ids) for table, ids in lookups])
        parts = narrow.split([ids.numel() for _, ids in lookups])
        return torch.cat([part @ table.projection for part, (table, _) in zip(parts, lookups, strict=True)])
    if isinstance(first, QuantizedTable):
        codes = torch.cat([table.codes.index_select(0, ids) for table, ids in lookups])
        if isinstance(first, FixedGridTable):
            grid = first.grid
        else:
            grid = torch.cat([table.grid.index_select(0, ids) for table, ids in lookups])
        if first.method.bits == 4:
            codes = unpack_pairs(codes, first.dim)
        zero, step = (grid if first.method.scales is None else grid.to(first.row_dtype)).split(1, dim=1)
        rows = codes.to(step.dtype).mul_(step).add_(zero)  # `dequantize` in place: large temporaries cost page faults
        if isinstance(first, StochasticRoundingTable) and torch.is_grad_enabled():
            rows.requires_grad_().register_hook(lambda gradient: collect_jointly(lookups, gradient))
        return rows
    if isinstance(first, CodesTable):
        codes = torch.cat([table.codes.index_select(0, ids) for table, ids in lookups])
        return first.rows_of_codes(codes)
    return torch.cat([table._rows(ids) for table, ids in lookups])


class _Placed(torch.autograd.Function):
    """Rows [L, dim] with row i of the input at place `order[i]`, a permutation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return rows.index_select(0, inverse)  # `index_copy_` of rows took six times as long

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None
