"""Groups of the training settings: field `hot_bytes` is the flag `--hot-bytes`, and a group is a panel of `--help`.

Each group checks its own rules and builds the component it describes. Neither torch nor that component is imported
before: `--help` needs the settings alone.

Metadata of a field says whether the setting may change when a run is resumed, or differ between processes. The groups
of the model and of the tables are `planning.model_settings.ModelSettings` and `planning.table_settings.TableSettings`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from holdall.common.errors import ConfigError
from holdall.common.settings import check_types, flag, refuse_below
from holdall.common.sizes import parse_bytes
from holdall.optim.config import OptimizerConfig, OptimizerName
from holdall.optim.schedule import Schedule
from holdall.planning.strategy_kinds import STRATEGY_KINDS, StrategyKind, StrategyName, names_with

if TYPE_CHECKING:
    import torch

MAY_CHANGE = {"may_change_on_resume": True}
"""Metadata of settings that a resumed run may change: its length, its files, its device."""
MAY_CHANGE_WITH_STRATEGY = {"may_change_with_strategy": True}
"""Metadata of settings that a resumed run may change where both strategies see samples in the same order."""
MAY_DIFFER_BY_RANK = {"may_differ_by_rank": True}
"""Metadata of settings that may differ between the processes of a run."""

DEFAULT_OPTIMIZER: OptimizerName = "rowwise_adagrad_adam"
DEFAULT_RATE = 0.01
"""Learning rate where none is given, of everything that has no entry in `DEFAULT_RATES`."""
_ADAGRAD = {
    "dlrm": (0.002, 0.06),
    "dcn": (0.002, 0.06),
    "din": (0.002, 0.06),
    "deepfm": (0.004, 0.02),
    "two-tower": (0.003, 0.06),
}
_ADAM = {
    "dlrm": (0.001, 0.1),
    "dcn": (0.001, 0.1),
    "deepfm": (0.001, 0.02),
    "ncf": (0.001, 0.2),
    "tbsm": (0.01, 0.1),
    "din": (0.003, 0.2),
    "two-tower": (0.0003, 0.1),
    "any other": (0.001, 0.1),
}
DEFAULT_RATES = {"rowwise_adagrad_adam": _ADAM, "rowwise_adagrad": _ADAGRAD, "adagrad": _ADAGRAD}
"""Learning rates of the network and of the tables where none is given, by optimizer and family of models, chosen on the
validation splits of public samples (`benchmarks/defaults.py`). The first steps of Adagrad and Adam move every number by
the rate itself, and 0.01 in wide layers overshoots; small layers, as TBSM's, need it. The rows of a DeepFM are summands
of its logit, so their rate is lower."""


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """Placement of table rows: where they are stored and how they reach the device."""

    strategy: StrategyName = field(default="plain", metadata=MAY_CHANGE_WITH_STRATEGY)
    """Where table rows are stored. For one process:
    plain: on the device.
    host: in host memory, where they are looked up.
    split: the most popular rows (--hot-bytes) on the device, the others on the host or on disk.
    hot-batches: as split, with batches that look up hot rows only.
    For several processes (torchrun):
    data-parallel: all tables on each process, gradients summed.
    two-fold: hot rows on each process, the others sharded.
    table-wise: each table on one process.
    local: tables of its own on each process, merged at intervals."""
    plan: str | None = None
    """plan.json that `holdall plan` wrote. It decides how and where tables are stored, instead of --strategy."""
    hot_bytes: str | None = field(default=None, metadata=MAY_CHANGE_WITH_STRATEGY)
    """Bytes of hot rows with their optimizer state, such as 256MB. split and hot-batches keep them on the device.
    two-fold keeps them on every process; when absent, it chooses them by --hardware."""
    hardware: str | None = field(default=None, metadata=MAY_CHANGE_WITH_STRATEGY)
    """hardware.json that `torchrun -m holdall hardware` wrote: rates by which two-fold chooses hot rows."""
    tail: Literal["host", "disk"] = field(default="host", metadata=MAY_CHANGE_WITH_STRATEGY)
    """Where rows that are not hot are stored: in host memory, or in files of the run folder."""
    profile: str | None = field(default=None, metadata=MAY_CHANGE_WITH_STRATEGY)
    """popularity.json of the data set, to choose hot rows by; when absent, the training split is counted."""
    refresh_hot: int | None = None
    """Steps between new choices of the hot rows of split, by counts made while training; never when absent."""
    prefetch: int | None = field(default=None, metadata=MAY_CHANGE_WITH_STRATEGY)
    """Steps ahead at which the rows of a batch are fetched (split, hot-batches; two-fold: 0 or 1).
    When absent: 2 for one process with a GPU, else 0."""
    fetch_by: Literal["auto", "kernel", "copy"] = field(default="auto", metadata=MAY_CHANGE_WITH_STRATEGY)
    """How rows move between the host and a GPU.
    copy: the host gathers them and copies them in one piece.
    kernel: a GPU kernel reads and writes them in host memory, all of which is page-locked.
    auto: the faster of the two."""

    def __post_init__(self) -> None:
        check_types(self)
        refuse_below(1, self, "refresh_hot")
        if self.plan is not None:
            for name in ("hot_bytes", "refresh_hot"):
                refuse_with_plan(self, name)
        elif self.kind.keeps_tail and self.hot_bytes is None:
            raise ConfigError(f"--strategy {self.strategy} needs --hot-bytes, such as --hot-bytes 256MB")
        self._check_hot_rows()
        self._check_fetching()

    @property
    def kind(self) -> StrategyKind:
        """Capabilities of the strategy."""
        return STRATEGY_KINDS[self.strategy]

    def _check_hot_rows(self) -> None:
        for name in ("hot_bytes", "profile"):
            if getattr(self, name) is not None and not self.kind.has_hot_rows:
                raise self._misplaced(name, "has_hot_rows")
        if self.hot_bytes is not None:
            parse_bytes(self.hot_bytes)
        if self.tail != "host" and not self.kind.keeps_tail:
            raise self._misplaced("tail", "keeps_tail")
        if self.hardware is not None and not self.kind.shards_rows:
            raise ConfigError(f"--hardware goes with --strategy {names_with('shards_rows')}, not with {self.strategy}")
        if self.refresh_hot is not None and not self.kind.refreshes_hot:
            raise ConfigError(
                f"--refresh-hot goes with --strategy {names_with('refreshes_hot')}, not with {self.strategy}: hot "
                f"batches are packed for hot rows that stay the same"
            )

    def _check_fetching(self) -> None:
        most = self.kind.max_prefetch
        if self.prefetch is not None and self.prefetch < 0:
            raise ConfigError(f"--prefetch must be 0 (nothing runs ahead) or more, not {self.prefetch}")
        if self.prefetch and most == 0:
            raise self._misplaced("prefetch", "has_hot_rows")
        if most is not None and (self.prefetch or 0) > most:
            raise ConfigError(f"{self.strategy} fetches the rows of the next step only: --prefetch is 0 or {most}")
        if self.fetch_by == "kernel" and not (self.kind.keeps_tail or self.plan):
            raise self._misplaced("fetch_by", "keeps_tail", " kernel")

    def _misplaced(self, name: str, capability: str, value: str = "") -> ConfigError:
        """The error for a setting that strategies with a capability take, and this one does not."""
        return ConfigError(
            f"{flag(name)}{value} goes with {names_with(capability)}, not with --strategy {self.strategy}"
        )

    def prefetch_depth(self, device: torch.device) -> int:
        """Steps ahead at which one process fetches rows: as given, or the default of the device."""
        if self.prefetch is not None:
            return self.prefetch
        from holdall.tiers.pipeline import GPU_PREFETCH

        return GPU_PREFETCH if device.type == "cuda" else 0


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Processes of a run under torchrun."""

    merge_every: int | None = field(default=None, metadata=MAY_CHANGE_WITH_STRATEGY)
    """Steps between merges of the tables of all processes (local); only at checkpoints when absent."""
    timeout: float = field(default=300.0, metadata=MAY_CHANGE)
    """Seconds that a process waits for the others in a step before it fails."""

    def __post_init__(self) -> None:
        check_types(self)
        refuse_below(1, self, "merge_every")
        if not self.timeout > 0:
            raise ConfigError(f"--timeout must be above 0 seconds, not {self.timeout}")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Optimizer, its rates, and what limits its updates."""

    optimizer: OptimizerName | None = None
    """Optimizer of all parameters. When absent rowwise_adagrad_adam, which is row-wise Adagrad for tables and Adam for
    the rest; a resumed run keeps its own. Table rows are updated only where a batch looks them up."""
    lr: float | None = None
    """Learning rate. When absent, one chosen for the family of models and the optimizer: 0.001, and 0.1 for the tables,
    of dlrm and dcn."""
    table_lr: float | None = None
    """Learning rate of the tables; --lr when absent, if that is given."""
    momentum: float = 0.0
    """Momentum of sgd. That of a table row decays only in steps that look the row up."""
    weight_decay: float = 0.0
    """Weight decay as in torch's optimizers. Table rows decay only in steps that look them up."""
    l2: float = 0.0
    """Weight of an L2 penalty on the vectors that a sample looks up, added to its loss."""
    clip_norm: float | None = None
    """Largest norm of all gradients taken as one vector; larger gradients are scaled down."""

    def __post_init__(self) -> None:
        check_types(self)
        self.optimizer_config("")
        if not self.l2 >= 0:
            raise ConfigError(f"--l2 must be 0 or more, not {self.l2}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"--clip-norm must be above 0, not {self.clip_norm}")

    @property
    def name(self) -> OptimizerName:
        """The optimizer as given, or the default."""
        return self.optimizer or DEFAULT_OPTIMIZER

    def rates(self, family: str) -> tuple[float, float | None]:
        """Learning rates of the dense part and of the tables, as given, or the defaults for a family of models."""
        if self.lr is not None:
            return self.lr, self.table_lr
        by_family = DEFAULT_RATES.get(self.name, {})
        lr, table_lr = by_family.get(family) or by_family.get("any other") or (DEFAULT_RATE, None)
        return lr, table_lr if self.table_lr is None else self.table_lr

    def optimizer_config(self, family: str, stochastic_seed: int | None = None) -> OptimizerConfig:
        """The optimizer to build; rows are rounded stochastically where a seed is given."""
        lr, table_lr = self.rates(family)
        return OptimizerConfig(
            name=self.name,
            lr=lr,
            table_lr=table_lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            stochastic_seed=stochastic_seed,
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Learning rate over the run: warm-up, plateau, polynomial decay."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    decay_start: int = 0
    """Step at which the decay starts."""
    decay_steps: int = 0
    """Steps over which the learning rate falls to 0; 0 for no decay."""
    decay_power: float = 2.0
    """Power of the polynomial that it follows."""

    def __post_init__(self) -> None:
        check_types(self)
        self.build()

    def build(self) -> Schedule:
        return Schedule(
            warmup_steps=self.warmup_steps,
            decay_start=self.decay_start,
            decay_steps=self.decay_steps,
            power=self.decay_power,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Evaluation on the validation split while training."""

    evaluate_every: int | None = None
    """Steps between evaluations; at the end of each epoch when absent."""
    early_stopping: int | None = None
    """Stop after this many evaluations without a better --best-by, and keep the best model."""
    keep_best: bool = field(default=True, metadata=MAY_CHANGE)
    """Keep the model of the best evaluation, which evaluate and release then use; early stopping always does.
    The strategy local keeps the last one, since its processes would have to merge their tables."""
    best_by: Literal["auto", "logloss", "auc", "ndcg", "hr"] = "auto"
    """Metric of the best model. auto: ndcg (NDCG@K) if the validation split has ranking cases, else logloss, and
    AUC for two-tower, whose scores are no probabilities."""
    rank_at: int = 10
    """K of HR@K and NDCG@K, measured if the validation split has ranking cases; 0 to skip them."""

    def __post_init__(self) -> None:
        check_types(self)
        refuse_below(1, self, "evaluate_every", "early_stopping")
        refuse_below(0, self, "rank_at")
        if self.best_by in ("ndcg", "hr") and not self.rank_at:
            raise ConfigError(f"--best-by {self.best_by} needs ranking, which --rank-at 0 turns off")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints: how often they are written, and how many are kept."""

    save_every: int | None = field(default=None, metadata=MAY_CHANGE)
    """Steps between checkpoints; one is always written at the end."""
    save_hot_every: int | None = field(default=None, metadata=MAY_CHANGE)
    """Steps between small checkpoints of hot rows and the dense part, for strategies with hot rows.
    A run resumed from one loses what the other rows learned since the last full checkpoint."""
    save_in_background: bool = field(default=True, metadata=MAY_CHANGE)
    """Write checkpoints while training continues, if a copy takes at most a quarter of the free memory."""
    keep: int = field(default=2, metadata=MAY_CHANGE)
    """Checkpoints to keep."""

    def __post_init__(self) -> None:
        check_types(self)
        refuse_below(1, self, "keep", "save_every", "save_hot_every")
        if self.save_hot_every is not None and self.save_every is None:
            raise ConfigError("--save-hot-every needs --save-every: hot rows are laid over a full checkpoint")


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """Device, its arithmetic and its kernels."""

    device: str = field(default="auto", metadata=MAY_CHANGE | MAY_DIFFER_BY_RANK)
    """Device to train on: cpu, cuda, cuda:1, or auto for a GPU if there is one."""
    threads: int | None = field(default=None, metadata=MAY_CHANGE | MAY_DIFFER_BY_RANK)
    """Threads of operations on the CPU. When absent: those of OMP_NUM_THREADS, else the cores of this process, by its
    affinity and its cgroup's quota."""
    precision: Literal["float32", "bf16"] = "float32"
    """Arithmetic of the MLPs and the interaction; --table-dtype is that of tables."""
    deterministic: bool = False
    """Use deterministic operations only: the same run gives the same bits."""
    kernels: Literal["auto", "triton", "torch"] = field(default="auto", metadata=MAY_CHANGE | MAY_DIFFER_BY_RANK)
    """Kernels: triton, plain torch, or auto for triton on a GPU wherever it has a kernel."""
    cuda_graph: Literal["auto", "on", "off"] = field(default="auto", metadata=MAY_CHANGE)
    """Replay steps as a CUDA graph instead of launching each kernel; auto: where a step can be captured."""
    compile: bool = False
    """Compile the dense part of the model with torch.compile."""

    def __post_init__(self) -> None:
        check_types(self)
        refuse_below(1, self, "threads")


def refuse_with_plan(settings: object, name: str) -> None:
    """Raise if a setting is given that a plan decides."""
    if getattr(settings, name) is not None:
        raise ConfigError(f"--plan decides how tables are stored: leave {flag(name)} out")
