"""`local`: MLPs are synchronous; each rank trains tables of its own, which are merged at intervals (distributed DLRM).

Between merges no row crosses the network. A merged row is the mean over ranks, weighted by the lookups of each since
the last merge: ranks that never looked a row up do not dilute it. Optimizer state is merged in the same way. Replicas
are equal after a merge, so only touched rows are sent.

Relaxed: a lookup may miss what other ranks learned since the last merge. Exact: the gradients of the MLPs, and of the
parts of compressed tables that are not rows, are those of the global batch in every step. The loss is the mean over the
global batch too. So with SGD and `--merge-every 1` a row that one rank alone touches in a step is updated as under
`data-parallel`; a row that several touch moves by the weighted mean of their updates, not by the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from holdall.evaluation.evaluate_model import SplitShare
from holdall.optim.optimizers import Optimizers
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.training.strategies.process_strategy import ProcessStrategy

ROWS_AT_ONCE = 1 << 16
"""Rows merged at a time: bounds the memory of a merge, whatever was touched."""


class LocalStrategy(ProcessStrategy):
    """Tables of each rank's own between merges. Saving a checkpoint merges them; an evaluation measures merged tables
    and leaves those of each rank as they are."""

    kind = STRATEGY_KINDS["local"]

    def attach(self, optimizers: Optimizers) -> None:
        super().attach(optimizers)
        self.touches = [
            torch.zeros(group.weight.shape[0], dtype=torch.int32, device=group.weight.device)
            for group in self.row_groups
        ]
        """Lookups of every row since the last merge."""
        self.difference = 0.0
        """Distance of the ranks before the last merge (see `merge`)."""
        self.num_merges = 0

    def _exchange_rows(self) -> None:
        for group, touches in zip(self.row_groups, self.touches, strict=True):
            gradient = group.gradient()
            if gradient is not None:
                touches.index_add_(0, gradient.ids, torch.ones_like(gradient.ids, dtype=torch.int32))

    def after_step(self, step: int) -> None:
        every = self.config.processes.merge_every
        if every is not None and step % every == 0:
            with self.stages.stage("merge"):
                self.merge()

    def merge(self) -> float:
        """Make the tables and their optimizer state the same on all ranks. Collective.

        Returns the distance of the ranks: the root of the mean over ranks of |tables of the rank - merged tables|^2
        (Frobenius norm). For two ranks that have touched every row equally often, it is half the distance of their
        tables. Without a step since the last merge it is 0, and the log keeps the distance before that merge.
        """
        num_rows = 0
        squares = torch.zeros(1, dtype=torch.float64, device=self.device)
        for group, touches in zip(self.row_groups, self.touches, strict=True):
            tensors = [group.weight, *group.slots.values()]
            for rows, own, merged in self._merged(touches, tensors):
                num_rows += rows.numel()
                squares += (own[0] - merged[0]).square().sum()
                for tensor, values in zip(tensors, merged, strict=True):
                    _put(tensor, rows, values)
            touches.zero_()
        if not num_rows:  # the same on all ranks
            return 0.0
        self.collectives.all_reduce(squares)
        self.difference = math.sqrt(float(squares) / self.processes.world_size)
        self.num_merges += 1
        return self.difference

    def _merged(self, touches: Tensor, tensors: list[Tensor]) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor]]]:
        """`(rows, this rank's values, merged values)` in float64 of the rows that any rank touched, a part at a time.

        float64 represents a float32 value times a count exactly, so a row that one rank alone has touched is unchanged.
        """
        touched = touches.nonzero()[:, 0]
        union = torch.cat(self.collectives.all_gather(touched)).unique()
        for rows in union.split(ROWS_AT_ONCE) if union.numel() else ():
            count = touches[rows].double()[:, None]
            own = [tensor.detach()[rows].double().view(rows.numel(), -1) for tensor in tensors]
            sums = self.collectives.all_reduce(torch.cat([count, *(values * count for values in own)], dim=1))
            means = sums[:, 1:] / sums[:, :1]
            yield rows, own, list(means.split([values.shape[1] for values in own], dim=1))

    @contextmanager
    def evaluation(self) -> Iterator[SplitShare]:
        with super().evaluation() as share, self._merged_tables():
            yield share

    @contextmanager
    def _merged_tables(self) -> Iterator[None]:
        """Inside, the tables are merged; afterwards they are the rank's own again."""
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        for group, touches in zip(self.row_groups, self.touches, strict=True):
            for rows, _, merged in self._merged(touches, [group.weight]):
                kept.append((group.weight, rows, group.weight.detach()[rows]))
                _put(group.weight, rows, merged[0])
        try:
            yield
        finally:
            for weight, rows, values in kept:
                _put(weight, rows, values)

    @contextmanager
    def ready_to_save(self) -> Iterator[None]:
        self.merge()
        yield

    def measures(self) -> dict[str, float]:
        return {**super().measures(), "difference_between_ranks": self.difference, "merges": self.num_merges}


@torch.no_grad()
def _put(tensor: Tensor, rows: Tensor, values: Tensor) -> None:
    tensor.index_copy_(0, rows, values.to(tensor.dtype).view(-1, *tensor.shape[1:]))
