"""The strategies by name: those of one process, and those that several follow."""

from __future__ import annotations

from holdall.common.errors import ConfigError
from holdall.distributed.processes import Processes
from holdall.training.config import TrainConfig
from holdall.training.strategies.base import HostTables, Split, Strategy
from holdall.training.strategies.data_parallel import DataParallel
from holdall.training.strategies.hot_batches import HotBatchesStrategy
from holdall.training.strategies.local import Local
from holdall.training.strategies.sharded import TableWise, TwoFoldHotBatches, TwoFoldTables

ALONE: dict[str, type[Strategy]] = {
    "plain": Strategy,
    "host": HostTables,
    "split": Split,
    "hot-batches": HotBatchesStrategy,
    "data-parallel": DataParallel,
    "local": Local,
    "two-fold": Strategy,
    "table-wise": Strategy,
}
"""Of one process, to whom nothing is to be dealt out."""
TOGETHER: dict[str, type[Strategy]] = {
    "data-parallel": DataParallel,
    "two-fold": TwoFoldTables,
    "hot-batches": TwoFoldHotBatches,
    "table-wise": TableWise,
    "local": Local,
}


def find_strategy(config: TrainConfig, processes: Processes) -> type[Strategy]:
    """The strategy of a run; those of one process are refused where there are several."""
    placement = config.placement
    if processes.world_size == 1:
        return ALONE[placement.strategy]
    if placement.strategy not in TOGETHER:
        raise ConfigError(
            f"--strategy {placement.strategy} is for one process, and there are {processes.world_size}: use --strategy "
            f"{', '.join(TOGETHER)}, or start without torchrun"
        )
    if placement.strategy == "hot-batches" and (placement.tail != "host" or (placement.prefetch or 0) > 1):
        raise ConfigError(
            "--strategy hot-batches of several processes keeps rows in memory and fetches one step ahead at most: "
            "leave --tail out, and --prefetch at 0 or 1"
        )
    return TOGETHER[placement.strategy]
