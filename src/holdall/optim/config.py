"""Settings of the optimizers of a model. Imports no torch: `--help` needs the settings alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from holdall.common.errors import ConfigError
from holdall.common.settings import check_types

if TYPE_CHECKING:
    from holdall.optim.optimizer_kinds import OptimizerKind

OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "rowwise_adagrad_adam", "adam", "adamw"]
NAMES: tuple[str, ...] = get_args(OptimizerName)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Name and hyperparameters of an optimizer."""

    name: OptimizerName = "rowwise_adagrad"
    lr: float = 0.01
    table_lr: float | None = None
    """Learning rate of the tables; `lr` when None."""
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.0
    """Momentum of `sgd`: b = momentum * b + g; w -= lr * b. A row's b decays only in steps that touch the row."""
    weight_decay: float = 0.0
    """Adds `weight_decay * w` to the gradient w has; `adamw` shrinks w by `lr * weight_decay` instead. Rows decay only
    in steps that touch them, dense parameters in every step."""
    stochastic_seed: int | None = None
    """Seed of the stochastic rounding of bfloat16 and float16 rows (see `kernels.stochastic`); to nearest when None."""

    def __post_init__(self) -> None:
        check_types(self)
        if not self.lr > 0 or (self.table_lr is not None and not self.table_lr > 0):
            raise ConfigError(f"learning rates must be above 0, not lr={self.lr}, table_lr={self.table_lr}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be from 0 to below 1, not {self.momentum}")
        if self.momentum and self.name != "sgd":
            raise ConfigError(f"momentum goes with sgd, not with {self.name}: leave it out")
        if not self.weight_decay >= 0:
            raise ConfigError(f"weight decay must be 0 or more, not {self.weight_decay}")

    @property
    def kind(self) -> OptimizerKind:
        """State and updates of this optimizer."""
        from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS

        return OPTIMIZER_KINDS["momentum_sgd" if self.momentum else self.name]

    @classmethod
    def of_record(cls, name: str) -> OptimizerConfig:
        """A config with the kind of that name; its numbers are any."""
        return cls(name="sgd", momentum=0.9) if name == "momentum_sgd" else cls(name=name)  # type: ignore[arg-type]
