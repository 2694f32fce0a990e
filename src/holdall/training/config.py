"""Everything a training run can be told, in one flat dataclass: its fields are the flags of `holdall train`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

from holdall.errors import ConfigError, did_you_mean
from holdall.models import Model, ModelConfig, configuration
from holdall.schema import Schema
from holdall.settings import overlay
from holdall.tables import METHODS, Method, method_from_json
from holdall.tables.budget import MIN_ROWS, find_method, suggest
from holdall.training.optimizers import OptimizerConfig, OptimizerName
from holdall.training.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run."""

    model: str = "dlrm"
    """Model to train: dlrm, dcn, ncf, tbsm, or a named configuration such as rmc2, dlrm-small, gmf, syn-m1."""
    dim: int | None = None
    """Numbers in a table's row; the model's own when absent."""
    bottom: tuple[int, ...] | None = None
    """Hidden layers of the bottom MLP; the model's own when absent."""
    top: tuple[int, ...] | None = None
    """Hidden layers of the top MLP; the model's own when absent."""
    interaction: Literal["dot", "concat"] | None = None
    """How vectors meet; the model's own when absent."""
    model_setting: tuple[str, ...] = ()
    """Further settings of the model, such as factors=16 (ncf), rank=64 (dcn) or event=15,15 (tbsm)."""
    model_scale: float = 1.0
    """Factor by which the hidden layers of the named configuration are made wider or narrower."""

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
    clip_norm: float | None = None
    """Largest joint norm of all gradients; larger ones are scaled down."""

    evaluate_every: int | None = None
    """Steps between evaluations on the validation split; at the end of each epoch when absent."""
    early_stopping: int | None = None
    """Stop after so many evaluations without a better logloss, and keep the best model."""

    save_every: int | None = None
    """Steps between checkpoints; one is always written at the end."""
    keep: int = 2
    """Checkpoints to keep."""
    log_every: int = 50
    """Steps between rows of metrics.jsonl."""

    seed: int = 0
    """Seed of the initial weights and of the order of samples."""
    deterministic: bool = False
    """Only operations whose result does not vary: the same run twice gives the same bits."""
    precision: Literal["float32", "bf16"] = "float32"
    """Arithmetic of the MLPs and the interaction; tables stay in float32."""
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
        for name in ("steps", "evaluate_every", "early_stopping", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"--clip-norm must be above 0, not {self.clip_norm}")
        if self.seed < 0:
            raise ConfigError(f"--seed must be 0 or more, not {self.seed}")

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

    def model_config(self) -> ModelConfig:
        """The named configuration, scaled, with the sizes that were given in its place."""
        named = configuration(self.model).scaled(self.model_scale)
        known = {field.name for field in fields(named)}  # type: ignore[arg-type]
        given = {name: getattr(self, name) for name in ("dim", "bottom", "top", "interaction")}
        given = {name: value for name, value in given.items() if value is not None}
        for pair in self.model_setting:
            name, value = _name_and_value(pair, "--model-setting")
            several = "," in value or isinstance(getattr(named, name, None), tuple)
            given[name] = _listed(value) if several else _plain_value(value)
        for name in given:
            if name not in known:
                raise ConfigError(f"{named.family} has no '{name}'{did_you_mean(name, known)}")
        return overlay(named, given, f"model {self.model}")

    def build_model(self, schema: Schema, *, device: torch.device | str = "cpu") -> Model:
        """The model these settings describe, freshly initialised, for a data set."""
        return self.model_config().build(schema, self.table_methods(schema), device=device)

    def table_methods(self, schema: Schema) -> dict[str, Method] | None:
        """How each table is stored, by table name; None when all are dense."""
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
            name, value = _name_and_value(pair, "--setting")
            document[name] = {"method": value} if value in METHODS else _plain_value(value)
        return method_from_json(document)

    def optimizer_config(self) -> OptimizerConfig:
        return OptimizerConfig(name=self.optimizer, lr=self.lr, table_lr=self.table_lr)

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


def _name_and_value(pair: str, flag: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not equals:
        raise ConfigError(f"{flag} takes name=value, not {pair!r}")
    return name.replace("-", "_"), value


def _listed(text: str) -> tuple[Any, ...]:
    """Values with commas between them."""
    return tuple(_plain_value(item) for item in text.split(",") if item)


def _plain_value(text: str) -> int | float | bool | str:
    """A setting's value from the command line: a number or true/false where it reads as one."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
