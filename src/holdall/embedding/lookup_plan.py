"""Plan of the lookups of an `EmbeddingBags`: the features that share a kernel, decided once for the tables as they are.

A `Route` is the plan for the features at some positions of a batch. It takes the first of these ways that applies:

- one pack has all of the features: one gather;
- one id per feature on a GPU: kernels of several kinds write into one output (`embedding.dense_frobenius_lookup`);
- bags of tables of one kernel group: one call pools them all;
- otherwise one gather per pack, one call per kernel group, and one call for each table that is left.

Only what depends on the batch is decided at a call: one id per feature or bags, the device, and whether Triton runs.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from holdall.common.eager import break_graph, transforms
from holdall.data.batch import Ids, features_at
from holdall.embedding.dense_frobenius_lookup import DenseFrobeniusLookup, DenseFrobeniusPlan
from holdall.embedding.dense_pack import DensePack
from holdall.embedding.pack_lookup import PackGroup, look_up_pack
from holdall.kernels.dispatch import default_path, takes_triton
from holdall.tables import Table


@dataclass(frozen=True)
class TableGroup:
    """Features whose tables are of one kernel group (`Table.kernel_group`), looked up by one call."""

    positions: tuple[int, ...]
    tables: list[Table]


class Route:
    """Groups of the features at some positions of a batch, each group looked up by one call.

    `reads` tells for each of `packs` whether its storage is read; if not, its tables are called one by one.
    """

    def __init__(
        self,
        positions: tuple[int, ...] | None,
        names: Sequence[str],
        tables: Mapping[str, Table],
        packs: Sequence[DensePack],
        reads: Sequence[bool],
        *,
        fused: bool,
    ):
        every = tuple(range(len(names)))
        self.positions = every if positions is None else positions
        self._fused, self._every_feature = fused, positions is None
        self.packs: list[PackGroup] = []
        """Features of packs, one gather per pack."""
        self.only_pack: PackGroup | None = None
        """The pack that has all of the features, where one has."""
        self.mixes = fused and len(set(self.positions)) == len(self.positions)
        """Whether kernels of several kinds may write into one output: not where one pack has all of the features."""
        packed: set[int] = set()
        for pack, is_read in zip(packs, reads, strict=True):
            chosen = tuple(position for position in self.positions if names[position] in pack.tables)
            group = PackGroup(pack, chosen, tuple(names[position] for position in chosen), whole_batch=chosen == every)
            if len(chosen) == len(self.positions):
                self.mixes = False
                self.only_pack = self.only_pack or (group if is_read else None)
            if chosen and is_read:
                self.packs.append(group)
                packed.update(chosen)
        self.unpacked = [(position, tables[names[position]]) for position in self.positions if position not in packed]
        """Features that no pack looks up, and their tables."""

    @cached_property
    def table_groups(self) -> list[TableGroup]:
        """Unpacked features whose tables share a call, for one id per feature."""
        groups: dict[Hashable, list[tuple[int, Table]]] = {}
        for position, table in self.unpacked if self._fused else []:
            key = table.kernel_group()
            if key is not None:
                groups.setdefault((type(table), key), []).append((position, table))
        return [
            TableGroup(tuple(position for position, _ in members), [table for _, table in members])
            for members in groups.values()
            if len(members) > 1
        ]

    @cached_property
    def ungrouped(self) -> list[tuple[int, Table]]:
        """Unpacked features whose tables are called one by one, for one id per feature."""
        grouped = {position for group in self.table_groups for position in group.positions}
        return [(position, table) for position, table in self.unpacked if position not in grouped]

    @cached_property
    def pooled_tables(self) -> list[Table] | None:
        """Tables of all features of a batch, where one call pools the bags of all of them."""
        if not self._fused or not self._every_feature or self.packs:
            return None
        tables = [table for _, table in self.unpacked]
        groups = {(type(table), table.mode, table.kernel_group()) for table in tables}
        return tables if len(groups) == 1 and tables[0].kernel_group() is not None else None


class LookupPlan:
    """Routes of the features of a batch to their tables; valid until tables or packs are replaced, moved or cast.

    `names` are the tables of the features, by position. Without `fused` every feature is looked up on its own.
    """

    def __init__(self, names: Sequence[str], tables: Mapping[str, Table], packs: Sequence[DensePack], *, fused: bool):
        self.names, self.tables, self.fused = list(names), dict(tables), fused
        self.packs = [pack for pack in packs if any(name in pack.tables for name in names)]
        """Packs of which some feature looks up a table."""
        self._routes: dict[Hashable, Route] = {}
        self._mixed: dict[Hashable, DenseFrobeniusPlan] = {}

    def route(self, ids: Ids, positions: Sequence[int] | None = None) -> Route:
        """Route of the features at `positions` (None: all), for ids on this device.

        A pack's storage is read where the pack collects gradients for an optimizer, or where autograd is off;
        otherwise gradients belong into `weight.grad`, and tables are called one by one, as they are where transforms of
        `torch.func` are under way or replace their weights.
        """
        chosen = None if positions is None else tuple(positions)
        learns = torch.is_grad_enabled()
        reads = tuple([(pack.collects or not learns) and not pack.is_replaced() for pack in self.packs])
        key = (chosen, reads, ids.values.device, default_path())
        route = self._routes.get(key)
        if route is None:
            route = Route(chosen, self.names, self.tables, self.packs, reads, fused=self.fused)
            self._routes[key] = route
        return route

    def look_up(self, ids: Ids, positions: Sequence[int] | None, dtype: torch.dtype | None) -> Tensor:
        """Pooled vectors [B, F', dim] of the features at `positions`, in type `dtype` or else in that of the tables."""
        if torch.compiler.is_compiling():
            why_not = self._why_not_traced(ids)
            if why_not is None:
                return self._look_up_traced(ids, positions, dtype)
            break_graph(why_not)
        route = self.route(ids, positions)
        if route.only_pack is not None:
            return look_up_pack(route.only_pack, ids)
        if ids.offsets is None and ids.weights is None:
            mixed = self._mixed_plan(route, ids.values)
            if mixed is not None:
                return self._look_up_mixed(mixed, ids, dtype)
        elif route.pooled_tables is not None:
            tables = route.pooled_tables
            pooled = tables[0].pool_many(tables, ids.values.reshape(-1), ids.offsets, ids.weights)
            if pooled is not None:
                return pooled if dtype is None else pooled.to(dtype)
        columns = _columns(route, ids)
        found = [columns[position] for position in route.positions]
        return torch.stack(found if dtype is None else [vectors.to(dtype) for vectors in found], dim=1)

    def _why_not_traced(self, ids: Ids) -> str | None:
        """Why a lookup cannot be part of a compiled or exported graph; None if it can."""
        if ids.offsets is not None:
            return "bags of several ids are not compiled or exported: their sizes depend on the batch"
        if torch.is_grad_enabled() and any(pack.collects for pack in self.packs) and not torch.compiler.is_exporting():
            return "tables that have Optimizers collect gradients by row, outside of a graph: compile without fullgraph"
        if any(type(pack) is not DensePack for pack in self.packs):
            return "tables whose rows are in several places are looked up outside of a graph: compile without fullgraph"
        return None

    def _look_up_traced(self, ids: Ids, positions: Sequence[int] | None, dtype: torch.dtype | None) -> Tensor:
        """`look_up` of one id per feature as operations on the tables' own parameters, one table after the other."""
        chosen = range(len(self.names)) if positions is None else positions
        with torch.autocast("cpu" if ids.values.is_meta else ids.values.device.type, enabled=False):
            found = [look_up_table(self.tables[self.names[position]], ids, position) for position in chosen]
        return torch.stack(found if dtype is None else [vectors.to(dtype) for vectors in found], dim=1)

    def _look_up_mixed(self, mixed: DenseFrobeniusPlan, ids: Ids, dtype: torch.dtype | None) -> Tensor:
        """[B, F', dim], every kernel writing its own columns; in the type of `torch.autocast` where that is on."""
        rest: list[Tensor] = []
        if mixed.rest:
            columns = _columns(self.route(ids, mixed.rest_positions), ids)
            rest = [columns[position] for position in mixed.rest_positions]
        kind = ids.values.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        elif dtype is None:
            dtype = functools.reduce(torch.promote_types, [*mixed.dtypes(), *(vectors.dtype for vectors in rest)])
        return DenseFrobeniusLookup.apply(mixed, ids.values, dtype, len(rest), *mixed.parameters(), *rest)

    def _mixed_plan(self, route: Route, values: Tensor) -> DenseFrobeniusPlan | None:
        """Kernels that write the vectors of one-hot ids into one output; None where none does."""
        if not route.mixes or values.is_meta or transforms() or not takes_triton("the lookup", values):
            return None
        packs = [group.pack for group in route.packs if _whole_on(values.device, group.pack)]
        key = (route.positions, *(id(pack) for pack in packs))
        if key not in self._mixed:
            self._mixed[key] = DenseFrobeniusPlan(route.positions, self.names, self.tables, packs)
        for pack in packs:
            pack.repack()
        mixed = self._mixed[key]
        return mixed if mixed.worthwhile else None

    def packed_rows(self, ids: Ids) -> tuple[Tensor, ...] | None:
        """See `EmbeddingBags.packed_rows`; the ids are checked already."""
        route = self.route(ids)
        if route.only_pack is None:
            mixed = self._mixed_plan(route, ids.values)
            if mixed is None or mixed.rest or mixed.bands.members or len(set(mixed.dtypes())) != 1:
                return None
            return mixed.row_numbers(ids.values, self.packs[0].storage.dtype)
        pack = route.only_pack.pack
        pack.repack()
        rows = pack.row_numbers(pack.locate(ids.values.t(), route.only_pack.names))
        return pack.storage, rows  # in this order: a tiered pack that fetches rows may replace its storage

    def reads_packed_rows(self, ids: Ids) -> bool:
        """Whether one-hot ids look up rows of one storage only, which Triton kernels read, beside those they make."""
        if ids.offsets is not None or ids.weights is not None or len(self.packs) != 1 or not self.route(ids).packs:
            return False
        (pack,) = self.packs
        return takes_triton("the lookup", pack.storage, fits=pack.fits_kernels)


def _columns(route: Route, ids: Ids) -> dict[int, Tensor]:
    """Vectors [B, dim] of each feature of a route, by position."""
    columns: dict[int, Tensor] = {}
    for packed in route.packs:
        columns.update(zip(packed.positions, look_up_pack(packed, ids).unbind(1), strict=True))
    single = route.unpacked
    if single and ids.offsets is None and ids.weights is None:
        for group in route.table_groups:
            rows = group.tables[0].rows_many(group.tables, features_at(ids.values, group.positions).long())
            columns.update(zip(group.positions, rows.unbind(0), strict=True))
        single = route.ungrouped
    if single:
        kind = "cpu" if ids.values.is_meta else ids.values.device.type
        with torch.autocast(kind, enabled=False):  # what a table computes is in its own type
            for position, table in single:
                columns[position] = look_up_table(table, ids, position)
    return columns


def look_up_table(table: Table, ids: Ids, position: int) -> Tensor:
    """Pooled vectors [B, dim] of one feature, from its own table."""
    values, offsets, weights = ids.bag(position)
    if offsets is None:
        values, weights = values[:, None], None if weights is None else weights[:, None]
    else:
        offsets = offsets if table.include_last_offset else offsets[:-1]
    return table(values, offsets, weights)


def _whole_on(device: torch.device, pack: DensePack) -> bool:
    """Whether all rows of a pack are on a device, in a type that the kernels read."""
    return type(pack) is DensePack and pack.storage.device == device and pack.fits_kernels
