"""Settings of the optimizers of a model."""

from __future__ import annotations

from dataclasses import dataclass

from holdall.common.errors import ConfigError, did_you_mean
from holdall.optim.records import NAMES, RECORDS, OptimizerName, OptimizerRecord


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Name and hyperparameters of an optimizer."""

    name: OptimizerName = "rowwise_adagrad"
    lr: float = 0.01
    table_lr: float | None = None
    """Learning rate of the tables; `lr` when None."""
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    stochastic_seed: int | None = None
    """Seed of the stochastic rounding of bfloat16 and float16 rows (see `kernels.stochastic`); to nearest when None."""

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"unknown optimizer '{self.name}'{did_you_mean(self.name, NAMES)}")
        if not self.lr > 0 or (self.table_lr is not None and not self.table_lr > 0):
            raise ConfigError(f"learning rates must be above 0, not lr={self.lr}, table_lr={self.table_lr}")

    @property
    def record(self) -> OptimizerRecord:
        """State and updates of the optimizer of this name."""
        return RECORDS[self.name]
