"""Sharded tensor, as a checkpoint saves it and loads into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdall.tables.initial_rows import initial_rows

if TYPE_CHECKING:
    from holdall.distributed.two_fold_pack import TwoFoldPack


@dataclass(frozen=True)
class ShardedTensor:
    """Rows of a table, or their optimizer state, sharded over processes; implements `checkpoint.TensorByRows`.

    The last step must have been finished (`TwoFoldPack.finish`). Hot rows are saved too, each by one process.
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
        """Owned rows that were updated, and this process's share of the hot rows."""
        pack, rank = self.pack, self.pack.collectives.rank
        hot = torch.arange(pack.hot_rows[self.name])[rank :: pack.collectives.world_size]
        ids = pack.shards.owned_ids(rank, self.name)
        if pack.host_rows.touched is not None:
            ids = ids[pack.host_rows.touched[pack.shards.local_slice(rank, self.name)]]
        return torch.cat([hot, ids])

    def read(self, rows: Tensor) -> Tensor:
        return self.decode_(rows, self.read_raw(rows))

    def read_raw(self, rows: Tensor) -> Tensor:
        is_hot, local = self._find(rows)
        cold = self.pack.cold(self.kind)
        if not bool(is_hot.any()):  # the usual case
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
        """Write the rows that this process has, hot or owned, and ignore the others."""
        is_hot, local = self._find(rows)
        device = self.pack.device
        self.pack.hot(self.name, self.kind)[rows[is_hot].to(device)] = values[is_hot].to(device)
        owned = ~is_hot & (local >= 0)
        self.pack.cold(self.kind).write(local[owned], values[owned])

    def reset(self) -> None:
        """Set every row to its initial value."""
        pack = self.pack
        if self.kind == "weight":
            assert pack.host_rows.initial is not None, "rows that were copied have no initial values"
            table = pack.tables[self.name]
            assert table.seed is not None, "every table draws a seed"
            ids = torch.arange(pack.hot_rows[self.name])
            rows = initial_rows(ids, pack.dim, table.seed, table.init_std)
            pack.hot(self.name, "weight").copy_(rows)
        else:
            pack.hot(self.name, self.kind).zero_()
        local = pack.shards.local_slice(pack.collectives.rank, self.name)
        cold = pack.cold(self.kind)
        if pack.host_rows.touched is not None:
            touched = local.start + pack.host_rows.touched[local].nonzero()[:, 0]
            cold.write_raw(touched, torch.zeros(touched.numel(), *self.shape[1:], dtype=self.dtype))

    def clear_touched(self) -> None:
        """Mark no row as touched, once everything that shares the marks has been reset."""
        touched, shards = self.pack.host_rows.touched, self.pack.shards
        if touched is not None:
            touched[shards.local_slice(self.pack.collectives.rank, self.name)] = False

    def _find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`(mask of hot rows [n], local numbers [n])`; the local number of a row that is hot or not owned is -1."""
        pack, rank = self.pack, self.pack.collectives.rank
        world_size, hot_rows = pack.collectives.world_size, pack.hot_rows[self.name]
        is_hot = rows < hot_rows
        rank_in_tail = rows - hot_rows
        owned = ~is_hot & ((rank_in_tail + pack.shards.number[self.name]) % world_size == rank)
        start = pack.shards.local_slice(rank, self.name).start
        return is_hot, torch.where(owned, start + rank_in_tail // world_size, -1)
