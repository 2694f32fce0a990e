"""DCN-v2 (Wang et al., 2021): layers that multiply the input into itself, beside or below a plain deep network.

    x_0 = [dense part, e_1, ..., e_F]                      (W numbers: all looked-up vectors end to end)
    x_{l+1} = x_0 * (W_l x_l + b_l) + x_l                  (* is element by element)

After L cross layers every product of up to L + 1 features can have its own weight. With a rank r, W_l = U_l V_l^T with
U_l, V_l of W x r: 2 W r multiply-adds a sample and layer instead of W^2. MLPerf trains it on Criteo 1TB with dim 128,
three cross layers of rank 512 and the deep network stacked on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.schema import Schema
from holdall.embedding.bags import EmbeddingBags
from holdall.models.layers import drawn_on, mlp
from holdall.models.model import Model, ModelConfig, check_sizes


@dataclass(frozen=True, kw_only=True)
class DCNConfig(ModelConfig):
    """Sizes of a DCN-v2."""

    family: ClassVar[str] = "dcn"
    widths: ClassVar[tuple[str, ...]] = ("bottom", "top", "rank")

    dim: int = 16
    """Numbers in a table's row."""
    bottom: tuple[int, ...] | None = None
    """Hidden layers of a bottom MLP that turns the dense values into `dim` numbers; they enter as they are if None."""
    cross_layers: int = 3
    """Cross layers."""
    rank: int | None = None
    """Rank of the matrices of the cross layers; full when None."""
    top: tuple[int, ...] = (512, 256)
    """Hidden layers of the deep network."""
    structure: Literal["stacked", "parallel"] = "stacked"
    """`stacked`: the deep network reads the last cross layer. `parallel`: both read x_0, and one weight a number of
    either output makes the logit."""

    def __post_init__(self) -> None:
        rank = 1 if self.rank is None else self.rank
        check_sizes(self, self.dim, self.cross_layers, rank, *(self.bottom or ()), *self.top)
        if self.structure not in ("stacked", "parallel"):
            raise ConfigError(f"structure must be 'stacked' or 'parallel', not {self.structure!r}")

    def with_tables(
        self, bags: EmbeddingBags, schema: Schema, generator: torch.Generator | None, device: torch.device | str
    ) -> DCN:
        return DCN(self, bags, schema.num_dense, generator=generator, device=device)


class CrossLayer(nn.Module):
    """`x_0 * (W x + b) + x` for x_0, x of [B, width]; W is full, or `up @ down` of a rank.

    Weights start as N(0, 2 / (in + out)), the bias at 0: the first output is x_0 and a little of its products.
    """

    def __init__(
        self,
        width: int,
        rank: int | None,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        sizes = (width, width) if rank is None else (width, rank, width)
        place = drawn_on(generator, device)
        self.linear = nn.Sequential(*(nn.Linear(a, b, bias=False, device=place) for a, b in pairwise(sizes)))
        self.bias = nn.Parameter(torch.zeros(width, device=device))
        with torch.no_grad():
            for weight in self.linear.parameters():
                weight.normal_(0.0, (2.0 / sum(weight.shape)) ** 0.5, generator=generator)
        self.linear.to(device)

    def forward(self, x0_BW: Tensor, x_BW: Tensor) -> Tensor:
        return x0_BW * (self.linear(x_BW) + self.bias) + x_BW


class DCN(Model):
    """Logits [B] of a batch. Shapes: B samples, N dense values, F features of dim D, W numbers in x_0."""

    def __init__(
        self,
        config: DCNConfig,
        bags: EmbeddingBags,
        num_dense: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.config = config
        self.bags = bags
        self.bottom = None
        width = bags.num_features * config.dim + num_dense
        if num_dense and config.bottom is not None:
            sizes = (num_dense, *config.bottom, config.dim)
            self.bottom = mlp(sizes, last_activation=True, generator=generator, device=device)
            width += config.dim - num_dense
        self.cross = nn.ModuleList(
            CrossLayer(width, config.rank, generator=generator, device=device) for _ in range(config.cross_layers)
        )
        if config.structure == "stacked":
            self.deep = None
            sizes = (width, *config.top, 1)
        else:
            self.deep = mlp((width, *config.top), last_activation=True, generator=generator, device=device)
            sizes = (width + (width, *config.top)[-1], 1)
        self.top = mlp(sizes, last_activation=False, generator=generator, device=device)

    @property
    def output_layer(self) -> nn.Linear:
        return self.top.output

    def score(self, dense_BN: Tensor, vectors_BFD: Tensor) -> Tensor:
        dense = dense_BN if self.bottom is None else self.bottom(dense_BN)
        x0_BW = torch.cat([dense.to(vectors_BFD.dtype), vectors_BFD.flatten(1)], dim=1)
        x_BW = x0_BW
        for layer in self.cross:
            x_BW = layer(x0_BW, x_BW)
        if self.deep is not None:
            x_BW = torch.cat([x_BW, self.deep(x0_BW).to(x_BW.dtype)], dim=1)
        return self.top(x_BW).squeeze(1)
