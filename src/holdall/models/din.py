"""DIN (Zhou et al., 2018): the events of a user's history, summed with weights that depend on the target.

    k_t = the vectors of event t end to end,  q = those of the target                          (K = E dim numbers)
    a_t = MLP_attention([q, k_t, q - k_t, q * k_t])                (* is element by element; one number, no softmax)
    u = sum_t a_t k_t                                              (0 for an empty history)
    logit = MLP_top([e_1, ..., e_S, q, u, x])                      (features of the sample, target, interest, dense)

Roles of features are those of `histories`: sequences share their tables with the features of the target. Weights are
not normalised, as in the paper, so that u keeps how much of the history speaks for the target. Activations are PReLU,
one slope a unit, or ReLU. The paper's Dice is a PReLU whose threshold comes from the statistics of the batch: a model
would depend on the batch size and on the number of processes, so it is left out.

Cost: an attention MLP of 4 K inputs for each event that is read; on a GPU, in exports and compiled for T of every
sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.schema import Schema
from holdall.embedding.bags import EmbeddingBags
from holdall.models.histories import FeatureRoles, HistoryModel
from holdall.models.layers import mlp
from holdall.models.model import ModelConfig, check_sizes


@dataclass(frozen=True, kw_only=True)
class DINConfig(ModelConfig):
    """Sizes of a DIN."""

    family: ClassVar[str] = "din"
    widths: ClassVar[tuple[str, ...]] = ("attention", "top")

    dim: int = 16
    """Numbers in a table's row."""
    attention: tuple[int, ...] = (80, 40)
    """Hidden layers of the MLP that weighs an event."""
    top: tuple[int, ...] = (200, 80)
    """Hidden layers of the top MLP."""
    length: int = 20
    """Events of a history that are read: the last ones."""
    activation: Literal["prelu", "relu"] = "prelu"
    """Activation of both MLPs."""

    def __post_init__(self) -> None:
        check_sizes(self, self.dim, self.length, *self.attention, *self.top)
        if self.activation not in ("prelu", "relu"):
            raise ConfigError(f"activation must be 'prelu' or 'relu', not {self.activation!r}")

    def reads(self, schema: Schema) -> Schema:
        FeatureRoles.of(schema, self.family)  # raises for a missing feature, before tables are built
        return schema

    def with_tables(
        self, bags: EmbeddingBags, schema: Schema, generator: torch.Generator | None, device: torch.device | str
    ) -> DIN:
        roles = FeatureRoles.of(schema, self.family)
        config = replace(self, length=roles.longest(schema, self.length))
        return DIN(config, bags, roles, schema.num_dense, generator=generator, device=device)


class DIN(HistoryModel):
    """Logits [B] of a batch.

    Shapes: B samples, S features of the sample, E of an event, T events, dim D, K = E D numbers of an event.
    """

    def __init__(
        self,
        config: DINConfig,
        bags: EmbeddingBags,
        roles: FeatureRoles,
        num_dense: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(bags, roles, config.length)
        self.config = config
        self.skips_padding = True
        """Whether attention on the CPU is computed for the events that exist alone. Elsewhere shapes must not depend on
        the ids."""
        size = len(roles.target) * config.dim
        options: dict[str, Any] = {"generator": generator, "device": device}
        options |= {"last_activation": False, "activation": config.activation}
        self.attention = mlp((4 * size, *config.attention, 1), **options)
        with torch.no_grad():
            self.attention.output.bias.fill_(1.0)  # a fresh model nearly sums its events
        width = len(roles.sample) * config.dim + 2 * size + num_dense
        self.top = mlp((width, *config.top, 1), **options)

    @property
    def output_layer(self) -> nn.Linear:
        return self.top.output

    def score(self, dense_BN: Tensor, looked_up: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        vectors_BFD, history_BTED, exists_BT = looked_up
        target_BK = vectors_BFD[:, len(self.roles.sample) :].flatten(1)
        interest_BK = self.interest(history_BTED.flatten(2), target_BK, exists_BT)
        parts = [vectors_BFD.flatten(1), interest_BK.to(vectors_BFD.dtype), dense_BN.to(vectors_BFD.dtype)]
        return self.top(torch.cat(parts, dim=1)).squeeze(1)

    def interest(self, events_BTK: Tensor, target_BK: Tensor, exists_BT: Tensor) -> Tensor:
        """Sum [B, K] of the events that exist, each weighed by the attention MLP."""
        flat_NK = events_BTK.flatten(0, 1)
        if self.skips_padding and flat_NK.device.type == "cpu" and not torch.compiler.is_compiling():
            place_L = exists_BT.flatten().nonzero().squeeze(1)
            target_LK = target_BK.index_select(0, place_L // exists_BT.shape[1])
            weights_L = self._weights(flat_NK.index_select(0, place_L), target_LK)
            weights_BT = weights_L.new_zeros(flat_NK.shape[0]).index_copy(0, place_L, weights_L).view(exists_BT.shape)
        else:
            target_NK = target_BK[:, None].expand_as(events_BTK).flatten(0, 1)
            weights_BT = self._weights(flat_NK, target_NK).view(exists_BT.shape) * exists_BT
        return torch.bmm(weights_BT[:, None].to(events_BTK.dtype), events_BTK).squeeze(1)

    def _weights(self, events_NK: Tensor, target_NK: Tensor) -> Tensor:
        """Weights [N] of events, each for its target."""
        pairs = torch.cat([target_NK, events_NK, target_NK - events_NK, target_NK * events_NK], dim=1)
        return self.attention(pairs).squeeze(1)
