"""`hot-batches`: inputs that need hot rows only go into batches of their own (FAE), whoever has the hot rows.

What brings either kind of batches to the device lasts for an epoch, so that rows of the next cold batches are fetched
while hot ones are computed, which cannot change them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator
from itertools import islice

from holdall.common.errors import ConfigError
from holdall.common.sizes import readable_bytes
from holdall.data.batch import Batch
from holdall.models.model import LookedUp
from holdall.popularity.hot_rows import hot_inputs, smallest_useful_budget
from holdall.training.hot_batches import HotBatches, Segment
from holdall.training.strategies.base import Split, Strategy


class PacksHotInputs(Strategy):
    """What a strategy with hot rows inherits first to train on hot batches. Theirs go straight to the device."""

    limits: dict[str, int]
    """The first row of each table that is not hot; its number of rows, where it is on the device as a whole."""
    row_bytes: int
    hot = False
    """Whether the segment under way is one of hot batches."""

    def _build_loader(self) -> HotBatches:
        self._under_way: dict[str, Generator[tuple[Batch, Batch], None, None]] = {}
        """What brings the batches of each kind to the device, over all segments of an epoch."""
        is_hot = hot_inputs(self.data, self.limits)
        if not is_hot.any():
            enough = smallest_useful_budget(self.data, self._lookups(), self.row_bytes)
            given = "the plan's hot rows" if self.plan is not None else f"--hot-bytes {self.config.placement.hot_bytes}"
            raise ConfigError(
                f"no input of {self.data.folder} is fully hot within {given}: about {readable_bytes(enough)} would "
                f"make a tenth of them hot, or use --strategy split"
            )
        return HotBatches(
            self.data,
            is_hot,
            self.config.batch_size,
            seed=self.config.seed,
            rank=self.processes.rank,
            world_size=self.processes.world_size,
        )

    def segments(self, epoch: int, start_batch: int) -> Iterator[Segment]:
        self._end_epoch()
        return self.loader.segments(epoch, start_batch)

    def on_device(self, segment: Segment, step: int) -> Generator[tuple[Batch, Batch], None, None]:
        self.hot = segment.kind == "hot"
        if segment.kind not in self._under_way:
            ahead = Strategy.on_device(self, segment, step) if self.hot else super().on_device(segment, step)
            self._under_way[segment.kind] = ahead
        for batch, moved in islice(self._under_way[segment.kind], segment.num_batches):
            if self.hot:
                self._enter_hot(batch, moved)
            yield batch, moved

    @abstractmethod
    def _enter_hot(self, batch: Batch, moved: Batch) -> None:
        """Before the step of a hot batch; `moved` is the same on the device."""

    def _end_epoch(self) -> None:
        """End what brings batches to the device."""
        under_way, self._under_way = self._under_way, {}
        for batches in under_way.values():
            batches.close()

    def close(self) -> None:
        self._end_epoch()
        super().close()

    def after_cycle(self, loss: float) -> None:
        self.loader.interleaving.after(loss)

    def measures(self) -> dict[str, float]:
        shares = {"hot_share_of_inputs": self.loader.hot_share, "hot_batch_rate": self.loader.interleaving.rate}
        return {**super().measures(), **shares}


class HotBatchesStrategy(PacksHotInputs, Split):
    """`hot-batches`: as `split`, with inputs that need hot rows only in batches of their own."""

    def _enter_hot(self, batch: Batch, moved: Batch) -> None:
        self.tiers.count_hot(batch.ids)
        self.tiers.begin_hot_step(moved.ids)

    def lookup(self, batch: Batch, moved: Batch) -> LookedUp:
        for pack in self.tiers.packs:
            pack.all_hot = self.hot
        try:
            return super().lookup(batch, moved)
        finally:
            for pack in self.tiers.packs:
                pack.all_hot = False

    def after_step(self, step: int) -> None:
        if self.hot:
            self.tiers.end_hot_step()
        else:
            super().after_step(step)
