"""DeepFM (Guo et al., 2017): a factorization machine and a deep network that read the same vectors.

    row of an id = [e, w]                                          (dim numbers: dim - 1 of e, one weight w)
    first  = sum_f w_f
    second = sum_{f<g} e_f . e_g = (|sum_f e_f|^2 - sum_f |e_f|^2) / 2
    deep   = MLP([e_1, ..., e_F, x])                               (ReLU after every layer; x are the dense values)
    logit  = output([first, second, x, deep])                      (a linear layer: weights of x, of deep, and a bias)

The first-order weight of an id is the last number of its row, not a table of its own: it costs no second lookup, it is
compressed, fetched and sharded with the row, and rows keep a length that methods can factorise (16, not 17). Dense
values have a first-order weight and enter the deep network; they have no vector. The output layer weighs `first` and
`second` too. These weights start at 1, the sum of the paper; training starts them at a quarter, so that a fresh model
predicts the base rate (`Model.start_at_rate`).

Cost: the pairwise term is 3 F dim operations a sample instead of F^2 dim / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.schema import Schema
from holdall.embedding.bags import EmbeddingBags
from holdall.models.layers import mlp
from holdall.models.model import Model, ModelConfig, check_sizes


@dataclass(frozen=True, kw_only=True)
class DeepFMConfig(ModelConfig):
    """Sizes of a DeepFM."""

    family: ClassVar[str] = "deepfm"
    widths: ClassVar[tuple[str, ...]] = ("top",)

    dim: int = 16
    """Numbers in a table's row: the vector of the pairs and of the deep network, then the first-order weight."""
    top: tuple[int, ...] = (512, 256)
    """Layers of the deep network."""

    def __post_init__(self) -> None:
        check_sizes(self, self.dim, *self.top)
        if self.dim < 2:
            raise ConfigError(f"a row of deepfm is a vector and a weight: dim must be 2 or more, not {self.dim}")

    def with_tables(
        self, bags: EmbeddingBags, schema: Schema, generator: torch.Generator | None, device: torch.device | str
    ) -> DeepFM:
        return DeepFM(self, bags, schema.num_dense, generator=generator, device=device)


class DeepFM(Model):
    """Logits [B] of a batch. Shapes: B samples, N dense values, F features, rows of D numbers, vectors of K = D - 1."""

    def __init__(
        self,
        config: DeepFMConfig,
        bags: EmbeddingBags,
        num_dense: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.config = config
        self.bags = bags
        sizes = (bags.num_features * (config.dim - 1) + num_dense, *config.top)
        self.deep = mlp(sizes, last_activation=True, generator=generator, device=device)
        width = 2 + num_dense + sizes[-1]
        self.output = mlp((width, 1), last_activation=False, generator=generator, device=device)
        with torch.no_grad():
            self.output_layer.weight[:, :2] = 1.0

    @property
    def output_layer(self) -> nn.Linear:
        return self.output.output

    def score(self, dense_BN: Tensor, vectors_BFD: Tensor) -> Tensor:
        factors_BFK = vectors_BFD[:, :, :-1]
        first_B1 = vectors_BFD[:, :, -1].sum(1, keepdim=True, dtype=dense_BN.dtype)
        second_B1 = pairwise_products(factors_BFK.to(dense_BN.dtype))[:, None]
        deep_BH = self.deep(torch.cat([factors_BFK.flatten(1), dense_BN.to(vectors_BFD.dtype)], dim=1))
        return self.output(torch.cat([first_B1, second_B1, dense_BN, deep_BH.to(dense_BN.dtype)], dim=1)).squeeze(1)


def pairwise_products(vectors_BFK: Tensor) -> Tensor:
    """`sum_{f<g} e_f . e_g` [B] of vectors: half of the square of their sum without their squares."""
    sum_BK = vectors_BFK.sum(1)
    return (sum_BK.square().sum(1) - vectors_BFK.square().sum((1, 2))) / 2
