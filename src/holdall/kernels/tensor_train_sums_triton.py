"""Sums of a tensor train's backward: gradients of lookups by distinct id, and of ids and prefixes by slice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels import tensor_train_layout_triton
from holdall.kernels.launch_sizes import ceil_div
from holdall.kernels.row_gradient import RowGradient
from holdall.kernels.row_update_triton import segmented_add
from holdall.kernels.tensor_train_layout_triton import Distinct, Trains, run_bounds

COLUMNS, ITEMS = 128, 32
"""Block sizes of a program that sums by slice."""
SUM_COLUMNS = 128
"""Columns of a window of lookups that a program of one warp sums."""


@triton.jit
def _sum_by_id_kernel(  # type: ignore[no-untyped-def]
    run_of, order, bag_of, weights, grads, sums, num_lookups, dim,
    HAS_BAGS: tl.constexpr, WEIGHTED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * WINDOW + tl.arange(0, WINDOW)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = position < num_lookups
    id = tl.load(run_of + position, mask=inside, other=-1)
    after = tl.load(run_of + position + 1, mask=position + 1 < num_lookups, other=-1)  # a new id in the next window
    before = tl.load(run_of + position - 1, mask=inside & (position > 0), other=-1)
    lookup = tl.load(order + position, mask=inside, other=0)
    source = lookup
    if HAS_BAGS:
        source = tl.load(bag_of + lookup, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (column < dim)[None, :]
    grad = tl.load(grads + source[:, None] * dim + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if WEIGHTED:
        grad *= tl.load(weights + lookup, mask=inside, other=0.0).to(tl.float32)[:, None]
    begins = tl.broadcast_to((id != before).to(tl.int32)[:, None], [WINDOW, BLOCK_D])
    _, total = tl.associative_scan((begins, grad), 0, segmented_add)
    out = sums + id.to(tl.int64)[:, None] * dim + column[None, :]
    tl.store(out, total, mask=mask & (id != after)[:, None])


def sum_by_id(distinct: Distinct, gradient: RowGradient) -> Tensor:
    """[L, dim], the first U rows in use: the gradient of every distinct id's row."""
    num_lookups, dim = distinct.num_lookups, gradient.grad.shape[1]
    sums = gradient.grad.new_empty(num_lookups, dim, dtype=torch.float32)
    bag_of, weights = gradient.bag_of, gradient.weights
    block = min(SUM_COLUMNS, 1 << (dim - 1).bit_length())
    window = tensor_train_layout_triton.WINDOW
    _sum_by_id_kernel[(ceil_div(num_lookups, window), ceil_div(dim, block))](
        distinct.run_of, distinct.order, distinct.order if bag_of is None else bag_of,
        distinct.order if weights is None else weights, gradient.grad, sums, num_lookups, dim,
        HAS_BAGS=bag_of is not None, WEIGHTED=weights is not None, WINDOW=window, BLOCK_D=block, num_warps=1,
    )  # fmt: skip
    return sums


@triton.jit
def _sum_items(  # type: ignore[no-untyped-def]
    items, stride, width, order, begin, end, skipped, out, COLUMNS: tl.constexpr, ITEMS: tl.constexpr
):
    """Write to `out` [width] the sum of rows `order[begin:end] - skipped` of `items` [.., stride]."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ITEMS, COLUMNS], dtype=tl.float32)
    for start in range(begin, end, ITEMS):
        position = start + tl.arange(0, ITEMS)
        item = tl.load(order + position, mask=position < end, other=skipped) - skipped
        cell = item[:, None] * stride + column[None, :]
        total += tl.load(items + cell, mask=(position < end)[:, None] & (column < width)[None, :], other=0.0)
    tl.store(out + column, tl.sum(total, axis=0), mask=column < width)


@triton.jit
def _sum_by_slice_kernel(  # type: ignore[no-untyped-def]
    bins, order, num_lookups, slices1, slices3, N1, grad_first, grad_last, FIRST_STRIDE, LAST_STRIDE, gradient,
    D1: tl.constexpr, D3: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    bin = tl.program_id(0)
    begin, end = run_bounds(bins, 2 * num_lookups, bin, STEPS)
    if bin < N1:
        place = tl.load(slices1 + 4 * bin + 1)
        width = D1 * tl.load(slices1 + 4 * bin + 3).to(tl.int32)
        _sum_items(grad_first, FIRST_STRIDE, width, order, begin, end, 0, gradient + place, COLUMNS, ITEMS)
    else:
        place = tl.load(slices3 + 4 * (bin - N1) + 1)
        width = D3 * tl.load(slices3 + 4 * (bin - N1) + 2).to(tl.int32)
        _sum_items(grad_last, LAST_STRIDE, width, order, begin, end, num_lookups, gradient + place, COLUMNS, ITEMS)


def sum_by_slice(trains: Trains, distinct: Distinct, grad_first: Tensor, grad_last: Tensor, gradient: Tensor) -> None:
    """Add up `grad_first` [P, d1*r1] by first slice and `grad_last` [U, r2*d3] by last slice, into `gradient`."""
    assert distinct.bins is not None
    bins, order = torch.sort(distinct.bins, stable=True)
    n1, _, n3 = trains.sizes
    steps = -(-(2 * distinct.num_lookups).bit_length() // 4) * 4
    width = max(grad_first.shape[1], grad_last.shape[1])
    _sum_by_slice_kernel[(n1 + n3, ceil_div(width, COLUMNS))](
        bins, order, distinct.num_lookups, trains.slices[0], trains.slices[2], n1, grad_first, grad_last,
        grad_first.shape[1], grad_last.shape[1], gradient, D1=trains.dims[0], D3=trains.dims[2], STEPS=steps,
        COLUMNS=COLUMNS, ITEMS=ITEMS,
    )  # fmt: skip
