"""Exchange of hot rows for hotter ones as popularity drifts, by lookups counted while training.

Hot rows stay a prefix of places. An id's place is the id itself at first, and changes when its row is swapped with
another one of the same table. Counts decay: a lookup weighs `decay` as much with every refresh since.

Costs 16 bytes for every row, on the device of the ids: 4 or 8 for its place, as many for the inverse map, 4 for its
count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from holdall.common.errors import CheckpointError
from holdall.tiers.tiered_storage import TieredStorage

LARGEST_WEIGHT = 2.0**40
"""Beyond it all counts are scaled down: far below the largest float32, and a count of 1 is then rounding error."""


class HotRefresh:
    """Places and counts of every row of a pack; both are indexed by the row's number in the host's storage."""

    def __init__(self, pack: TieredStorage, decay: float = 0.5):
        num_rows, device = pack.host.storage.shape[0], pack.device
        dtype = torch.int32 if num_rows < 2**31 else torch.int64
        self.place = torch.arange(num_rows, dtype=dtype, device=device)
        """The place of each id's row."""
        self.id_at = self.place.clone()
        """The id of the row at each place."""
        self.counts = torch.zeros(num_rows, device=device)
        self.weight = torch.ones((), dtype=torch.float64)
        """What one lookup adds: it grows by 1/decay a refresh, which saves scaling every count."""
        self.decay = decay

    def places(self, ids: Tensor, starts: Tensor) -> Tensor:
        """The places, within their tables, of ids of tables that start at `starts`."""
        return self.place[ids + starts] - starts

    def count(self, looked_up: Tensor) -> None:
        """Count one lookup of each of these rows of the host's storage, in its order of ids."""
        looked_up = looked_up.reshape(-1)
        self.counts.index_add_(0, looked_up, self.counts.new_full((1,), float(self.weight)).expand(looked_up.numel()))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint saves."""
        return {"place": self.place, "counts": self.counts, "weight": self.weight}

    def after_loading(self, pack: TieredStorage) -> None:
        """Check a loaded map, and move the host's rows, which a checkpoint has in order of ids, to their places."""
        for name, start in pack.starts.items():
            part = self.place[start : start + pack.tables[name].num_rows].long()
            ordered = torch.sort(part).values
            expected = torch.arange(start, start + part.numel(), device=part.device)
            if not torch.equal(ordered, expected):
                wrong = int((ordered != expected).nonzero()[0])
                raise CheckpointError(
                    f"the map of hot rows of table '{name}' is not a bijection (first at place {wrong}): the "
                    f"checkpoint is damaged, resume from another one"
                )
        self.id_at[self.place.long()] = torch.arange(self.place.numel(), dtype=self.place.dtype, device=pack.device)
        self._permute(pack, by_id=False)

    @contextmanager
    def in_order_of_ids(self, pack: TieredStorage) -> Iterator[None]:
        """Inside, the host's rows (flushed before) are in the order of ids, as a checkpoint saves them."""
        self._permute(pack, by_id=True)
        try:
            yield
        finally:
            self._permute(pack, by_id=False)

    def _permute(self, pack: TieredStorage, *, by_id: bool) -> None:
        """Put the host's rows in the order of ids, or back in their places; only rows that were swapped are copied."""
        everywhere = torch.arange(self.place.numel(), dtype=self.place.dtype, device=self.place.device)
        ids = (self.place != everywhere).nonzero()[:, 0]
        places, ids = self.place[ids].long().cpu(), ids.cpu()
        source, target = (places, ids) if by_id else (ids, places)
        with torch.no_grad():
            for host in pack.host_tensors():
                host.write(target, host.read(source))

    def refresh(self, pack: TieredStorage) -> int:
        """Swap the coldest hot rows for hotter ones of the same table; the number of rows that became hot.

        The i-th coldest hot row is swapped with the i-th hottest other row if it was looked up less often, so rows of
        equal counts stay. All rows must have been written back.
        """
        hot_places, cold_places = [], []
        for name, start in pack.starts.items():
            hot, num_rows = pack.hot_rows[name], pack.tables[name].num_rows
            if not 0 < hot < num_rows:
                continue
            counts = self.counts[self.id_at[start : start + num_rows].long()]
            coldest, leaving = torch.sort(counts[:hot], stable=True)
            hottest, coming = torch.sort(counts[hot:], descending=True, stable=True)
            pairs = min(hot, num_rows - hot)
            num_swaps = int((hottest[:pairs] > coldest[:pairs]).sum())  # a prefix: one list falls, the other rises
            hot_places.append(start + leaving[:num_swaps])
            cold_places.append(start + hot + coming[:num_swaps])
        if not hot_places:
            return 0
        self._swap(pack, torch.cat(hot_places), torch.cat(cold_places))
        self._decay()
        return sum(places.numel() for places in hot_places)

    def _swap(self, pack: TieredStorage, hot: Tensor, cold: Tensor) -> None:
        """Exchange rows and state at these places, and update the map."""
        device_rows = torch.cat(
            [
                hot[(hot >= start) & (hot < start + pack.hot_rows[name])] - start + pack.device_starts[name]
                for name, start in pack.starts.items()
            ]
        )
        host_rows = cold.cpu()
        with torch.no_grad():
            for host, tensor in zip(pack.host_tensors(), pack.device_tensors(), strict=True):
                leaving = tensor.index_select(0, device_rows)
                tensor.index_copy_(0, device_rows, host.read(host_rows).to(tensor.device))
                host.write(host_rows, leaving.cpu())
                pack.traffic.fetched += leaving.nbytes
                pack.traffic.written_back += leaving.nbytes
        leaving_ids, coming_ids = self.id_at[hot], self.id_at[cold]
        self.id_at[hot], self.id_at[cold] = coming_ids, leaving_ids
        self.place[leaving_ids.long()] = cold.to(self.place.dtype)
        self.place[coming_ids.long()] = hot.to(self.place.dtype)

    def _decay(self) -> None:
        self.weight /= self.decay
        if float(self.weight) > LARGEST_WEIGHT:
            self.counts /= float(self.weight)
            self.weight.fill_(1.0)
