"""Two-tower model with in-batch negatives (Yi et al., 2019): a vector of the user and a vector of the item.

    u = unit(MLP_user([e_1, ..., e_S, x_user])),  v = unit(MLP_item([e_1, ..., e_I, x_item]))
    s(u, v) = u . v / temperature                                                   (the logit)
    loss = mean_i y_i log(1 + sum_j exp(s(u_i, v_j) - s(u_i, v_i) - log(n q_j)))    (j: other items of the batch)

Items that are close to a user's vector are found by an index of nearest neighbours, since a score is one product.

Every sample of a batch brings its item as a candidate for the n others; one with label 1 is also a query, whose own
item is to win. An item j is a candidate n q_j times a batch on average, where q_j is its frequency in the training
split (counted by `prepare`). Divided by that, the sum over the batch estimates the sum over all items, so the loss is
that of a softmax over the whole catalogue, and s is the logarithm of how likely the user takes the item, up to a number
for each user. Without the correction popular items, which are negatives more often, would be ranked low. Yi et al.
correct the own item as well; it is always there, so it is not corrected here. Candidates with the item of the query are
left out.

A logit ranks the items of a user; its sigmoid is no probability.

Cost of a step: B^2 K multiply-adds and about 21 B^2 bytes for B samples and vectors of K numbers, beside the towers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.common.errors import ConfigError, did_you_mean
from holdall.data.batch import Batch, Ids
from holdall.data.dataset import DataSet
from holdall.data.id_map import load_counts
from holdall.data.items import ITEMS_FILE, ItemTable, feature_columns
from holdall.data.schema import Feature, Schema
from holdall.embedding.bags import EmbeddingBags
from holdall.models.layers import mlp
from holdall.models.model import Gather, Model, ModelConfig, check_sizes

Side = Literal["user", "item"]
ROWS_AT_ONCE = 1 << 18


@dataclass(frozen=True, kw_only=True)
class TwoTowerConfig(ModelConfig):
    """Columns and sizes of a two-tower model."""

    family: ClassVar[str] = "two-tower"
    widths: ClassVar[tuple[str, ...]] = ("tower",)
    in_batch_negatives: ClassVar[bool] = True

    dim: int = 16
    """Numbers in a table's row."""
    user: tuple[str, ...] = ("user",)
    """Features and dense columns of the user's tower. Columns of neither tower are not read."""
    item: tuple[str, ...] = ("item",)
    """Features and dense columns of the item's tower. The first one is the item itself: one id a row."""
    tower: tuple[int, ...] = (64, 32)
    """Layers of either tower; the last is the size of the vectors."""
    normalize: bool = True
    """Whether vectors have length 1."""
    temperature: float = 0.1
    """Divisor of the products: the smaller, the more the hardest negatives count."""

    def __post_init__(self) -> None:
        check_sizes(self, self.dim, *self.tower)
        if not self.tower:
            raise ConfigError("a two-tower model needs at least one layer, the size of its vectors: tower=32")
        if not self.temperature > 0:
            raise ConfigError(f"temperature must be above 0, not {self.temperature}")
        names = (*self.user, *self.item)
        for side in ("user", "item"):
            if not getattr(self, side):
                raise ConfigError(f"the {side}'s tower reads no column: name some with --model-setting {side}=...")
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ConfigError(f"column '{repeated[0]}' is named twice: a column is of one tower")

    def reads(self, schema: Schema) -> Schema:
        features = tuple(feature for side in ("user", "item") for feature in self.features(schema, side))
        first = self.item[0]
        if not any(feature.name == first and feature.one_hot for feature in features):
            raise ConfigError(f"'{first}' is not one id a row: name the feature that is the item first (item=...)")
        return replace(schema, features=features)

    def reads_dense(self, schema: Schema) -> bool:
        return any(self.dense(schema, side) for side in ("user", "item"))

    def features(self, schema: Schema, side: Side) -> tuple[Feature, ...]:
        """Features of a tower."""
        features, dense = ([one.name for one in columns] for columns in (schema.features, schema.dense))
        names = getattr(self, side)
        for name in names:
            if name not in features and name not in dense:
                raise ConfigError(
                    f"the {side}'s tower reads '{name}', which the data set does not have"
                    f"{did_you_mean(name, [*features, *dense])}: name its columns with --model-setting {side}=..."
                )
        return tuple(schema.feature(name) for name in names if name in features)

    def dense(self, schema: Schema, side: Side) -> list[int]:
        """Positions of the dense columns of a tower."""
        features = [feature.name for feature in schema.features]
        dense = [column.name for column in schema.dense]
        return [dense.index(name) for name in getattr(self, side) if name in dense and name not in features]

    def with_tables(
        self, bags: EmbeddingBags, schema: Schema, generator: torch.Generator | None, device: torch.device | str
    ) -> TwoTower:
        return TwoTower(self, bags, schema, generator=generator, device=device)


