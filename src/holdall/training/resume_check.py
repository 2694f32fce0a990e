"""Check of the settings of a resumed run.

Fields of the settings are marked with what may change on resume (`training.setting_groups`). All others must be those
of the run. Restoring the state is `training.run_checkpoints`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from holdall.common.errors import CheckpointError
from holdall.common.settings import settings_marked
from holdall.data.dataset import DataSet
from holdall.data.loader import Shuffle
from holdall.distributed.processes import Processes
from holdall.evaluation.row_checks import is_sorted
from holdall.optim.config import OptimizerName
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.training.config import TrainConfig
from holdall.training.tracking import RUN_FILE, read_run


def with_sample_order(
    config: TrainConfig, data: DataSet, run: Path, device: torch.device, *, resume: bool, processes: Processes
) -> TrainConfig:
    """The settings with an order of samples in the place of `auto`: of a run to resume its own. All ranks call it.

    A GPU takes rows faster than chunks of them are copied. So on a GPU chunks are for rows that are sorted.
    """
    if config.shuffle != "auto":
        return config

    def choose() -> Shuffle:
        if resume and (run / RUN_FILE).exists():
            return TrainConfig.from_json(read_run(run)["config"]["train"]).sample_order
        return "chunks" if device.type == "cpu" or is_sorted(data) else "blocks"

    return config.replace(shuffle=processes.on_rank_zero(choose))


def with_optimizer(config: TrainConfig, run: Path, *, resume: bool, processes: Processes) -> TrainConfig:
    """The settings with the optimizer named and its learning rates in numbers: of a run to resume its own, where none
    are given.

    All ranks call it.
    """
    given = config.optimizer
    if given.optimizer is not None and given.lr is not None:
        return config

    def choose() -> tuple[OptimizerName, float, float | None]:
        before = given
        if resume and (run / RUN_FILE).exists():
            before = TrainConfig.from_json(read_run(run)["config"]["train"]).optimizer
        found = before.rates(config.model.model_config().family)
        lr, table_lr = found if given.lr is None else (given.lr, None)
        return given.optimizer or before.name, lr, table_lr if given.table_lr is None else given.table_lr

    optimizer, lr, table_lr = processes.on_rank_zero(choose)
    return config.replace(optimizer=optimizer, lr=lr, table_lr=table_lr)


def refuse_other_settings(run: Path, config: TrainConfig) -> None:
    """Raise, naming the setting, if `config` differs from the run's settings in one that may not change."""
    before = TrainConfig.from_json(read_run(run)["config"]["train"]).to_json()
    free = settings_marked(TrainConfig, "may_change_on_resume")
    kinds = STRATEGY_KINDS[before["strategy"]], config.placement.kind
    if not any(kind.packs_hot_batches for kind in kinds) and not before["refresh_hot"]:
        free |= settings_marked(TrainConfig, "may_change_with_strategy")
    for name, value in config.to_json().items():
        old = before[name]
        if name not in free and old != value:
            raise CheckpointError(
                f"{run} was trained with {name}={old!r} and is asked to resume with {name}={value!r}: pass the same "
                f"settings, or start a new run"
            )
