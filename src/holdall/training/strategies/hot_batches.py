"""`hot-batches` (FAE): samples that look up hot rows only are in batches of their own, for which no row is fetched.

One process stores rows as `split` does, several as `two-fold` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from holdall.common.errors import ConfigError
from holdall.common.sizes import readable_bytes
from holdall.data.batch import Batch
from holdall.models.model import LookedUp
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.popularity.choose_hot_rows import hot_inputs, smallest_useful_budget
from holdall.training.strategies.base import BatchPairs, Segment
from holdall.training.strategies.hot_batch_loader import HotBatchLoader
from holdall.training.strategies.hot_bytes import bytes_per_row, first_cold_rows, lookups_by_row
from holdall.training.strategies.split import SplitStrategy
from holdall.training.strategies.two_fold import TwoFoldStrategy


class HotBatches:
    """Hot and cold batches in turn, each kind copied to the device by an iterator of its own.

    The iterators last for an epoch, so that rows of the next cold batches are fetched while hot batches are computed,
    which cannot change them. `open_cold(segment, step)` and `open_hot(batches)` open them. A hot batch is passed to
    `begin_hot_step(batch, moved)` before its step.
    """

    def __init__(
        self,
        loader: HotBatchLoader,
        open_cold: Callable[[Segment, int], BatchPairs],
        open_hot: Callable[[Iterator[Batch]], BatchPairs],
        begin_hot_step: Callable[[Batch, Batch], None],
    ):
        self.loader = loader
        self.is_hot = False
        """Whether the current segment has hot batches."""
        self._open_cold, self._open_hot, self._begin_hot_step = open_cold, open_hot, begin_hot_step
        self._iterators: dict[str, BatchPairs] = {}

    def segments(self, epoch: int, start_batch: int) -> Iterator[Segment]:
        self.close()
        return self.loader.segments(epoch, start_batch)

    def on_device(self, segment: Segment, step: int) -> BatchPairs:
        self.is_hot = segment.kind == "hot"
        if segment.kind not in self._iterators:
            opened = self._open_hot(segment.batches) if self.is_hot else self._open_cold(segment, step)
            self._iterators[segment.kind] = opened
        for batch, moved in islice(self._iterators[segment.kind], segment.num_batches):
            if self.is_hot:
                self._begin_hot_step(batch, moved)
            yield batch, moved

    def measures(self) -> dict[str, float]:
        return {"hot_share_of_inputs": self.loader.hot_share, "hot_batch_rate": self.loader.interleaving.rate}

    def close(self) -> None:
        """End the iterators of the epoch."""
        iterators, self._iterators = self._iterators, {}
        for batches in iterators.values():
            batches.close()


def hot_batch_loader(strategy: SplitStrategy | TwoFoldStrategy) -> HotBatchLoader:
    """The loader of a strategy whose hot rows have been chosen; an error where no sample is fully hot."""
    config, data = strategy.config, strategy.data
    is_hot = hot_inputs(data, first_cold_rows(strategy.model, strategy.hot_rows))
    if not is_hot.any():
        row_bytes = bytes_per_row(config, strategy.model)
        enough = smallest_useful_budget(data, lookups_by_row(config, data), row_bytes)
        given = "the plan's hot rows" if strategy.plan is not None else f"--hot-bytes {config.placement.hot_bytes}"
        raise ConfigError(
            f"no input of {data.folder} is fully hot within {given}: about {readable_bytes(enough)} would make a tenth "
            f"of them hot, or use --strategy split"
        )
    processes = strategy.processes
    return HotBatchLoader(
        data,
        is_hot,
        config.batch_size,
        shuffle=config.sample_order,
        seed=config.seed,
        rank=processes.rank,
        world_size=processes.world_size,
    )


class HotBatchesStrategy(SplitStrategy):
    """`hot-batches` of one process: rows as under `split`."""

    kind = STRATEGY_KINDS["hot-batches"]

    def _build_loader(self) -> HotBatchLoader:
        self.batches = HotBatches(hot_batch_loader(self), super().on_device, self._copied, self._begin_hot_step)
        return self.batches.loader

    def segments(self, epoch: int, start_batch: int) -> Iterator[Segment]:
        return self.batches.segments(epoch, start_batch)

    def on_device(self, segment: Segment, step: int) -> BatchPairs:
        return self.batches.on_device(segment, step)

    def _begin_hot_step(self, batch: Batch, moved: Batch) -> None:
        self.tiers.count_hot(batch.ids)
        self.tiers.begin_hot_step(moved.ids)

    def lookup(self, batch: Batch, moved: Batch) -> LookedUp:
        for pack in self.tiers.packs:
            pack.all_hot = self.batches.is_hot
        try:
            return super().lookup(batch, moved)
        finally:
            for pack in self.tiers.packs:
                pack.all_hot = False

    def after_step(self, step: int) -> None:
        if self.batches.is_hot:
            self.tiers.end_hot_step()
        else:
            super().after_step(step)

    def measures(self) -> dict[str, float]:
        return {**super().measures(), **self.batches.measures()}

    def close(self) -> None:
        self.batches.close()
        super().close()


class ShardedHotBatchesStrategy(TwoFoldStrategy):
    """`hot-batches` of several processes: rows as under `two-fold`; a hot batch exchanges nothing but gradients."""

    kind = replace(STRATEGY_KINDS["hot-batches"], keeps_tail=False, shards_rows=True, max_prefetch=1)

    def _build_loader(self) -> HotBatchLoader:
        self.batches = HotBatches(hot_batch_loader(self), super().on_device, self._copied, self._begin_hot_step)
        return self.batches.loader

    def segments(self, epoch: int, start_batch: int) -> Iterator[Segment]:
        return self.batches.segments(epoch, start_batch)

    def on_device(self, segment: Segment, step: int) -> BatchPairs:
        return self.batches.on_device(segment, step)

    def _begin_hot_step(self, batch: Batch, moved: Batch) -> None:
        self.collectives.step += 1
        self.shared.prepare_hot(len(batch))

    def measures(self) -> dict[str, float]:
        return {**super().measures(), **self.batches.measures()}

    def close(self) -> None:
        self.batches.close()
        super().close()
