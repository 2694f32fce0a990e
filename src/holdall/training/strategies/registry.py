"""Strategies by name: those of one process, and those of several."""

from __future__ import annotations

from holdall.common.errors import ConfigError
from holdall.distributed.processes import Processes
from holdall.training.config import TrainConfig
from holdall.training.strategies.base import Strategy
from holdall.training.strategies.data_parallel import DataParallelStrategy
from holdall.training.strategies.host import HostStrategy
from holdall.training.strategies.hot_batches import HotBatchesStrategy, ShardedHotBatchesStrategy
from holdall.training.strategies.local import LocalStrategy
from holdall.training.strategies.plain import PlainStrategy
from holdall.training.strategies.split import SplitStrategy
from holdall.training.strategies.table_wise import TableWiseStrategy
from holdall.training.strategies.two_fold import TwoFoldStrategy

ONE_PROCESS: dict[str, type[Strategy]] = {
    "plain": PlainStrategy,
    "host": HostStrategy,
    "split": SplitStrategy,
    "hot-batches": HotBatchesStrategy,
    "data-parallel": PlainStrategy,
    "two-fold": PlainStrategy,
    "table-wise": PlainStrategy,
    "local": PlainStrategy,
}
SEVERAL_PROCESSES: dict[str, type[Strategy]] = {
    "data-parallel": DataParallelStrategy,
    "two-fold": TwoFoldStrategy,
    "hot-batches": ShardedHotBatchesStrategy,
    "table-wise": TableWiseStrategy,
    "local": LocalStrategy,
}


def find_strategy(config: TrainConfig, processes: Processes) -> type[Strategy]:
    """The strategy of a run; an error where several processes cannot follow it with these settings."""
    placement = config.placement
    if processes.world_size == 1:
        return ONE_PROCESS[placement.strategy]
    if placement.strategy not in SEVERAL_PROCESSES:
        raise ConfigError(
            f"--strategy {placement.strategy} is for one process, and there are {processes.world_size}: use --strategy "
            f"{', '.join(SEVERAL_PROCESSES)}, or start without torchrun"
        )
    found = SEVERAL_PROCESSES[placement.strategy]
    depth = found.kind.max_prefetch
    if placement.tail != "host" or (depth is not None and (placement.prefetch or 0) > depth):
        raise ConfigError(
            f"--strategy {placement.strategy} of several processes keeps rows in memory and fetches one step ahead at "
            f"most: leave --tail out, and --prefetch at 0 or 1"
        )
    return found
