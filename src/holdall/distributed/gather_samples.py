"""Samples of all processes in one tensor, with gradients: for losses that compare the samples of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdall.distributed.collectives import Collectives


class GatherSamples:
    """Concatenation of the rows [B_r, ...] of every rank, in the order of ranks; shares may differ, and be empty.

    All ranks call it equally often, and backpropagate through every result that has gradients: the gradient of a row is
    the sum over ranks. The collectives must be its own, since those of a backward run in between others.
    """

    def __init__(self, collectives: Collectives):
        self.collectives = collectives

    def __call__(self, rows: Tensor) -> tuple[int, Tensor]:
        """Place of this rank's first row, and the rows of all ranks."""
        sizes = [size for (size,) in self.collectives.gather_sizes([rows.shape[0]])]
        return sum(sizes[: self.collectives.rank]), _Gathered.apply(rows, self.collectives, sizes)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, collectives: Collectives, sizes: Sequence[int]) -> Tensor:
        ctx.collectives, ctx.sizes = collectives, sizes
        return torch.cat(collectives.all_gather(rows, sizes, kind="samples")).to(rows.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rank, sizes = ctx.collectives.rank, ctx.sizes
        total = ctx.collectives.all_reduce(grad.contiguous().clone(), kind="gradients_of_samples")
        return total[sum(sizes[:rank]) : sum(sizes[: rank + 1])], None, None
