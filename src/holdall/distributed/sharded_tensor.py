"""A tensor whose rows are spread over processes, as a checkpoint saves it and loads into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdall.tables.initial_rows import initial_rows
from holdall.tiers.host_rows import LazyRows

if TYPE_CHECKING:
    from holdall.distributed.two_fold_pack import TwoFoldPack


@dataclass(frozen=True)
class ShardedTensor:
    """The rows of a table, or their optimizer state, of which every process has its own: see `checkpoint.TensorByRows`.

    Steps under way must have been finished. Hot rows are saved as well, each by one of the processes.
    """

    pack: TwoFoldPack
    name: str
    kind: str
    is_sharded = True

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.pack.tables[self.name].num_rows, *self.pack.cold(self.kind).tensor.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.pack.cold(self.kind).tensor.dtype

    @property
    def initial(self) -> dict[str, Any]:
        table = self.pack.tables[self.name]
        return {"std": table.init_std, "seed": table.seed} if self.kind == "weight" else {"std": 0.0, "seed": 0}

    def touched(self) -> Tensor:
        """Of the rows that this process keeps those that were updated, and its share of the hot ones."""
        pack, rank = self.pack, self.pack.collectives.rank
        hot = torch.arange(pack.hot_rows[self.name])[rank :: pack.collectives.world_size]
        ids = pack.shards.kept(rank, self.name)
        if isinstance(pack.far, LazyRows):
            ids = ids[pack.far.touched[pack.shards.local_slice(rank, self.name)]]
        return torch.cat([hot, ids])

    def read(self, rows: Tensor) -> Tensor:
        return self.decode_(rows, self.read_raw(rows))

    def read_raw(self, rows: Tensor) -> Tensor:
        is_hot, local = self._find(rows)
        cold = self.pack.cold(self.kind)
        if not bool(is_hot.any()):  # nearly all that a checkpoint asks for
            return cold.read_raw(local)
        values = torch.empty(rows.numel(), *self.shape[1:], dtype=self.dtype)
        values[is_hot] = self.pack.hot(self.name, self.kind)[rows[is_hot].to(self.pack.device)].cpu()
        values[~is_hot] = cold.read_raw(local[~is_hot])
        return values

    def decode_(self, rows: Tensor, raw: Tensor) -> Tensor:
        is_hot, local = self._find(rows)
        cold = self.pack.cold(self.kind)
        if not bool(is_hot.any()):
            return cold.decode_(local, raw)
        raw[~is_hot] = cold.decode_(local[~is_hot], raw[~is_hot])
        return raw

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Take what this process keeps, hot or cold."""
        is_hot, local = self._find(rows)
        device = self.pack.device
        self.pack.hot(self.name, self.kind)[rows[is_hot].to(device)] = values[is_hot].to(device)
        mine = ~is_hot & (local >= 0)
        self.pack.cold(self.kind).write(local[mine], values[mine])

    def reset(self) -> None:
        """Let every row begin anew."""
        pack = self.pack
        if self.kind == "weight":
            assert isinstance(pack.far, LazyRows), "rows that were copied have no beginning to go back to"
            table = pack.tables[self.name]
            assert table.seed is not None, "every table draws a seed"
            ids = torch.arange(pack.hot_rows[self.name])
            rows = initial_rows(ids, pack.dim, table.seed, table.init_std)
            pack.hot(self.name, "weight").copy_(rows)
        else:
            pack.hot(self.name, self.kind).zero_()
        local = pack.shards.local_slice(pack.collectives.rank, self.name)
        cold = pack.cold(self.kind)
        if isinstance(pack.far, LazyRows):
            touched = local.start + pack.far.touched[local].nonzero()[:, 0]
            cold.write_raw(touched, torch.zeros(touched.numel(), *self.shape[1:], dtype=self.dtype))

    def clear_touched(self) -> None:
        """Mark no row as touched, once everything that shares the marks has been reset."""
        if isinstance(self.pack.far, LazyRows):
            self.pack.far.touched[self.pack.shards.local_slice(self.pack.collectives.rank, self.name)] = False

    def _find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows are hot, and the local number [n] of those that this process keeps; -1 elsewhere."""
        pack, rank = self.pack, self.pack.collectives.rank
        world_size, hot_rows = pack.collectives.world_size, pack.hot_rows[self.name]
        is_hot = rows < hot_rows
        rank_in_tail = rows - hot_rows
        mine = ~is_hot & ((rank_in_tail + pack.shards.number[self.name]) % world_size == rank)
        start = pack.shards.local_slice(rank, self.name).start
        return is_hot, torch.where(mine, start + rank_in_tail // world_size, -1)
