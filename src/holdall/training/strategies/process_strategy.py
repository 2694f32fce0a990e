"""Base of the strategies of several processes.

Each rank computes its share of every batch. The gradients of the dense part are summed, so that all ranks make the same
update of it. Subclasses store and exchange the rows of tables.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.distributed.collectives import Collectives
from holdall.distributed.gather_samples import GatherSamples
from holdall.evaluation.evaluate_model import SplitShare
from holdall.models.model import Model
from holdall.optim.optimizers import Optimizers, SquaredNorm
from holdall.optim.row_groups import RowGroup
from holdall.training.strategies.base import Strategy
from holdall.training.strategies.gradient_exchange import GradientExchange


class ProcessStrategy(Strategy):
    """Strategy of several processes, whose dense gradients are those of the global batch."""

    exchange: GradientExchange
    row_groups: list[RowGroup]
    """Tables whose rows every rank has."""
    _squared_norm: SquaredNorm | None = None
    """The squared norm of all gradients, where some are on other ranks."""
    _fetch_rows: Callable[[Ids], None] | None = None
    """Fetches what an evaluation looks up, where rows are on other ranks: all call it equally often."""

    def _build_model(self) -> Model:
        """The model with all tables on every rank."""
        return self.config.build_model(self.data.schema, self.methods, device=self.device)

    @functools.cached_property
    def collectives(self) -> Collectives:
        """Collectives of the training thread."""
        return Collectives(self.processes)

    def attach(self, optimizers: Optimizers) -> None:
        if optimizers.self_updating:
            kinds = sorted({str(table.method) for table in optimizers.self_updating})
            raise ConfigError(f"{', '.join(kinds)} tables round their own updates: train them in one process")
        self.row_groups = optimizers.row_groups
        replicated = self._replicated(optimizers).values()
        self.exchange = GradientExchange(replicated, self.collectives, self._exchange_rows, self._squared_norm)
        if self.config.model.model_config().in_batch_negatives:
            own = Collectives(self.processes, own_group=True)
            self.exchange.collectives.append(own)
            self.gather = GatherSamples(own)

    def _replicated(self, optimizers: Optimizers) -> Mapping[str, nn.Parameter]:
        """Dense parameters that every rank has."""
        return optimizers.dense_parameters

    @abstractmethod
    def _exchange_rows(self) -> None:
        """Exchange the gradients of table rows, after the backward."""

    def _reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over ranks, in place."""
        self.collectives.all_reduce(tensor)

    def _sum(self, number: float) -> float:
        """The sum of a number over ranks."""
        return float(self.collectives.all_reduce(torch.tensor([number], dtype=torch.float64, device=self.device)))

    @contextmanager
    def evaluation(self) -> Iterator[SplitShare]:
        with self.collectives.counted_as("evaluation"):
            yield SplitShare(self.processes.rank, self.processes.world_size, self._reduce, self._fetch_rows)

    def _training_collectives(self) -> list[Collectives]:
        """Collectives whose bytes are those of training."""
        return self.exchange.collectives

    def measures(self) -> dict[str, float]:
        """Bytes that this rank sent for each sample of its share, by kind of collective."""
        sent: Counter[str] = Counter()
        for collectives in self._training_collectives():
            sent.update(collectives.bytes_by_kind())
        sent.pop("evaluation", None)
        num_samples = max(1, self.exchange.num_samples)
        each = {f"{kind}_bytes_per_sample": count / num_samples for kind, count in sorted(sent.items())}
        return {**each, "sent_bytes_per_sample": sum(sent.values()) / num_samples}


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """The squared norm of all gradients, in float64."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
