"""Settings of a training run, in parts. Each setting is a flag of `holdall train` and a key of run.json.

Imports no torch until a model is built: `--help` needs the settings alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from holdall.common.errors import ConfigError
from holdall.common.settings import Settings, flat_settings, overlay, refuse_below
from holdall.data.schema import Schema
from holdall.data.shuffle import Shuffle
from holdall.optim.config import OptimizerConfig
from holdall.planning.model_settings import ModelSettings
from holdall.planning.strategy_kinds import names_with
from holdall.planning.table_settings import TableSettings
from holdall.training.setting_groups import (
    MAY_CHANGE,
    CheckpointSettings,
    DeviceSettings,
    EvaluationSettings,
    OptimizerSettings,
    PlacementSettings,
    ProcessSettings,
    ScheduleSettings,
    refuse_with_plan,
)

if TYPE_CHECKING:
    import torch

    from holdall.models import Model
    from holdall.planning.table_settings import TableUsage
    from holdall.tables import Method


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """Settings of a training run.

    Settings are given by name, or in their parts:

        config = TrainConfig.of(epochs=2, strategy="split", hot_bytes="256MB")
        config == TrainConfig(epochs=2, placement=PlacementSettings(strategy="split", hot_bytes="256MB"))
        config.replace(epochs=3).placement.hot_bytes
    """

    REMOVED: ClassVar[dict[str, Any]] = {"consistency": "exact"}
    """Settings of earlier versions, with the one value that files may still have."""

    epochs: int = field(default=1, metadata=MAY_CHANGE)
    """Passes over the training split."""
    steps: int | None = field(default=None, metadata=MAY_CHANGE)
    """Steps to train for, instead of whole epochs."""
    batch_size: int = 2048
    """Samples in a step, over all processes."""
    shuffle: Shuffle | Literal["auto"] = "auto"
    """Order of samples: short runs of neighbours from everywhere (chunks), contiguous batches in random order (blocks),
    single rows in random order, or as stored (none). auto: chunks, on a GPU blocks where rows are not sorted; a resumed
    run keeps its order."""
    negatives: int = 4
    """Negative items drawn in every epoch for each event of implicit data (movielens, taobao, yelp).
    They count as samples of a batch. two-tower draws none: its negatives are the other items of a batch."""
    seed: int = 0
    """Seed of the initial weights and of the order of samples."""
    log_every: int = field(default=50, metadata=MAY_CHANGE)
    """Steps between rows of metrics.jsonl."""
    pretrained: tuple[str, ...] = ()
    """Vectors that rows start from: user=vectors.parquet, a feature and a file with the columns value (raw) and vector,
    as `Scorer.write_vectors` writes it. Other rows start as usual."""

    model: ModelSettings = field(default_factory=ModelSettings)
    tables: TableSettings = field(default_factory=TableSettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    processes: ProcessSettings = field(default_factory=ProcessSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    device: DeviceSettings = field(default_factory=DeviceSettings)

    def __post_init__(self) -> None:
        self.check_parts()
        refuse_below(1, self, "epochs", "steps", "batch_size", "negatives", "log_every")
        refuse_below(0, self, "seed")
        if self.negatives != type(self).negatives and self.model.model_config().in_batch_negatives:
            raise ConfigError(f"{self.model.model} takes the items of its batch as negatives: leave --negatives out")
        if self.placement.plan is not None:
            refuse_with_plan(self.tables, "method")
            refuse_with_plan(self.tables, "budget")
        self._check_strategy()

    def _check_strategy(self) -> None:
        """Refuse settings of other parts that do not go with the strategy."""
        strategy, kind = self.placement.strategy, self.placement.kind
        refreshes = self.placement.refresh_hot is not None
        if self.checkpoint.save_hot_every is not None and (refreshes or not kind.has_hot_rows):
            raise ConfigError(
                f"--save-hot-every goes with {names_with('has_hot_rows')}, whose hot rows stay the same, not with "
                f"--strategy {strategy}{' --refresh-hot' if refreshes else ''}"
            )
        if self.processes.merge_every is not None and not kind.merges_tables:
            raise ConfigError(f"--merge-every goes with --strategy {names_with('merges_tables')}, not with {strategy}")
        if self.optimizer.clip_norm is not None and kind.merges_tables:
            raise ConfigError(
                f"--clip-norm needs the norm of all gradients, which no process of --strategy {strategy} has"
            )

    @property
    def num_negatives(self) -> int:
        """Negatives drawn for each event of implicit data."""
        return 0 if self.model.model_config().in_batch_negatives else self.negatives

    @property
    def sample_order(self) -> Shuffle:
        """Order of samples of the loader."""
        return "chunks" if self.shuffle == "auto" else self.shuffle

    def build_model(
        self,
        schema: Schema,
        methods: Mapping[str, Method] | None = None,
        *,
        device: torch.device | str = "cpu",
        dense_device: torch.device | str | None = None,
    ) -> Model:
        """The model these settings describe, freshly initialised, for a data set; devices as `ModelConfig.build`.

        `methods` are those of the tables of a run, by table (`training.table_methods`); `table_methods` when None.
        """
        methods = self.table_methods(schema) if methods is None else methods
        model = self.model.model_config().build(schema, methods, device=device, dense_device=dense_device)
        if self.tables.table_dtype != "float32":
            import torch

            model.bags.vector_dtype = torch.float32
        return model

    def table_methods(self, schema: Schema, usage: TableUsage | None = None) -> dict[str, Method] | None:
        """Method of each table, by table name: of the plan if there is one; None when all are dense in float32.

        `usage` as in `TableSettings.methods`.
        """
        model = self.model.model_config()
        num_rows = model.table_rows(schema)
        has_plan = self.placement.plan is not None
        if self.placement.plan is not None:
            from holdall.planning.plan import Plan

            methods: dict[str, Method] | None = Plan.load(self.placement.plan).methods()
        else:
            methods = self.tables.methods(num_rows, model.dim, usage)
        features = model.reads(schema).features
        stored = {feature.table or feature.name: feature.dim for feature in features if feature.dim is not None}
        return self.tables.with_dims(methods, stored, num_rows, model.dim, has_plan=has_plan)

    def optimizer_config(self) -> OptimizerConfig:
        """The optimizer to build, with the run's seed if rows are rounded stochastically."""
        seed = self.seed if self.tables.stochastic_rounding else None
        return self.optimizer.optimizer_config(self.model.model_config().family, seed)

    def to_json(self) -> dict[str, Any]:
        """Every setting by name, without parts: the form of run.json."""
        return flat_settings(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        return overlay(cls(), document, "the settings of the run")
