"""Rows that change places as popularity drifts: which ids are hot now, counted while training.

Hot stays a prefix of places; an id's place starts as the id itself and changes when its row is swapped with another
one's of the same table. Counts fade: a lookup weighs `decay` as much with every refresh that has passed since.

Costs 16 bytes for every row, where ids are looked up: 4 or 8 for its place, as many for the way back, 4 for its count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdall.common.errors import CheckpointError

if TYPE_CHECKING:
    from holdall.tiers.tiered_pack import TieredPack

LARGEST_WEIGHT = 2.0**40
"""Beyond it all counts are scaled down: float32 has room above, and a count of 1 is then below every other's error."""


class HotRefresh:
    """Places and counts of every row of a pack; both are indexed by the row's number in the host's storage."""

    def __init__(self, pack: TieredPack, decay: float = 0.5):
        num_rows, device = pack.host.storage.shape[0], pack.device
        dtype = torch.int32 if num_rows < 2**31 else torch.int64
        self.place = torch.arange(num_rows, dtype=dtype, device=device)
        """Where the row of an id lies."""
        self.id_at = self.place.clone()
        """Whose row lies at a place."""
        self.counts = torch.zeros(num_rows, device=device)
        self.weight = torch.ones((), dtype=torch.float64)
        """What one lookup adds: it grows by 1/decay a refresh, which saves fading every count."""
        self.decay = decay

    def places(self, ids: Tensor, starts: Tensor) -> Tensor:
        """The places, within their tables, of ids of tables that start at `starts`."""
        return self.place[ids + starts] - starts

    def count(self, ids: Tensor, starts: Tensor) -> None:
        """Note one lookup of each of these ids."""
        looked_up = (ids + starts).reshape(-1)
        self.counts.index_add_(0, looked_up, self.counts.new_full((1,), float(self.weight)).expand(looked_up.numel()))

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"place": self.place, "counts": self.counts, "weight": self.weight}

    def after_loading(self, pack: TieredPack) -> None:
        """Check a loaded map, and put the host's rows, which a checkpoint holds in order of ids, in their places."""
        for name, start in pack.starts.items():
            part = self.place[start : start + pack.tables[name].num_rows].long()
            ordered = torch.sort(part).values
            expected = torch.arange(start, start + part.numel(), device=part.device)
            if not torch.equal(ordered, expected):
                wrong = int((ordered != expected).nonzero()[0])
                raise CheckpointError(
                    f"the map of hot rows of table '{name}' is not a bijection (first at place {wrong}): the "
                    f"checkpoint is damaged, go on from another one"
                )
        self.id_at[self.place.long()] = torch.arange(self.place.numel(), dtype=self.place.dtype, device=pack.device)
        self._permute(pack, home=False)

    @contextmanager
    def in_order_of_ids(self, pack: TieredPack) -> Iterator[None]:
        """Inside, the host's rows (flushed before) lie in the order of ids: what a checkpoint holds."""
        self._permute(pack, home=True)
        try:
            yield
        finally:
            self._permute(pack, home=False)

    def _permute(self, pack: TieredPack, *, home: bool) -> None:
        """Move the rows that are not at home there, or from there to their places; only those are copied."""
        everywhere = torch.arange(self.place.numel(), dtype=self.place.dtype, device=self.place.device)
        ids = (self.place != everywhere).nonzero()[:, 0]
        places, ids = self.place[ids].long().cpu(), ids.cpu()
        source, target = (places, ids) if home else (ids, places)
        with torch.no_grad():
            for far in pack.far_rows():
                far.write(target, far.read(source))

    def refresh(self, pack: TieredPack) -> int:
        """Swap the coldest hot rows for hotter ones of the same table; how many rows came in.

        The i-th coldest hot row meets the i-th hottest other row and gives way when it was looked up less, so nothing
        moves between equals. The rows of the room must be home (`write_back`).
        """
        assert pack.working is None, "rows of a step are out"
        hot_places, cold_places = [], []
        for name, start in pack.starts.items():
            hot, num_rows = pack.hot_rows[name], pack.tables[name].num_rows
            if not 0 < hot < num_rows:
                continue
            counts = self.counts[self.id_at[start : start + num_rows].long()]
            coldest, out = torch.sort(counts[:hot], stable=True)
            hottest, come = torch.sort(counts[hot:], descending=True, stable=True)
            pairs = min(hot, num_rows - hot)
            num_swaps = int((hottest[:pairs] > coldest[:pairs]).sum())  # a prefix: one falls, the other rises
            hot_places.append(start + out[:num_swaps])
            cold_places.append(start + hot + come[:num_swaps])
        if not hot_places:
            return 0
        self._swap(pack, torch.cat(hot_places), torch.cat(cold_places))
        self._fade()
        return sum(places.numel() for places in hot_places)

    def _swap(self, pack: TieredPack, hot: Tensor, cold: Tensor) -> None:
        """Exchange rows and state at these places, and say so in the map."""
        near_rows = torch.cat(
            [
                hot[(hot >= start) & (hot < start + pack.hot_rows[name])] - start + pack.near_starts[name]
                for name, start in pack.starts.items()
            ]
        )
        far_rows = cold.cpu()
        with torch.no_grad():
            for far, near in zip(pack.far_rows(), pack.near_tensors(), strict=True):
                leaving = near.index_select(0, near_rows)
                near.index_copy_(0, near_rows, far.read(far_rows).to(near.device))
                far.write(far_rows, leaving.cpu())
                pack.traffic.fetched += leaving.nbytes
                pack.traffic.sent_back += leaving.nbytes
        leaving_ids, coming_ids = self.id_at[hot], self.id_at[cold]
        self.id_at[hot], self.id_at[cold] = coming_ids, leaving_ids
        self.place[leaving_ids.long()] = cold.to(self.place.dtype)
        self.place[coming_ids.long()] = hot.to(self.place.dtype)

    def _fade(self) -> None:
        self.weight /= self.decay
        if float(self.weight) > LARGEST_WEIGHT:
            self.counts /= float(self.weight)
            self.weight.fill_(1.0)
