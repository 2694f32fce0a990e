"""Everything a training run can be told, in one flat dataclass: its fields are the flags of `holdall train`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from holdall.common.errors import ConfigError
from holdall.common.settings import name_and_value, overlay, plain_value
from holdall.common.sizes import parse_bytes
from holdall.data.schema import Schema
from holdall.models import Model
from holdall.models.settings import ModelSettings
from holdall.optim.optimizers import OptimizerConfig, OptimizerName
from holdall.optim.schedule import Schedule
from holdall.planning.strategy_kinds import STRATEGY_KINDS, StrategyName, names_with
from holdall.tables import METHODS, Dense, Method, method_from_json
from holdall.tables.budget import MIN_ROWS, find_method, suggest
from holdall.tiers.pipeline import GPU_PREFETCH

OPTIONAL_COUNTS = (
    "steps",
    "evaluate_every",
    "early_stopping",
    "save_every",
    "save_hot_every",
    "refresh_hot",
    "merge_every",
)
"""Settings that are at least 1 where they are given."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelSettings):
    """Settings of a training run."""

    method: str | None = None
    """How large tables are stored: tensor_train, frobenius, hashed, ... or auto; dense when absent."""
    rank: int | None = None
    """Rank of the method, for those that have one."""
    setting: tuple[str, ...] = ()
    """Further settings of the method, such as terms=4 or buckets=10000."""
    budget: str | None = None
    """Bytes for all tables together, such as 16MB, or a share of the dense bytes, such as 1/20: sizes the method."""
    min_rows: int | None = None
    """Tables with fewer rows stay dense: by default those the budget has room for, or below 1,000 rows without one."""

    strategy: StrategyName = "plain"
    """Where tables live: plain, on the device; host, on the host and looked up there; split, their --hot-bytes most
    popular rows on the device and the others on the host; hot-batches, as split, with batches that need no others. For
    several processes (torchrun): data-parallel, all on each, gradients summed; two-fold, hot rows on each and the
    others dealt out; table-wise, each table on one; local, tables of each process's own, merged at times."""
    merge_every: int | None = None
    """Steps between merges of the tables that processes learn under local; only at checkpoints when absent."""
    timeout: float = 300.0
    """Seconds that a process waits for the others in a step before it gives up."""
    plan: str | None = None
    """plan.json, as `holdall plan` makes it: decides how and where tables are stored, in the place of --strategy."""
    hot_bytes: str | None = None
    """Bytes of hot rows, with their optimizer state, that split and hot-batches keep on the device, such as 256MB, and
    two-fold on every process, which chooses by --hardware when absent."""
    hardware: str | None = None
    """hardware.json of `torchrun -m holdall hardware`: rates of the exchange, by which two-fold chooses hot rows."""
    tail: Literal["host", "disk"] = "host"
    """Where the rows that are not hot live: in memory, or in files of the run folder, which may be larger than it."""
    profile: str | None = None
    """popularity.json of the data set, to choose hot rows by; its training split is counted when absent."""
    refresh_hot: int | None = None
    """Steps after which split looks again at which rows are hot, counted while training; never when absent."""

    prefetch: int | None = None
    """Steps ahead of the computation at which split and hot-batches fetch the rows of a batch; two-fold: 0 or 1. When
    absent, 2 for those that one process follows on a GPU, which computes meanwhile, and else 0."""
    fetch_by: Literal["auto", "kernel", "copy"] = "auto"
    """What moves rows between the host and a GPU: copy, the host gathers them and copies them in one piece; kernel, a
    kernel on the GPU reaches them where they lie, and all of them are locked in memory; auto, the faster of the two."""
    consistency: Literal["exact", "stale"] = "exact"
    """What a row fetched ahead may miss: nothing (the result is that of --prefetch 0), or the steps in between."""

    epochs: int = 1
    """Passes over the training split."""
    steps: int | None = None
    """Steps to train for, instead of whole epochs."""
    batch_size: int = 2048
    """Samples a step."""
    negatives: int = 4
    """Items drawn anew every epoch for each event of implicit data (movielens, taobao, yelp); they count in a batch."""
    shuffle: Literal["blocks", "rows", "none"] = "blocks"
    """Order of samples: contiguous blocks in random order (no copy), every row at random, or as they lie."""

    optimizer: OptimizerName = "rowwise_adagrad"
    """Optimizer; table rows are updated only where they were touched."""
    lr: float = 0.01
    """Learning rate."""
    table_lr: float | None = None
    """Learning rate of the tables; that of the rest when absent."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    decay_start: int = 0
    """Step at which the learning rate starts to fall."""
    decay_steps: int = 0
    """Steps over which it falls to 0, as a polynomial; 0 for a constant rate."""
    decay_power: float = 2.0
    """Power of that polynomial."""
    l2: float = 0.0
    """Weight of the squared lengths of the vectors a sample looks up, added to its loss, so that rows stay short."""
    clip_norm: float | None = None
    """Largest joint norm of all gradients; larger ones are scaled down."""

    evaluate_every: int | None = None
    """Steps between evaluations on the validation split; at the end of each epoch when absent."""
    early_stopping: int | None = None
    """Stop after so many evaluations without a better --best-by on the validation split, and keep the best model."""
    best_by: Literal["auto", "logloss", "auc", "ndcg", "hr"] = "auto"
    """What makes a model the best: auto is ndcg (NDCG@K) where the validation split has ranking cases, else logloss."""
    rank_at: int = 10
    """K of HR@K and NDCG@K, measured at each evaluation where the validation split has ranking cases; 0: don't."""

    save_every: int | None = None
    """Steps between checkpoints; one is always written at the end."""
    save_hot_every: int | None = None
    """Steps between checkpoints of hot rows and the dense part alone, with strategies that have hot rows. Going on from
    one loses what the other rows learned since the last full one."""
    save_in_background: bool = True
    """Train on while a checkpoint is written, where its copy takes at most a quarter of the free memory."""
    keep: int = 2
    """Checkpoints to keep."""
    log_every: int = 50
    """Steps between rows of metrics.jsonl."""

    seed: int = 0
    """Seed of the initial weights and of the order of samples."""
    deterministic: bool = False
    """Only operations whose result does not vary: the same run twice gives the same bits."""
    precision: Literal["float32", "bf16"] = "float32"
    """Arithmetic of the MLPs and the interaction; tables stay in the type of --table-dtype."""
    table_dtype: Literal["float32", "bf16", "fp16"] = "float32"
    """Type in which the rows of dense tables are stored; they are computed with in float32."""
    stochastic_rounding: bool = False
    """Round updated bf16 and fp16 rows up or down at random: updates too small for the type then count in the mean."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Kernels: triton, plain torch, or auto for triton on a GPU where its kernels fit."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Replay a captured step instead of launching its kernels one by one: auto where a step can be captured."""
    compile: bool = False
    """Compile the dense part of the model."""
    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1, or auto for a GPU if there is one."""

    def __post_init__(self) -> None:
        self.model_config()  # refuses what does not go together
        self.optimizer_config()
        self.schedule()
        self._check_method()
        for name in ("epochs", "batch_size", "negatives", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        self._check_strategy()
        for name in OPTIONAL_COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if not self.timeout > 0:
            raise ConfigError(f"--timeout must be above 0 seconds, not {self.timeout}")
        if not self.l2 >= 0:
            raise ConfigError(f"--l2 must be 0 or more, not {self.l2}")
        if self.stochastic_rounding and self.table_dtype == "float32":
            raise ConfigError(
                "--stochastic-rounding is for tables in bf16 or fp16: give --table-dtype, or leave it out"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"--clip-norm must be above 0, not {self.clip_norm}")
        for name in ("seed", "rank_at"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(self, name)}")
        if self.best_by in ("ndcg", "hr") and not self.rank_at:
            raise ConfigError(f"--best-by {self.best_by} needs ranking, which --rank-at 0 turns off")

    def _check_strategy(self) -> None:
        kind = STRATEGY_KINDS[self.strategy]
        with_hot_rows, with_tail = names_with("has_hot_rows"), names_with("keeps_tail")
        if self.plan is not None:
            for name in ("method", "budget", "hot_bytes", "refresh_hot"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"--plan decides how tables are stored: leave --{name.replace('_', '-')} out")
        elif kind.keeps_tail and self.hot_bytes is None:
            raise ConfigError(f"--strategy {self.strategy} needs --hot-bytes, such as --hot-bytes 256MB")
        if self.hot_bytes is not None:
            if not kind.has_hot_rows:
                raise ConfigError(f"--hot-bytes goes with {with_hot_rows}, not with --strategy {self.strategy}")
            parse_bytes(self.hot_bytes)
        if self.tail != "host" and not kind.keeps_tail:
            raise ConfigError(f"--tail goes with {with_tail}, not with --strategy {self.strategy}")
        if self.profile is not None and not kind.has_hot_rows:
            raise ConfigError(f"--profile goes with {with_hot_rows}, not with --strategy {self.strategy}")
        if self.hardware is not None and not kind.shards_rows:
            raise ConfigError(f"--hardware goes with --strategy {names_with('shards_rows')}, not with {self.strategy}")
        if self.save_hot_every is not None:
            if not kind.has_hot_rows or self.refresh_hot is not None:
                raise ConfigError(
                    f"--save-hot-every goes with {with_hot_rows}, whose hot rows stay the same, not with --strategy "
                    f"{self.strategy}{' --refresh-hot' if self.refresh_hot is not None else ''}"
                )
            if self.save_every is None:
                raise ConfigError("--save-hot-every needs --save-every: hot rows are laid over a full checkpoint")
        if self.merge_every is not None and not kind.merges_tables:
            merging = names_with("merges_tables")
            raise ConfigError(f"--merge-every goes with --strategy {merging}, not with {self.strategy}")
        if self.clip_norm is not None and kind.merges_tables:
            raise ConfigError(
                f"--clip-norm needs the norm of all gradients, which no process of --strategy {self.strategy} has"
            )
        if self.prefetch is not None and self.prefetch < 0:
            raise ConfigError(f"--prefetch must be 0 (nothing runs ahead) or more, not {self.prefetch}")
        if self.fetch_by == "kernel" and (not (kind.keeps_tail or self.plan) or self.consistency == "stale"):
            raise ConfigError(f"--fetch-by kernel goes with {with_tail}, and with --consistency exact")
        if self.prefetch and kind.max_prefetch == 0:
            raise ConfigError(f"--prefetch goes with {with_hot_rows}, not with --strategy {self.strategy}")
        if kind.max_prefetch and ((self.prefetch or 0) > kind.max_prefetch or self.consistency == "stale"):
            raise ConfigError(
                f"{self.strategy} fetches the rows of the next step, exactly: --prefetch is 0 or {kind.max_prefetch} "
                f"and --consistency exact"
            )
        if self.refresh_hot is not None and not kind.refreshes_hot:
            raise ConfigError(
                f"--refresh-hot goes with --strategy {names_with('refreshes_hot')}, not with {self.strategy}: hot "
                f"batches are packed for hot rows that stay the same"
            )

    def _check_method(self) -> None:
        settings = self.rank is not None or bool(self.setting)
        if self.method is None:
            if settings:
                raise ConfigError("--rank and --setting describe a --method: name one, such as --method tensor_train")
        elif self.budget is not None:
            if self.method != "auto":
                find_method(self.method)
            if settings:
                raise ConfigError("--budget chooses the settings of the method: give it or --rank/--setting, not both")
        elif self.method == "auto":
            raise ConfigError("--method auto needs a --budget to work towards, such as --budget 16MB")
        else:
            self._given_method()

    def build_model(
        self, schema: Schema, *, device: torch.device | str = "cpu", dense_device: torch.device | str | None = None
    ) -> Model:
        """The model these settings describe, freshly initialised, for a data set; devices as `ModelConfig.build`."""
        methods = self.table_methods(schema)
        model = self.model_config().build(schema, methods, device=device, dense_device=dense_device)
        if self.table_dtype != "float32":
            model.bags.vector_dtype = torch.float32
        return model

    def table_methods(self, schema: Schema) -> dict[str, Method] | None:
        """How each table is stored, by table name; None when all are dense in float32."""
        if self.plan is not None:
            from holdall.planning.plan import Plan  # plans are made from these settings, so not at the top

            return Plan.load(self.plan).methods()
        methods = self._compressed(schema)
        if self.table_dtype == "float32":
            return methods
        dense = Dense(dtype="bfloat16" if self.table_dtype == "bf16" else "float16")
        found = methods or {}
        names = self.model_config().table_rows(schema)
        return {name: dense if found.get(name, Dense()) == Dense() else found[name] for name in names}

    def _compressed(self, schema: Schema) -> dict[str, Method] | None:
        if self.method is None and self.budget is None:
            return None
        cardinalities = self.model_config().table_rows(schema)
        if self.budget is not None:
            dim, name = self.model_config().dim, self.method or "auto"
            return suggest(cardinalities, dim, self.budget, name, min_rows=self.min_rows or 0)
        method = self._given_method()
        min_rows = MIN_ROWS if self.min_rows is None else self.min_rows
        return {name: method for name, rows in cardinalities.items() if rows >= min_rows}

    def _given_method(self) -> Method:
        """The method that `method`, `rank` and `setting` spell out."""
        document: dict[str, Any] = {"method": self.method}
        if self.rank is not None:
            document["rank"] = self.rank
        for pair in self.setting:
            name, value = name_and_value(pair, "--setting")
            document[name] = {"method": value} if value in METHODS else plain_value(value)
        return method_from_json(document)

    def prefetch_depth(self, device: torch.device) -> int:
        """How many steps ahead one process fetches rows: as was said, or as pays on such a device."""
        if self.prefetch is not None:
            return self.prefetch
        return GPU_PREFETCH if device.type == "cuda" and self.consistency == "exact" else 0

    def optimizer_config(self) -> OptimizerConfig:
        seed = self.seed if self.stochastic_rounding else None
        return OptimizerConfig(name=self.optimizer, lr=self.lr, table_lr=self.table_lr, stochastic_seed=seed)

    def schedule(self) -> Schedule:
        return Schedule(
            warmup_steps=self.warmup_steps,
            decay_start=self.decay_start,
            decay_steps=self.decay_steps,
            power=self.decay_power,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TrainConfig:
        return overlay(cls(), document, "the settings of the run")
