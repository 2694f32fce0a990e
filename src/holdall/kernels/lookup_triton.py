"""Lookup kernels of a pack of tables, in Triton: one launch for all features, cast as they are written.

Shapes: R rows of D values in the storage, L lookups, N bags of which bag n reads lookups `offsets[n]..offsets[n + 1]`.
The floor is bytes: each distinct row read once, each output value written once. Called by `embedding.pack_lookup` and
`embedding.dense_frobenius_lookup`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels.launch_sizes import ceil_div, next_power_of_2

ELEMENTS = 4096
"""Numbers of a program: 8 loads of 16 bytes in flight a thread with 4 warps."""


@triton.jit
def _gather_kernel(storage, rows, out, num_lookups, dim, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    lookup = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    column = tl.arange(0, BLOCK_D)
    inside = lookup < num_lookups
    row = tl.load(rows + lookup, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (column < dim)[None, :]
    values = tl.load(storage + row[:, None] * dim + column[None, :], mask=mask)
    tl.store(out + lookup[:, None] * dim + column[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _pool_kernel(  # type: ignore[no-untyped-def]
    storage,
    rows,
    offsets,
    weights,
    out,
    num_bags,
    num_features,
    dim,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Output row n is bag `(n % F) * B + n // F`: bags are feature-major, outputs sample-major."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    inside = place < num_bags
    bag = (place % num_features) * (num_bags // num_features) + place // num_features
    start = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
    length = tl.load(offsets + bag + 1, mask=inside, other=0).to(tl.int64) - start
    longest = tl.max(length, axis=0)
    total = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    step = tl.zeros_like(longest)
    lookup = start  # counted up: Triton 3.6 and 3.7 fail to compile `rows + start + step` where dim is 16 or 32
    while step < longest:
        reads = inside & (step < length)
        row = tl.load(rows + lookup, mask=reads, other=0).to(tl.int64)
        mask = reads[:, None] & (column < dim)[None, :]
        values = tl.load(storage + row[:, None] * dim + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + lookup, mask=reads, other=0.0).to(tl.float32)[:, None]
        total += values
        step += 1
        lookup += 1
    if MEAN:
        total /= tl.maximum(length, 1).to(tl.float32)[:, None]
    mask = inside[:, None] & (column < dim)[None, :]
    tl.store(out + place[:, None] * dim + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _write_columns_kernel(  # type: ignore[no-untyped-def]
    storage, values, info, out, num_lookups, source_stride, sample_stride, out_columns, dim, COLUMNS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    lookup = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    inside = lookup < num_lookups
    sample = lookup // COLUMNS
    line = info + (lookup - sample * COLUMNS) * 3
    source = tl.load(line, mask=inside, other=0)
    target = tl.load(line + 1, mask=inside, other=0)
    start = tl.load(line + 2, mask=inside, other=0)
    number = tl.load(values + source * source_stride + sample * sample_stride, mask=inside, other=0).to(tl.int64)
    row = start + number
    column = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (column < dim)[None, :]
    vectors = tl.load(storage + row[:, None] * dim + column[None, :], mask=mask)
    place = (sample * out_columns + target) * dim
    tl.store(out + place[:, None] + column[None, :], vectors.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _number_kernel(  # type: ignore[no-untyped-def]
    values, info, rows, num_lookups, source_stride, sample_stride, num_others, COLUMNS: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    lookup = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    inside = lookup < num_lookups
    sample = lookup // COLUMNS
    line = info + (lookup - sample * COLUMNS) * 3
    source = tl.load(line, mask=inside, other=0)
    other = tl.load(line + 1, mask=inside, other=0)
    start = tl.load(line + 2, mask=inside, other=0)
    number = tl.load(values + source * source_stride + sample * sample_stride, mask=inside, other=0).to(tl.int64)
    row = tl.where(start >= 0, start + number, -1 - (sample * num_others + other))
    tl.store(rows + lookup, row.to(rows.dtype.element_ty), mask=inside)


def write_columns(storage: Tensor, values: Tensor, info: Tensor, out: Tensor) -> None:
    """Write rows of `storage` [R, D] for ids `values` [F, B] into columns of `out` [B, F', D], in its type.

    For each line (source, target, start) of `info` [n, 3], row `start + id` of the ids `values[source]` is written to
    `out[:, target]`. Other columns do not change.
    """
    num_lookups, dim = values.shape[1] * len(info), storage.shape[1]
    if num_lookups:
        block_d = next_power_of_2(dim)
        block_l = max(1, ELEMENTS // block_d)
        _write_columns_kernel[(ceil_div(num_lookups, block_l),)](
            storage,
            values,
            info,
            out,
            num_lookups,
            *values.stride(),
            out.shape[1],
            dim,
            COLUMNS=len(info),
            BLOCK_L=block_l,
            BLOCK_D=block_d,
            num_warps=4,
        )


def row_numbers(values: Tensor, info: Tensor, num_others: int, num_rows: int) -> Tensor:
    """Numbers [B, n] of the rows to read, for lines (source, other, start) of `info` [n, 3].

    A number is that of row `start + id` of a storage of `num_rows` or, where `start` is negative, -1 - k for row
    k = sample * num_others + other of a second one.
    """
    rows = torch.empty(values.shape[1], len(info), dtype=torch.int32, device=values.device)
    if max(num_rows, values.shape[1] * num_others) >= 2**31:
        rows = rows.long()
    if rows.numel():
        grid = (ceil_div(rows.numel(), 1024),)
        shared = (rows.numel(), *values.stride(), num_others)
        _number_kernel[grid](values, info, rows, *shared, COLUMNS=len(info), BLOCK_L=1024, num_warps=4)
    return rows


def gather(storage: Tensor, rows: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """`storage[rows]` [..., D] in `dtype`; rows are int32 or int64."""
    dim = storage.shape[1]
    out = storage.new_empty(*rows.shape, dim, dtype=dtype) if out is None else out
    rows = rows.contiguous()
    if rows.numel():
        block_d = next_power_of_2(dim)
        block_l = max(1, ELEMENTS // block_d)
        _gather_kernel[(ceil_div(rows.numel(), block_l),)](
            storage, rows, out, rows.numel(), dim, BLOCK_L=block_l, BLOCK_D=block_d, num_warps=4
        )
    return out


def pool(
    storage: Tensor,
    rows: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    *,
    num_features: int,
    mean: bool,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Sums or means of bags [B, F, D] in `dtype`, from feature-major bags (`offsets` [F * B + 1]); 0 for empty bags."""
    dim, num_bags = storage.shape[1], offsets.numel() - 1
    if out is None:
        out = storage.new_empty(num_bags // num_features, num_features, dim, dtype=dtype)
    if num_bags:
        block_d = next_power_of_2(dim)
        block_n = max(1, ELEMENTS // 4 // block_d)
        _pool_kernel[(ceil_div(num_bags, block_n),)](
            storage,
            rows,
            offsets,
            rows if weights is None else weights,
            out,
            num_bags,
            num_features,
            dim,
            WEIGHTED=weights is not None,
            MEAN=mean,
            BLOCK_N=block_n,
            BLOCK_D=block_d,
            num_warps=4,
        )
    return out