class TwoTower(Model):
    """Logits [B] of a batch. Shapes: B samples, C candidates, F features of dim D, vectors of K numbers."""

    log_frequency: Tensor | None
    """[rows of the item] logarithm of how often an item is in the training split; None until `read_training_split`."""

    def __init__(
        self,
        config: TwoTowerConfig,
        bags: EmbeddingBags,
        schema: Schema,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.config = config
        self.bags = bags
        self.positions = [schema.features.index(feature) for feature in config.reads(schema).features]
        """Places in a batch of the features of the user, then of the item."""
        self.num_user = len(config.features(schema, "user"))
        self.dense = {side: config.dense(schema, side) for side in ("user", "item")}
        widths = {"user": self.num_user, "item": len(self.positions) - self.num_user}
        sizes = {side: widths[side] * config.dim + len(self.dense[side]) for side in widths}
        options = {"generator": generator, "device": device}
        self.user = mlp((sizes["user"], *config.tower), last_activation=False, **options)  # type: ignore[arg-type]
        self.item = mlp((sizes["item"], *config.tower), last_activation=False, **options)  # type: ignore[arg-type]
        self.register_buffer("log_frequency", None, persistent=False)

    def check(self, ids: Ids) -> None:
        self.bags.check(ids.select(self.positions))

    def lookup(self, batch: Batch) -> Tensor:
        return self.bags(batch.ids.select(self.positions))

    def score(self, dense_BN: Tensor, vectors_BFD: Tensor) -> Tensor:
        user_BK, item_BK = self.towers(dense_BN, vectors_BFD)
        return (user_BK * item_BK).sum(1) / self.config.temperature

    # --- towers ------------------------------------------------------------------------------------------------------

    def towers(self, dense_BN: Tensor, vectors_BFD: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors [B, K] of the users and of the items."""
        user_BFD, item_BFD = vectors_BFD.split([self.num_user, len(self.positions) - self.num_user], dim=1)
        return self._vector("user", dense_BN, user_BFD), self._vector("item", dense_BN, item_BFD)

    def side_vectors(self, side: Side, batch: Batch) -> Tensor:
        """Vectors [B, K] of one tower; columns of the other one are not looked up."""
        return self.vectors_of(side, batch.dense, batch.ids.select(self.positions))

    def vectors_of(self, side: Side, dense_BN: Tensor, ids: Ids) -> Tensor:
        """The same, from ids of the features that the model reads, in the order of `bags.features`."""
        places = range(self.num_user) if side == "user" else range(self.num_user, len(self.positions))
        return self._vector(side, dense_BN, self.bags(ids, tuple(places)))

    def _vector(self, side: Side, dense_BN: Tensor, vectors_BFD: Tensor) -> Tensor:
        parts = [vectors_BFD.flatten(1)]
        if self.dense[side]:
            parts.append(dense_BN[:, self.dense[side]].to(vectors_BFD.dtype))
        tower = self.user if side == "user" else self.item
        vector_BK = tower(torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]).to(dense_BN.dtype)
        return F.normalize(vector_BK, dim=1) if self.config.normalize else vector_BK

    # --- training ----------------------------------------------------------------------------------------------------

    def read_training_split(self, data: DataSet) -> None:
        refuse_item_columns(self.config, data)
        counts = item_counts(data, self.config.item[0])
        frequency = torch.from_numpy(np.maximum(counts, 1) / max(1, counts.sum()))
        self.log_frequency = frequency.log().float().to(next(self.user.parameters()).device)

    def training_outputs(self, dense_BN: Tensor, vectors_BFD: Tensor) -> tuple[Tensor, Tensor]:
        return self.towers(dense_BN, vectors_BFD)

    def training_loss(self, outputs: tuple[Tensor, Tensor], batch: Batch, gather: Gather | None = None) -> Tensor:
        if self.log_frequency is None:
            raise ConfigError("the loss needs the frequencies of items: call model.read_training_split(data) first")
        user_BK, item_BK = outputs
        item_B = batch.ids.bag(self.positions[self.num_user])[0].long()
        start, item_C, item_CK = 0, item_B, item_BK.float()
        if gather is not None:
            start, item_C = gather(item_B)
            _, item_CK = gather(item_CK)
        return in_batch_softmax(
            user_BK.float(),
            item_CK,
            item_B,
            item_C,
            self.log_frequency[item_C],
            batch.label if batch.weight is None else batch.label * batch.weight,
            temperature=self.config.temperature,
            start=start,
        )


def in_batch_softmax(
    user_BK: Tensor,
    item_CK: Tensor,
    item_B: Tensor,
    item_C: Tensor,
    log_frequency_C: Tensor,
    weight_B: Tensor,
    *,
    temperature: float = 1.0,
    start: int = 0,
) -> Tensor:
    """Mean over samples of `w_i log(1 + sum_j exp(s_ij - s_ii - log(n q_j)))` with `s_ij = u_i . v_j / temperature`,
    where candidate `start + i` is the sample's own, and j are the n others without those of the same item."""
    log_expected_C = log_frequency_C + math.log(max(1, item_C.numel() - 1))
    own_B = torch.arange(start, start + item_B.numel(), device=item_B.device)
    is_own = own_B[:, None] == torch.arange(item_C.numel(), device=item_B.device)
    scores_BC = torch.addmm(-log_expected_C, user_BK / temperature, item_CK.t())
    scores_BC.masked_fill_((item_B[:, None] == item_C) & ~is_own, -torch.inf)
    scores_BC.diagonal(start).add_(log_expected_C[own_B])  # the own item is no sample
    losses_B = scores_BC.logsumexp(1) - scores_BC.diagonal(start)
    return (weight_B * losses_B).sum() / max(1, weight_B.numel())


def refuse_item_columns(config: TwoTowerConfig, data: DataSet) -> None:
    """Raise if the user's tower reads a column that is known to depend on the item: it would give the answer away."""
    if not (data.folder / ITEMS_FILE).exists():
        return
    table = ItemTable.load(data.folder, data.schema)
    wrong = [name for name in config.user if name == table.item or name in table.attributes]
    if wrong:
        item = ",".join((*config.item, *(name for name in wrong if name not in config.item)))
        raise ConfigError(
            f"'{wrong[0]}' depends on the item, so the user's tower must not read it: move it with --model-setting "
            f"item={item}"
        )


def item_counts(data: DataSet, item: str) -> npt.NDArray[np.int64]:
    """[num_rows] how often each id of a feature occurs in a split.

    The counts of an id map are those of all features that share the table: the split is read where there are several.
    """
    feature = data.schema.feature(item)
    table = feature.table or feature.name
    if sum((other.table or other.name) == table for other in data.schema.features) == 1:
        return load_counts(data.folder, item, data.schema)
    (place,) = feature_columns(data.schema, (item,))
    counts = np.zeros(feature.num_rows, dtype=np.int64)
    for start in range(0, len(data), ROWS_AT_ONCE):
        ids = data.columns(start, min(start + ROWS_AT_ONCE, len(data))).ids[:, place]
        counts += np.bincount(ids, minlength=feature.num_rows)
    return counts
