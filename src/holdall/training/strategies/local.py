"""`local`: MLPs in step, tables learned by each rank on its own samples and merged now and then (distributed DLRM).

Between merges no row crosses the network. A merge takes, of every row that some rank has touched since the last one,
the mean over ranks weighted by how often each looked it up: a row that one rank has learned is not diluted by the
others, which never saw it. Optimizer state is merged alike. Replicas are equal after a merge, so only touched rows are
sent.

What is relaxed: a lookup may miss what other ranks learned since the last merge. What is not: the gradients of the
MLPs, and of the parts of compressed tables that are not rows, are those of the global batch in every step. The loss is
the mean over the global batch here too, so that with SGD and `--merge-every 1` rows that one rank alone touches in a
step move as under `data-parallel`; a row that several touch moves by the weighted mean of their moves, not by the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from holdall.optim.optimizers import Optimizers
from holdall.training.strategies.data_parallel import DataParallel

ROWS_AT_ONCE = 1 << 16
"""Rows merged at a time: bounds the memory of a merge, whatever was touched."""


class Local(DataParallel):
    """Tables of each rank's own between merges. Checkpoints hold merged tables, and saving one merges them; an
    evaluation measures merged tables and leaves those of each rank as they are."""

    def attach(self, optimizers: Optimizers) -> None:
        super().attach(optimizers)
        self.touches = [
            torch.zeros(group.weight.shape[0], dtype=torch.int32, device=group.weight.device)
            for group in self.row_groups
        ]
        """Lookups of every row since the last merge."""
        self.difference = 0.0
        """Between ranks, before the last merge: see `merge`."""
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

        Returns how far the ranks were apart: the root of the mean over ranks of |tables of the rank - merged tables|^2
        (Frobenius norm). Of two ranks that have touched every row equally often, half the distance of their tables.
        Without a step since the last merge that is 0, and what was measured then is kept for the log.
        """
        if self.processes.world_size == 1:
            return 0.0
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

        float64 holds a float32 value times a count exactly, so what one rank alone has touched is merged unchanged.
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
    def evaluating(self) -> Iterator[None]:
        if self.processes.world_size == 1:
            yield
            return
        with super().evaluating():
            yield from self._on_merged_tables()

    def _on_merged_tables(self) -> Iterator[None]:
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
    def checkpoint_view(self) -> Iterator[None]:
        self.merge()
        yield

    def measures(self) -> dict[str, float]:
        if self.processes.world_size == 1:
            return {}
        return {**super().measures(), "difference_between_ranks": self.difference, "merges": self.num_merges}


@torch.no_grad()
def _put(tensor: Tensor, rows: Tensor, values: Tensor) -> None:
    tensor.index_copy_(0, rows, values.to(tensor.dtype).view(-1, *tensor.shape[1:]))
