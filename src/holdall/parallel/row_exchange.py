"""Gradients of table rows, exchanged so that every rank holds those of the global batch.

Each rank first sums its own by row. Then every rank gathers `(row, gradient)` of the rows that others touched; or,
where that is more bytes, the gradient of the whole storage is reduced, with a column that says what was touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holdall.kernels.row_gradient import RowGradient, sum_by_row
from holdall.parallel.collectives import Collectives
from holdall.training.optimizers import RowGroup


def exchange_row_gradients(groups: Sequence[RowGroup], collectives: Collectives) -> None:
    """Replace the gradient of each group by that of all ranks, the same bits on each. Collective.

    A group with U touched rows on the rank that touches most costs `(W - 1) * U * (4 + 4 * dim)` bytes, or
    `2 * (W - 1) / W * R * 4 * (dim + 1)` where that is less; all groups share one message of sizes.
    """
    if collectives.world_size == 1 or not groups:
        return
    own = [_summed(group) for group in groups]
    sizes = collectives.gather_sizes([ids.numel() for ids, _ in own])
    for place, (group, (ids, sums)) in enumerate(zip(groups, own, strict=True)):
        counts = [size[place] for size in sizes]
        if not any(counts):
            continue
        num_rows, dim = group.weight.shape[0], sums.shape[1]
        gathered = (collectives.world_size - 1) * max(counts) * (_id_bytes(group) + dim * sums.element_size())
        if gathered <= collectives.reduce_bytes(num_rows * (dim + 1) * sums.element_size()):
            group.replace_gradient(_gathered(group, ids, sums, counts, collectives))
        else:
            group.replace_gradient(_reduced(num_rows, ids, sums, collectives))


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


def _id_bytes(group: RowGroup) -> int:
    return 4 if group.weight.shape[0] < 2**31 else 8


def _gathered(
    group: RowGroup, ids: Tensor, sums: Tensor, counts: Sequence[int], collectives: Collectives
) -> RowGradient:
    """Rows of all ranks, in the order of ranks; a number and its gradient travel as the bytes of one row."""
    width = _id_bytes(group)
    numbers = ids.to(_numbers(width))[:, None].view(torch.uint8)
    rows = torch.cat([numbers, sums.contiguous().view(torch.uint8)], dim=1)
    everything = torch.cat(collectives.all_gather(rows, counts))
    numbers, values = (
        part.clone(memory_format=torch.contiguous_format) for part in everything.tensor_split([width], 1)
    )
    return RowGradient(numbers.view(_numbers(width))[:, 0].long(), values.view(sums.dtype))


def _numbers(width: int) -> torch.dtype:
    return torch.int32 if width == 4 else torch.int64


def _reduced(num_rows: int, ids: Tensor, sums: Tensor, collectives: Collectives) -> RowGradient:
    whole = sums.new_zeros(num_rows, sums.shape[1] + 1)
    whole[ids] = torch.nn.functional.pad(sums, (0, 1), value=1.0)
    collectives.all_reduce(whole)
    touched = whole[:, -1].nonzero()[:, 0]  # a gradient of zero still counts as a touch: moments decay
    return RowGradient(touched, whole[touched, :-1])
