"""Base class of models: the lookup in the tables, uncompiled and in float32, then a score, which may be compiled."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch, Ids
from holdall.data.dataset import DataSet
from holdall.data.schema import Schema
from holdall.embedding.bags import EmbeddingBags
from holdall.models.loss import logloss
from holdall.tables import Method

LookedUp = Tensor | tuple[Tensor, ...]
"""Result of `Model.lookup`, which is the input of `Model.score`."""
Gather = Callable[[Tensor], tuple[int, Tensor]]
"""Concatenation of a tensor over the samples of all processes, with gradients; and the place of this one's first."""
OUTPUT_SCALE = 1 / 4
"""Factor on the weights of the output layer of a fresh model; a power of two, so exact on every device. Less slows the
first steps: 9 steps on 19,000 Criteo rows, over four seeds, give a validation AUC of 0.723 with a factor of 1, 0.720
with 1/4 and 0.714 with 1/16."""


class Model(nn.Module):
    """Logits [B] of a batch: `score(batch.dense, lookup(batch))`."""

    bags: EmbeddingBags

    @property
    def output_layer(self) -> nn.Linear | None:
        """Layer whose one output is the logit; None where a model has no such layer."""
        return None

    def start_at_rate(self, rate: float) -> None:
        """Let a fresh model predict nearly `rate` for every sample: the loss then starts at that of the base rate.

        The bias of the output layer becomes the logit of `rate`, its weights are scaled by `OUTPUT_SCALE`.
        """
        layer = self.output_layer
        if layer is not None:
            with torch.no_grad():
                layer.weight.mul_(OUTPUT_SCALE)
                layer.bias.fill_(math.log(rate / (1.0 - rate)))

    def check(self, ids: Ids) -> None:
        """Raise, naming the place, unless this model can look up the ids of a batch on the host."""
        self.bags.check(ids)

    def lookup(self, batch: Batch) -> LookedUp:
        """The part that reads the tables; by default the pooled vectors [B, F, dim] of every feature."""
        return self.bags(batch.ids)

    def score(self, dense_BN: Tensor, looked_up: Any) -> Tensor:
        """Logits [B] from dense values and what `lookup` returned: the part that is compiled and run in bf16."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor:
        return self.score(batch.dense, self.lookup(batch))

    # --- training ----------------------------------------------------------------------------------------------------

    def read_training_split(self, data: DataSet) -> None:
        """Take from the training split what the loss needs beside its batches; called once, before the first step."""

    def training_outputs(self, dense_BN: Tensor, looked_up: Any) -> Any:
        """What the loss reads, from the inputs of `score`; by default the logits."""
        return self.score(dense_BN, looked_up)

    def training_loss(self, outputs: Any, batch: Batch, gather: Gather | None = None) -> Tensor:
        """Mean loss of a batch. `gather` is given for a share of a batch, if the config has `in_batch_negatives`."""
        return logloss(outputs, batch.label, batch.weight)


def batch_device(model: nn.Module) -> torch.device:
    """Device of a model's batches: that of its dense part; its tables may be on another."""
    tables = {id(p) for module in model.modules() if isinstance(module, EmbeddingBags) for p in module.parameters()}
    devices = [parameter.device for parameter in model.parameters() if id(parameter) not in tables]
    return devices[0] if devices else next(model.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode and autograd is off."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class ModelConfig(ABC):
    """Sizes of a model, apart from what the data set decides. Subclasses are frozen dataclasses."""

    family: ClassVar[str]
    """Its name on the command line; that of a model of one's own is its place, `package.module:Config`."""
    widths: ClassVar[tuple[str, ...]] = ()
    """Fields that `scaled` multiplies: sizes of hidden layers, as a tuple, one number or None."""

    def __init_subclass__(cls) -> None:
        if "family" not in vars(cls):  # a subclass of a config is another model
            cls.family = cls.own_name()

    @classmethod
    def own_name(cls) -> str:
        """Module and name of the class; the module of a script is the one that its file would be imported as."""
        module = cls.__module__
        if module == "__main__":
            spec, file = (getattr(sys.modules["__main__"], name, None) for name in ("__spec__", "__file__"))
            module = spec.name if spec is not None else module if file is None else Path(file).stem
        return f"{module}:{cls.__qualname__}"

    in_batch_negatives: ClassVar[bool] = False
    """Whether a sample is compared with the items of the others in its batch: no negatives are drawn, and scores rank
    items, but are no probabilities."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Numbers in a row of its tables."""

    def reads(self, schema: Schema) -> Schema:
        """A data set without the features that the model does not read; an error where it lacks one that it does."""
        return schema

    def reads_dense(self, schema: Schema) -> bool:
        """Whether the model reads dense columns."""
        return True

    def table_rows(self, schema: Schema) -> dict[str, int]:
        """Rows of every table that the model has for a data set, by table name."""
        return table_rows(self.reads(schema))

    def build(
        self,
        schema: Schema,
        method: Method | Mapping[str, Method] | None = None,
        *,
        fused: bool = True,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        dense_device: torch.device | str | None = None,
    ) -> Model:
        """The model for a data set, freshly initialised, its tables stored by `method` (dense when None).

        Dense tables may be on another device than the rest (`dense_device`), or without rows yet (`meta`).
        """
        bags = build_bags(
            self.reads(schema),
            self.dim,
            method,
            fused=fused,
            generator=generator,
            device=device,
            dense_device=dense_device,
        )
        return self.with_tables(bags, schema, generator, device)

    @abstractmethod
    def with_tables(
        self, bags: EmbeddingBags, schema: Schema, generator: torch.Generator | None, device: torch.device | str
    ) -> Model:
        """The model with these tables, its other parts freshly initialised."""

    def scaled(self, factor: float) -> Self:
        """The same model with hidden layers `factor` times as wide (rounded, at least 1); tables keep their dim."""
        if not factor > 0:
            raise ConfigError(f"a model can be scaled by a factor above 0, not by {factor}")
        if factor != 1 and not self.widths:
            raise ConfigError(f"{self.family} has no widths to scale: leave --model-scale out")

        def scale(size: Any) -> Any:
            if isinstance(size, tuple):
                return tuple(scale(one) for one in size)
            return None if size is None else max(1, round(size * factor))

        return replace(self, **{name: scale(getattr(self, name)) for name in self.widths})  # type: ignore[type-var]


def table_rows(schema: Schema) -> dict[str, int]:
    """Rows of every table that the features of a data set look up, by table name."""
    found: dict[str, int] = {}
    for feature in schema.features:
        table = feature.table or feature.name
        if found.setdefault(table, feature.num_rows) != feature.num_rows:
            raise ConfigError(
                f"feature '{feature.name}' gives table '{table}' {feature.num_rows} rows, another feature of "
                f"that table gives it {found[table]}: features that share a table must share its ids"
            )
    return found


def build_bags(schema: Schema, dim: int, method: Method | Mapping[str, Method] | None, **options: Any) -> EmbeddingBags:
    """Tables for every feature of a data set, shared as in its schema; options as `EmbeddingBags.build`."""
    features = {feature.name: feature.table or feature.name for feature in schema.features}
    return EmbeddingBags.build(table_rows(schema), dim, method, features=features, **options)


def check_sizes(config: ModelConfig, *sizes: int) -> None:
    """Raise unless every size is a whole number of at least 1."""
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ConfigError(f"every size of a {config.family} model must be a whole number of at least 1: {config}")
