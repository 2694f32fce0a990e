"""Sides of the comparison of models: ours, and the same model of a public library, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.negatives import positive_rate
from holdall.models import ModelConfig, TwoTowerConfig
from holdall.models.histories import last_places
from holdall.models.loss import logloss
from holdall.models.two_tower import item_counts
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers

LENGTH = 20
"""Events of a history that both DINs read."""


@dataclass
class Side:
    """A model in training: `loss` of a batch, `step` after its backward, and `model(batch)`, the logits."""

    model: nn.Module
    loss: Callable[[Batch], Tensor]
    step: Callable[[], None]


def ours(config: ModelConfig, data: DataSet, lr: float, seed: int, negatives: int) -> Side:
    """Our model with Adam, whose rows change in the steps that look them up."""
    model = config.build(data.schema, generator=torch.Generator().manual_seed(seed))
    model.start_at_rate(positive_rate(data, negatives))
    model.read_training_split(data)
    optimizers = Optimizers(model, OptimizerConfig(name="adam", lr=lr))

    def loss(batch: Batch) -> Tensor:
        return model.training_loss(model.training_outputs(batch.dense, model.lookup(batch)), batch)

    return Side(model, loss, optimizers.step)


def theirs(model: nn.Module, lr: float, loss: Callable[[Batch], Tensor]) -> Side:
    """A library's model with torch's Adam, as in the library's examples."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Side(model, loss, step)


def logits_of(probability: Tensor) -> Tensor:
    """Logits of a model that ends in a sigmoid; in float64, where no probability a float32 holds is lost."""
    return torch.logit(probability.reshape(-1).double(), eps=1e-12)


class DeepCtr(nn.Module):
    """A model of deepctr-torch on our batches: ids, dense values and padded histories travel as one float32 matrix."""

    def __init__(self, name: str, data: DataSet, *, dim: int, seed: int, **sizes: Any):
        from deepctr_torch import models
        from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat

        super().__init__()
        features = data.schema.features
        self.single = [place for place, feature in enumerate(features) if feature.one_hot]
        self.history = [place for place, feature in enumerate(features) if not feature.one_hot]
        columns = [SparseFeat(features[p].name, features[p].num_rows, embedding_dim=dim) for p in self.single]
        columns += [DenseFeat(column.name, 1) for column in data.schema.dense]
        for place in self.history:
            table = features[place].table
            sparse = SparseFeat(f"hist_{table}", features[place].num_rows, dim, embedding_name=table)
            columns.append(VarLenSparseFeat(sparse, LENGTH, length_name="length"))
        first = [[features[place].table for place in self.history]] if self.history else [columns]
        self.model = getattr(models, name)(columns, *first, seed=seed, l2_reg_embedding=0.0, **sizes)

    def forward(self, batch: Batch) -> Tensor:
        parts = [torch.stack([batch.ids.bag(place)[0] for place in self.single], dim=1).float(), batch.dense]
        for number, place in enumerate(self.history):
            values, offsets, _ = batch.ids.bag(place)
            assert offsets is not None
            lengths = offsets.diff().clamp(max=LENGTH)[:, None]
            places, exists = last_places(offsets, LENGTH)
            padded = torch.where(exists, values[places.clamp(min=0)], 0)
            shift = (torch.arange(LENGTH) + LENGTH - lengths) % LENGTH  # theirs are padded at the end
            parts.append(padded.gather(1, shift).float())
            if number == 0:
                parts.append(lengths.float())
        return logits_of(self.model(torch.cat(parts, dim=1)))


class RecHubTowers(nn.Module):
    """DSSM of torch-rechub, and the in-batch loss of its trainer, with our temperature; `corrected` by log q."""

    def __init__(self, config: TwoTowerConfig, data: DataSet, seed: int, corrected: bool):
        from torch_rechub.basic.features import SparseFeature
        from torch_rechub.models.matching import DSSM

        super().__init__()
        torch.manual_seed(seed)
        self.names, self.temperature = [feature.name for feature in data.schema.features], config.temperature
        user, item = (
            [SparseFeature(name, vocab_size=data.schema.feature(name).num_rows, embed_dim=config.dim) for name in side]
            for side in (config.user, config.item)
        )
        counts = torch.from_numpy(item_counts(data, config.item[0])).clamp(min=1)
        self.log_frequency = (counts / counts.sum()).log() if corrected else torch.zeros(len(counts))
        self.item = self.names.index(config.item[0])
        mlp = {"dims": list(config.tower), "activation": "relu"}
        self.model = DSSM(user, item, user_params=mlp, item_params=mlp)

    def towers(self, batch: Batch) -> tuple[Tensor, Tensor]:
        ids = {name: batch.ids.bag(place)[0] for place, name in enumerate(self.names)}
        return self.model.user_tower(ids), self.model.item_tower(ids)

    def forward(self, batch: Batch) -> Tensor:
        users, items = self.towers(batch)
        return (users * items).sum(1) / self.temperature

    def loss(self, batch: Batch) -> Tensor:
        """Of the trainer, whose sampler lists all other samples of a batch in a Python loop; the same without it."""
        users, items = self.towers(batch)
        scores = users @ items.t() / self.temperature - self.log_frequency[batch.ids.bag(self.item)[0].long()]
        return F.cross_entropy(scores, torch.arange(len(batch)))


def deep_ctr(name: str, data: DataSet, lr: float, seed: int, **sizes: Any) -> Side:
    model = DeepCtr(name, data, seed=seed, **sizes)
    return theirs(model, lr, lambda batch: logloss(model(batch), batch.label.double()))


def rec_hub_towers(config: TwoTowerConfig, data: DataSet, lr: float, seed: int, *, corrected: bool = False) -> Side:
    model = RecHubTowers(config, data, seed, corrected)
    return theirs(model, lr, model.loss)
