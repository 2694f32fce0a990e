"""The strategies that several processes can follow, by name."""

from __future__ import annotations

from holdall.errors import ConfigError
from holdall.parallel.data_parallel import DataParallel
from holdall.parallel.local import Local
from holdall.parallel.processes import Processes
from holdall.parallel.spread_tables import TableWise, TwoFoldTables
from holdall.training.config import TrainConfig
from holdall.training.strategy import STRATEGIES, Strategy

PARALLEL: dict[str, type[Strategy]] = {
    "data-parallel": DataParallel,
    "two-fold": TwoFoldTables,
    "table-wise": TableWise,
    "local": Local,
}
SPREAD = ("two-fold", "table-wise")
"""Those that are `plain` with one process."""


def find_strategy(config: TrainConfig, processes: Processes) -> type[Strategy]:
    """The strategy of a run; those of one process are refused where there are several."""
    if config.strategy in SPREAD and processes.world_size == 1:
        return STRATEGIES["plain"]
    if config.strategy in PARALLEL:
        return PARALLEL[config.strategy]
    if processes.world_size > 1:
        given = f"--plan {config.plan}" if config.plan is not None else f"--strategy {config.strategy}"
        raise ConfigError(
            f"{given} is for one process, and there are {processes.world_size}: use --strategy "
            f"{', '.join(PARALLEL)}, or start without torchrun"
        )
    return STRATEGIES[config.strategy]
