"""NCF (He et al., 2017): probability that a user takes an item, from a vector of each.

    GMF     h . (p_u * q_i)                                        (* is element by element)
    MLP     h . tower([p_u, q_i])                                  (widths f 2^(n-1), ..., 4f, 2f, f; ReLU)
    NeuMF   h . [p_u * q_i, tower([p'_u, q'_i])]                   (both parts, vectors of their own, one output)

f is the number of predictive factors, which the output layer reads from each part. NeuMF's two vectors of a user are
side by side in one row, so one table of any method stores both, and a user costs one lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch, Ids
from holdall.data.schema import Schema
from holdall.embedding.bags import EmbeddingBags
from holdall.models.layers import mlp
from holdall.models.model import Model, ModelConfig, check_sizes


@dataclass(frozen=True, kw_only=True)
class NCFConfig(ModelConfig):
    """Sizes of a GMF, an MLP or a NeuMF."""

    family: ClassVar[str] = "ncf"
    widths: ClassVar[tuple[str, ...]] = ("factors",)

    factors: int = 8
    """Predictive factors f: numbers that the output layer reads from each part."""
    num_layers: int = 3
    """Widths of the MLP's tower, n of them, from the two vectors end to end down to f."""
    parts: Literal["neumf", "gmf", "mlp"] = "neumf"
    """Model to build: both parts, or one of them."""
    user: str = "user"
    """Name of the feature that is the user."""
    item: str = "item"
    """Name of the feature that is the item. Other features are not read: these models score pairs."""

    def __post_init__(self) -> None:
        check_sizes(self, self.factors)
        if self.num_layers < 2:
            raise ConfigError(f"the tower of an ncf model needs num_layers of 2 or more, not {self.num_layers}")
        if self.parts not in ("neumf", "gmf", "mlp"):
            raise ConfigError(f"parts must be 'neumf', 'gmf' or 'mlp', not {self.parts!r}")

    @property
    def tower(self) -> tuple[int, ...]:
        """Widths of the MLP, its input first; none without that part."""
        if self.parts == "gmf":
            return ()
        return tuple(self.factors << power for power in reversed(range(self.num_layers)))

    @property
    def gmf_dim(self) -> int:
        """Numbers of a row that the product reads; the tower reads the others."""
        return 0 if self.parts == "mlp" else self.factors

    @property
    def dim(self) -> int:
        return self.gmf_dim + (self.tower[0] // 2 if self.tower else 0)

    def with_tables(
        self, bags: EmbeddingBags, schema: Schema, generator: torch.Generator | None, device: torch.device | str
    ) -> NCF:
        positions = [schema.features.index(feature) for feature in self.reads(schema).features]
        return NCF(self, bags, positions, generator=generator, device=device)

    def reads(self, schema: Schema) -> Schema:
        features = (schema.feature(self.user), schema.feature(self.item))
        for feature in features:
            if not feature.one_hot:
                raise ConfigError(f"ncf reads one id of a user and one of an item, '{feature.name}' has several")
        return replace(schema, features=features)

    def reads_dense(self, schema: Schema) -> bool:
        return False


class NCF(Model):
    """Logits [B] of a batch. `positions` are those of the user and the item among its features; dim D."""

    def __init__(
        self,
        config: NCFConfig,
        bags: EmbeddingBags,
        positions: Sequence[int],
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.config = config
        self.bags = bags
        self.positions = list(positions)
        self.tower = None
        if config.tower:
            self.tower = mlp(config.tower, last_activation=True, generator=generator, device=device)
        width = config.factors * (2 if config.parts == "neumf" else 1)
        self.output = mlp((width, 1), last_activation=False, generator=generator, device=device)

    @property
    def output_layer(self) -> nn.Linear:
        return self.output.output

    def check(self, ids: Ids) -> None:
        self.bags.check(self._pair(ids))

    def lookup(self, batch: Batch) -> Tensor:
        return self.bags(self._pair(batch.ids))

    def _pair(self, ids: Ids) -> Ids:
        """The ids [2, B] of user and item."""
        if ids.offsets is None:
            values = ids.values if self.positions == list(range(ids.num_features)) else ids.values[self.positions]
        else:
            values = torch.stack([ids.bag(position)[0] for position in self.positions])
        return Ids(values, None, 2)

    def score(self, dense_BN: Tensor, vectors_B2D: Tensor) -> Tensor:
        gmf_dim = self.config.gmf_dim
        parts = []
        if gmf_dim:
            parts.append(vectors_B2D[:, 0, :gmf_dim] * vectors_B2D[:, 1, :gmf_dim])
        if self.tower is not None:
            parts.append(self.tower(vectors_B2D[:, :, gmf_dim:].flatten(1)))
        return self.output(torch.cat([part.to(parts[-1].dtype) for part in parts], dim=1)).squeeze(1)
