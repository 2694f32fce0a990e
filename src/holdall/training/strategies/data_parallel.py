"""`data-parallel`: everything on every rank, each with its share of the batch; gradients are summed, and all ranks make
the same update.

Compressed tables are a few megabytes of cores, so replicating them is cheap: their gradients (not the parameters) are
reduced with those of the MLPs (EL-Rec on several GPUs, with gradients that are those of the whole batch).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.distributed.collectives import Collectives
from holdall.distributed.gradient_buckets import GradientBuckets
from holdall.distributed.row_exchange import exchange_row_gradients
from holdall.optim.optimizers import Optimizers, RowGroup
from holdall.training.strategies.base import Strategy


class DataParallel(Strategy):
    """The model of one process on the concatenated batch, but for the order in which floats are added; the same bits on
    every rank."""

    row_groups: list[RowGroup]

    def attach(self, optimizers: Optimizers) -> None:
        if optimizers.self_updating and self.processes.world_size > 1:
            kinds = sorted({str(table.method) for table in optimizers.self_updating})
            raise ConfigError(f"{', '.join(kinds)} tables round their own updates: train them in one process")
        self.row_groups = optimizers.row_groups
        self._dense = Collectives(self.processes, own_group=True)
        parameters = self._replicated(optimizers).values()
        self._buckets = GradientBuckets(parameters, self._dense, num_signals=2 * self.processes.world_size)
        self._samples = 0

    @functools.cached_property
    def collectives(self) -> Collectives:
        """Those of the thread that trains."""
        return Collectives(self.processes)

    def _replicated(self, optimizers: Optimizers) -> Mapping[str, nn.Parameter]:
        """The dense parameters that every rank has."""
        return optimizers.dense_parameters

    def begin_backward(self, step: int, num_samples: int, loss: Tensor, stop: bool) -> None:
        self._dense.step = self.collectives.step = step
        self._samples += num_samples
        signals = torch.zeros(2, self.processes.world_size, device=self.device)
        signals[0, self.processes.rank] = loss
        signals[1, self.processes.rank] = float(stop)
        self._buckets.begin(signals.view(-1))

    def exchange_gradients(self) -> Tensor:
        self._buckets.flush()
        self._exchange_rows()
        return self._buckets.finish().view(2, -1)

    def _exchange_rows(self) -> None:
        exchange_row_gradients(self.row_groups, self.collectives)

    @property
    def moves_nothing(self) -> bool:
        return self.processes.world_size == 1

    def reduce(self, tensor: Tensor) -> None:
        self.collectives.all_reduce(tensor)

    def _counted(self) -> list[Collectives]:
        """All whose bytes are those of training."""
        return [self.collectives, self._dense]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self.collectives.counted_as("evaluation"):
            yield

    def measures(self) -> dict[str, float]:
        """Bytes that this rank sent for each sample of its share, by kind of collective."""
        if self.processes.world_size == 1:
            return {}
        sent: Counter[str] = Counter()
        for collectives in self._counted():
            sent.update(collectives.bytes_by_kind())
        sent.pop("evaluation", None)
        each = {f"{kind}_bytes_per_sample": n / max(1, self._samples) for kind, n in sorted(sent.items())}
        return {**each, "sent_bytes_per_sample": sum(sent.values()) / max(1, self._samples)}
