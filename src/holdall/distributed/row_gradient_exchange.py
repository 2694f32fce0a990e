"""Exchange of the gradients of table rows: every rank gets those of the global batch.

Each rank first sums its own by row. Then every rank gathers `(row, gradient)` of the rows that others touched. Where
that is more bytes, the gradient of the whole storage is all-reduced, with a column that marks touched rows.

Used for replicated rows: all tables of `data-parallel`, the hot rows of `two-fold`. Gradients of cold rows go to their
owners (`two_fold_pack`). `training.strategies.gradient_exchange` calls both, and reduces the dense part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from holdall.distributed.collectives import Collectives
from holdall.kernels.row_gradient import RowGradient, sum_by_row
from holdall.optim.row_groups import RowGroup

RowReduction = Literal["auto", "all-reduce", "gather"]
"""Sum of gradients over ranks: all rows by all-reduce, touched rows by gather, or the one that sends fewer bytes."""


def exchange_row_gradients(groups: Sequence[RowGroup], collectives: Collectives) -> None:
    """Replace the gradient of each group by the sum over ranks, the same bits on each. A collective call.

    A group with U touched rows on the rank that touches most costs `(W - 1) * U * (4 + 4 * dim)` bytes, or
    `2 * (W - 1) / W * R * 4 * (dim + 1)` where that is less; all groups share one message of sizes.
    """
    if collectives.world_size == 1 or not groups:
        return
    own = [_summed(group) for group in groups]
    sizes = collectives.gather_sizes([ids.numel() for ids, _ in own])
    for place, (group, (ids, sums)) in enumerate(zip(groups, own, strict=True)):
        counts = [size[place] for size in sizes]
        if any(counts):
            group.replace_gradient(sum_over_ranks(ids, sums, counts, group.weight.shape[0], collectives))


def sum_over_ranks(
    ids: Tensor,
    sums: Tensor,
    counts: Sequence[int],
    num_rows: int,
    collectives: Collectives,
    reduction: RowReduction = "auto",
    kind: str | None = None,
) -> RowGradient:
    """Gradients of all ranks for rows 0 to `num_rows`, from the distinct `ids` [U] of each and their `sums` [U, d].

    `counts[r]` is how many rows rank r touched. Gathered ones come in the order of ranks, a row once per rank that
    touched it. Bytes are counted as `kind`; as `all_gather` or `all_reduce` when None.
    """
    dim, width = sums.shape[1], 4 if num_rows < 2**31 else 8
    gathered = (collectives.world_size - 1) * max(counts) * (width + dim * sums.element_size())
    reduced = collectives.reduce_bytes(num_rows * (dim + 1) * sums.element_size())
    if reduction == "gather" or (reduction == "auto" and gathered <= reduced):
        return _gathered(ids, sums, counts, width, collectives, kind or "all_gather")
    return _reduced(num_rows, ids, sums, collectives, kind or "all_reduce")


def _summed(group: RowGroup) -> tuple[Tensor, Tensor]:
    """Rows that this rank touched and the gradient of each, in float32 or wider."""
    dtype = torch.promote_types(group.weight.dtype, torch.float32)
    gradient = group.gradient()
    if gradient is None:
        weight = group.weight
        return torch.empty(0, dtype=torch.int64, device=weight.device), weight.new_empty(
            0, weight.shape[1], dtype=dtype
        )
    ids, sums = sum_by_row(RowGradient(gradient.ids, gradient.grad.to(dtype), gradient.bag_of, gradient.weights))
    return ids, sums


def _gathered(
    ids: Tensor, sums: Tensor, counts: Sequence[int], width: int, collectives: Collectives, kind: str
) -> RowGradient:
    """Rows of all ranks, in the order of ranks; a row number and its gradient are sent as the bytes of one row."""
    numbers = ids.to(_numbers(width))[:, None].view(torch.uint8)
    rows = torch.cat([numbers, sums.contiguous().view(torch.uint8)], dim=1)
    gathered = torch.cat(collectives.all_gather(rows, counts, kind=kind))
    numbers, values = (part.clone(memory_format=torch.contiguous_format) for part in gathered.tensor_split([width], 1))
    return RowGradient(numbers.view(_numbers(width))[:, 0].long(), values.view(sums.dtype))


def _numbers(width: int) -> torch.dtype:
    return torch.int32 if width == 4 else torch.int64


def _reduced(num_rows: int, ids: Tensor, sums: Tensor, collectives: Collectives, kind: str) -> RowGradient:
    whole = sums.new_zeros(num_rows, sums.shape[1] + 1)
    whole[ids] = torch.nn.functional.pad(sums, (0, 1), value=1.0)
    collectives.all_reduce(whole, kind=kind)
    touched = whole[:, -1].nonzero()[:, 0]  # a gradient of zero still counts as a touch: moments decay
    return RowGradient(touched, whole[touched, :-1])
