"""Settings of the planner: the model, the memory of each tier, the processes, the preset.

Imports no torch until a plan is made: `--help` needs the settings alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from holdall.common.errors import ConfigError
from holdall.common.settings import Settings, refuse_below
from holdall.common.sizes import check_budget, parse_bytes, parse_share
from holdall.optim.config import OptimizerConfig, OptimizerName
from holdall.planning.model_settings import ModelSettings
from holdall.planning.strategy_kinds import TIERS

if TYPE_CHECKING:
    from holdall.optim.optimizer_kinds import OptimizerKind
    from holdall.planning.plan import Caps, Plan


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Settings):
    """Settings of `holdall plan`."""

    device_memory: str | None = None
    """Most memory to use on the device, such as 4GB; what is free there when absent."""
    host_memory: str | None = None
    """Most memory to use on the host, such as 16GB; what is free there when absent."""
    disk_memory: str | None = None
    """Most space to use on the disk of the data, such as 1TB; what is free there when absent."""
    world_size: int = 1
    """Processes that train the model; memory is that of each."""
    batch_size: int = 2048
    """Samples a step, over all processes."""
    optimizer: OptimizerName = "rowwise_adagrad_adam"
    """Optimizer; its state is stored with the rows."""
    momentum: float = 0.0
    """Momentum of sgd, whose state is stored with the rows; whether there is one counts, not how much."""
    precision: Literal["float32", "bf16"] = "float32"
    """Arithmetic of the MLPs."""
    prefetch: int | None = None
    """Steps ahead that host and disk rows are fetched; when absent, 2 on one GPU, and else 0."""
    preset: str = "auto"
    """auto, or a published system: device, dlrm, tt-rec, el-rec, fpd, fae, p2res."""
    budget: str | None = None
    """Size of all tables in total, such as 16MB, or a share of their dense bytes, such as 1/20. Popular ids keep rows
    of their own and all tables are on the device, as `holdall train --budget` has them."""
    allow_compression: str | None = None
    """Smallest share of its bytes, such as 1/20, that a tail may be compressed to where that is faster.
    When absent, rows stay exact unless nothing else fits."""

    model: ModelSettings = field(default_factory=ModelSettings)

    def __post_init__(self) -> None:
        self.check_parts()
        self._optimizer_config()
        refuse_below(1, self, "world_size", "batch_size")
        refuse_below(0, self, "prefetch")
        if self.batch_size % self.world_size:
            raise ConfigError(
                f"a batch of {self.batch_size} samples does not divide among {self.world_size} processes: make "
                f"--batch-size a multiple of --world-size"
            )
        if self.preset != "auto":
            from holdall.planning.presets import find_preset

            find_preset(self.preset)
        self.compression_share()
        self._check_budget()
        self._memory()

    def optimizer_kind(self) -> OptimizerKind:
        """State and rates of the optimizer."""
        return self._optimizer_config().kind

    def _optimizer_config(self) -> OptimizerConfig:
        return OptimizerConfig(name=self.optimizer, momentum=self.momentum)

    def _check_budget(self) -> None:
        """Refuse a budget that is none, and settings that choose methods as well."""
        if self.budget is None:
            return
        check_budget(self.budget)
        given = {"--preset": self.preset != "auto", "--allow-compression": self.allow_compression is not None}
        for option in (name for name, is_given in given.items() if is_given):
            raise ConfigError(f"--budget and {option} both choose the methods of tables: leave one out")
        if self.world_size > 1:
            raise ConfigError(
                "--budget plans for one process: leave --world-size out, or train with --budget on several processes "
                "without a plan"
            )

    def compression_share(self) -> float | None:
        """The share of its bytes that a table may be compressed to; None where `allow_compression` is absent."""
        text = self.allow_compression
        if text is None:
            return None
        try:
            share = parse_share(text)
        except ConfigError:
            share = None
        if share is None:
            raise ConfigError(f"--allow-compression takes a share of a table's bytes, such as 1/20 or 5%, not {text!r}")
        return share

    def caps(self) -> Caps:
        """Bytes that a plan may use in each tier."""
        from holdall.planning.plan import Caps

        return Caps(**self._memory())

    def _memory(self) -> dict[str, int | None]:
        found = {}
        for tier in TIERS:
            text = getattr(self, f"{tier}_memory")
            try:
                found[tier] = None if text is None else parse_bytes(text)
            except ConfigError as error:
                raise ConfigError(f"--{tier}-memory: {error}") from None
        return found


def config_of(made: Plan) -> PlanConfig:
    """The settings that a plan was made with."""
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in made.model.items()}
    for tier in TIERS:
        size = getattr(made.caps, tier)
        settings[f"{tier}_memory"] = None if size is None else str(size)
    for name in ("world_size", "batch_size", "precision", "prefetch"):
        settings[name] = getattr(made, name)
    optimizer = OptimizerConfig.of_record(made.optimizer)
    settings |= {"optimizer": optimizer.name, "momentum": optimizer.momentum}
    return PlanConfig.of(**settings)
