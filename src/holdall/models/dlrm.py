"""DLRM (Naumov et al., 2019): a bottom MLP for dense values, tables for ids, all pairs multiplied, a top MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch
from holdall.data.schema import Schema
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.interaction import dot_interaction, dot_interaction_of_rows, interaction_width
from holdall.models.layers import mlp
from holdall.models.model import LookedUp, Model, ModelConfig, check_sizes


@dataclass(frozen=True, kw_only=True)
class DLRMConfig(ModelConfig):
    """Sizes of a DLRM. Its first and last layers follow from the data and from `dim`."""

    family: ClassVar[str] = "dlrm"
    widths: ClassVar[tuple[str, ...]] = ("bottom", "top")

    dim: int = 16
    """Numbers in a table's row, and in the output of the bottom MLP."""
    bottom: tuple[int, ...] = (512, 256, 64)
    """Hidden layers of the bottom MLP."""
    top: tuple[int, ...] = (512, 256)
    """Hidden layers of the top MLP."""
    interaction: Literal["dot", "concat"] = "dot"

    def __post_init__(self) -> None:
        check_sizes(self, self.dim, *self.bottom, *self.top)
        if self.interaction not in ("dot", "concat"):
            raise ConfigError(f"interaction must be 'dot' or 'concat', not {self.interaction!r}")

    def with_tables(
        self, bags: EmbeddingBags, schema: Schema, generator: torch.Generator | None, device: torch.device | str
    ) -> DLRM:
        return DLRM(self, bags, schema.num_dense, generator=generator, device=device)


class DLRM(Model):
    """Logits [B] of a batch. Shapes: B samples, F features, V = F + 1 vectors (F without dense columns), dim D."""

    def __init__(
        self,
        config: DLRMConfig,
        bags: EmbeddingBags,
        num_dense: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.config = config
        self.num_dense = num_dense
        self.bags = bags
        num_vectors = bags.num_features + (1 if num_dense else 0)
        self.bottom = None
        if num_dense:
            sizes = (num_dense, *config.bottom, config.dim)
            self.bottom = mlp(sizes, last_activation=True, generator=generator, device=device)
        if config.interaction == "dot":
            width = interaction_width(num_vectors, config.dim)
        else:
            width = config.dim * num_vectors
        self.top = mlp((width, *config.top, 1), last_activation=False, generator=generator, device=device)

    @property
    def output_layer(self) -> nn.Linear:
        return self.top.output

    def lookup(self, batch: Batch) -> LookedUp:
        """Vectors [B, F, D]; without autograd, where a kernel can read the rows itself, the result of `packed_rows`."""
        if self.config.interaction == "dot" and not torch.is_grad_enabled():
            packed = self.bags.packed_rows(batch.ids)
            if packed is not None:
                return packed
        return super().lookup(batch)

    def score(self, dense_BN: Tensor, looked_up: Tensor | tuple[Tensor, ...]) -> Tensor:
        first_BD = None if self.bottom is None else self.bottom(dense_BN)
        if isinstance(looked_up, tuple):
            storage, rows, *others = looked_up
            features = dot_interaction_of_rows(storage, rows, first_BD, *others)
        elif self.config.interaction == "dot":
            features = dot_interaction(looked_up, first_BD)
        else:
            features = looked_up.flatten(1)
            if first_BD is not None:
                features = torch.cat([first_BD.to(features.dtype), features], dim=1)
        return self.top(features).squeeze(1)
