"""Shards of tables: hot rows are on every process, cold rows are sharded round-robin.

Row `id` of table number t, with k = id - hot_rows[t] >= 0, is owned by process (k + t) mod W. Ids are in order of
popularity, so each process gets rows of every popularity. Tables start at different processes, which spreads the most
popular cold row of each, and the rows of tables with fewer rows than processes. A process stores its rows of all tables
end to end, in the order of tables and ids; the index there is the `local` number of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.embedding.dense_pack import DensePack
from holdall.tables.initial_rows import initial_rows
from holdall.tiers.host_rows import HostRows, InitialValues, LazyRows


class Shards:
    """Owners of the cold rows of tables; every process computes the same."""

    def __init__(self, num_rows: Mapping[str, int], hot_rows: Mapping[str, int], world_size: int):
        for name, rows in num_rows.items():
            if not 0 <= hot_rows[name] <= rows:
                raise ConfigError(f"table '{name}' cannot have {hot_rows[name]} hot rows: it has {rows} rows")
        self.names = list(num_rows)
        self.num_rows, self.world_size = dict(num_rows), world_size
        self.hot_rows = {name: hot_rows[name] for name in num_rows}
        self.number = {name: number for number, name in enumerate(self.names)}
        tails = torch.tensor([num_rows[name] - hot_rows[name] for name in self.names])
        first = (torch.arange(world_size)[:, None] - torch.arange(len(self.names))) % world_size
        self.counts = ((tails - first + world_size - 1) // world_size).clamp_(min=0)
        """[W, T] number of rows of each table that each process owns."""
        self.starts = self.counts.cumsum(1) - self.counts
        """[W, T] local number of the first of them."""
        self.stride = max(1, int(self.counts.sum(1).max()))
        """Most rows that a process owns: owner * stride + local number identifies a row."""
        self._starts_on: dict[torch.device, Tensor] = {}
        self._columns: dict[tuple[tuple[str, ...], torch.device], tuple[Tensor, Tensor, Tensor]] = {}

    def columns(self, names: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Hot rows, first hot row and number of each table; cached, because copying them to a GPU synchronizes."""
        key = (tuple(names), device)
        if key not in self._columns:
            hot_starts, start = {}, 0
            for name, rows in self.hot_rows.items():
                hot_starts[name], start = start, start + rows
            tables = (self.hot_rows, hot_starts, self.number)
            hot, hot_start, number = (torch.tensor([table[n] for n in names], device=device) for table in tables)
            self._columns[key] = (hot, hot_start, number)
        return self._columns[key]

    def keys(self, rank_in_tail: Tensor, number: Tensor) -> Tensor:
        """owner * stride + local number, for cold row k = `rank_in_tail` of table `number`."""
        owner = (rank_in_tail + number) % self.world_size
        if number.device not in self._starts_on:
            self._starts_on[number.device] = self.starts.to(number.device)
        starts = self._starts_on[number.device][owner, number]
        return owner * self.stride + starts + rank_in_tail // self.world_size

    def owned_ids(self, rank: int, name: str) -> Tensor:
        """[n] int64: ids of a table's rows that a process owns, in the order of their local numbers."""
        number = self.number[name]
        first = self.hot_rows[name] + (rank - number) % self.world_size
        return first + self.world_size * torch.arange(int(self.counts[rank, number]))

    def local_slice(self, rank: int, name: str) -> slice:
        """Local numbers of those rows."""
        start = int(self.starts[rank, self.number[name]])
        return slice(start, start + int(self.counts[rank, self.number[name]]))


@dataclass(frozen=True)
class ShardInitialValues(InitialValues):
    """Initial values of the rows that a process owns; `starts` are local numbers."""

    first_ids: Tensor
    """[T] int64: the id of the first row of each table."""
    step: int
    """Difference of consecutive owned ids of a table: the number of processes."""

    def rows(self, rows: Tensor, dim: int) -> Tensor:
        table = torch.searchsorted(self.starts, rows, right=True) - 1
        ids = self.first_ids[table] + (rows - self.starts[table]) * self.step
        return initial_rows(ids, dim, self.seeds[table], self.stds[table])

    def to(self, device: torch.device) -> ShardInitialValues:
        starts, seeds, stds = (tensor.to(device) for tensor in (self.starts, self.seeds, self.stds))
        return ShardInitialValues(starts, seeds, stds, self.first_ids.to(device), self.step)


def owned_rows(host: DensePack, shards: Shards, rank: int) -> HostRows:
    """Rows that a process owns, end to end: lazy ones if `host` is on `meta`, else copies of its rows."""
    tables = host.tables
    if not host.storage.is_meta:
        owned = [host.starts[name] + shards.owned_ids(rank, name) for name in tables]
        return HostRows(host.storage.cpu()[torch.cat(owned)])
    first = [shards.hot_rows[name] + (rank - shards.number[name]) % shards.world_size for name in tables]
    initial = ShardInitialValues(
        starts=shards.starts[rank],
        first_ids=torch.tensor(first),
        step=shards.world_size,
        seeds=torch.tensor([table.seed for table in tables.values()]),
        stds=torch.tensor([table.init_std for table in tables.values()]),
    )
    store = torch.zeros(int(shards.counts[rank].sum()), host.storage.shape[1], dtype=host.storage.dtype)
    return LazyRows(HostRows(store), initial)


def hot_rows_of(host: DensePack, hot_rows: Mapping[str, int]) -> Tensor:
    """Hot rows of all tables, end to end."""
    dim, parts = host.storage.shape[1], []
    for name, table in host.tables.items():
        start, rows = host.starts[name], hot_rows[name]
        if host.storage.is_meta:
            assert table.seed is not None, "every table draws a seed"
            parts.append(initial_rows(torch.arange(rows), dim, table.seed, table.init_std).to(host.storage.dtype))
        else:
            parts.append(host.storage[start : start + rows].detach().clone())
    return torch.cat(parts)
