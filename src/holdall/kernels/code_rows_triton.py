"""Rows of codes on grids moved and rounded stochastically, in Triton: one launch for the touched rows of all tables.

The numbers are those of `tables.rounding.move_codes` with the noise of `stochastic.uniform_noise`: products and sums
are rounded one by one, as operations of torch are. A program takes a block of rows and finds the table of each. It
reads codes, grids and changes once, and writes codes and grids once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels.launch_sizes import ceil_div, next_power_of_2
from holdall.kernels.row_update_triton import _mix

ELEMENTS = 512
"""Numbers of a program of one warp."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class CodePart(NamedTuple):
    """Table of codes with `num_touched` touched rows."""

    codes: Tensor
    grid: Tensor
    key: tuple[int, int]
    num_touched: int


@triton.jit
def _rounded_towards(x, DTYPE: tl.constexpr, UP: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """`tables.rounding._rounded_towards`: `x` in a type of 16 bits, rounded up or down, in float32."""
    near = tl.minimum(tl.maximum(x, -LIMIT), LIMIT).to(DTYPE)
    bits = near.to(tl.int16, bitcast=True).to(tl.int32)
    order = tl.where(bits < 0, -32768 - bits, bits)  # rises with the number
    if UP:
        order += (near.to(tl.float32) < x).to(tl.int32)
    else:
        order -= (near.to(tl.float32) > x).to(tl.int32)
    bits = tl.where(order < 0, -32768 - order, order)
    found = bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return tl.minimum(tl.maximum(found, -LIMIT), LIMIT)


@triton.jit
def _move_kernel(  # type: ignore[no-untyped-def]
    ids, delta, parts, num_rows, num_parts, headroom, SEARCH: tl.constexpr, BITS: tl.constexpr, GRID: tl.constexpr,
    LIMIT: tl.constexpr, EPS: tl.constexpr, PER_LEVEL: tl.constexpr, DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`parts` [P, 5] has the first row, the addresses of codes and grid, and the key of each table."""
    LEVELS: tl.constexpr = (1 << BITS) - 1
    position = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = position < num_rows
    part = tl.zeros([BLOCK_K], dtype=tl.int32)
    for power in tl.static_range(SEARCH):
        later = part + (1 << (SEARCH - 1 - power))
        first = tl.load(parts + later * 5, mask=later < num_parts, other=num_rows)
        part = tl.where((later < num_parts) & (first <= position), later, part)
    line = parts + part * 5
    row = tl.load(ids + position, mask=inside, other=0)
    column = tl.arange(0, BLOCK_D)
    real = (column < DIM)[None, :]
    mask = inside[:, None] & real
    width = (DIM * BITS + 7) // 8
    codes_at = tl.load(line + 1) + row * width
    if BITS == 8:
        codes = tl.load(codes_at.to(tl.pointer_type(tl.uint8))[:, None] + column[None, :], mask=mask, other=0)
    else:
        pairs = tl.load(codes_at.to(tl.pointer_type(tl.uint8))[:, None] + (column // 2)[None, :], mask=mask, other=0)
        codes = (pairs >> ((column % 2) * 4)[None, :].to(tl.uint8)) & 15
    codes = codes.to(tl.float32)
    grid_at = tl.load(line + 2).to(tl.pointer_type(GRID)) + row * 2
    zero = tl.load(grid_at, mask=inside, other=0.0).to(tl.float32)[:, None]
    step = tl.load(grid_at + 1, mask=inside, other=0.0).to(tl.float32)[:, None]
    change = tl.load(delta + position[:, None] * DIM + column[None, :], mask=mask, other=0.0)

    moved = zero + codes * step + change
    low = tl.min(tl.where(real, moved, float("inf")), axis=1)[:, None]
    high = tl.max(tl.where(real, moved, float("-inf")), axis=1)[:, None]
    outgrown = (low < zero) | (high > zero + LEVELS * step)
    margin = (high - low) * headroom
    low -= margin
    high += margin
    if GRID.primitive_bitwidth == 32:
        wider = low - EPS * tl.abs(low)
        wider_step = (high - wider) * PER_LEVEL
    else:
        wider = _rounded_towards(low, GRID, False, LIMIT)
        wider_step = _rounded_towards(
            tl.div_rn(high - wider, tl.full(high.shape, LEVELS, tl.float32)), GRID, True, LIMIT
        )
    zero = tl.where(outgrown, wider, zero)
    step = tl.where(outgrown, wider_step, step)
    steps = tl.where(outgrown, moved - zero, change)
    steps = tl.div_rn(steps, tl.broadcast_to(tl.where(step > 0, step, 1.0), [BLOCK_K, BLOCK_D]))
    steps = tl.where(step > 0, steps, 0.0)
    cell = row[:, None] * DIM + column[None, :]
    low_key = tl.load(line + 3).to(tl.uint32)[:, None]
    high_key = tl.load(line + 4).to(tl.uint32)[:, None]
    noise = _mix(_mix(cell.to(tl.uint32) ^ low_key) + (cell >> 32).to(tl.uint32) * 0x9E3779B9 + high_key)
    whole = tl.floor(steps)
    steps = whole + (noise.to(tl.float32) * (1.0 / 4294967296.0) < steps - whole).to(tl.float32)
    codes = tl.where(outgrown, 0.0, codes) + steps
    new = tl.where(mask, tl.minimum(tl.maximum(codes, 0.0), LEVELS), 0.0).to(tl.int32).to(tl.uint8)

    if BITS == 8:
        tl.store(codes_at.to(tl.pointer_type(tl.uint8))[:, None] + column[None, :], new, mask=mask)
    else:
        even, odd = tl.split(tl.reshape(new, [BLOCK_K, BLOCK_D // 2, 2]))
        half = tl.arange(0, BLOCK_D // 2)
        pointers = codes_at.to(tl.pointer_type(tl.uint8))[:, None] + half[None, :]
        tl.store(pointers, even | (odd << 4), mask=inside[:, None] & (half < width)[None, :])
    both = tl.arange(0, 2)[None, :]
    tl.store(grid_at[:, None] + both, tl.where(both == 0, zero, step).to(GRID), mask=inside[:, None])


def fits(part: CodePart, delta: Tensor) -> bool:
    """Whether the kernel takes a table's codes and changes of its rows."""
    whole = part.codes.is_contiguous() and part.grid.is_contiguous()
    return whole and part.grid.dtype in TYPES and delta.dtype == torch.float32 and delta.shape[1] <= 2048


def move_rows(parts: Sequence[CodePart], ids: Tensor, delta: Tensor, bits: int, headroom: float) -> None:
    """Add `delta` [U, dim] to the rows `ids` [U] of tables, those of one table after the other, and round them.

    A row that outgrows its grid gets a new one that is wider by `headroom` of its range. Codes are of `bits` bits, and
    grids of one type.
    """
    (num_rows, dim), dtype = delta.shape, parts[0].grid.dtype
    lines, first = [], 0
    for part in parts:
        lines.append((first, part.codes.data_ptr(), part.grid.data_ptr(), *part.key))
        first += part.num_touched
    block_d = next_power_of_2(max(2, dim))
    block_k = max(1, ELEMENTS // block_d)
    eps = torch.finfo(dtype).eps
    _move_kernel[(ceil_div(num_rows, block_k),)](
        ids, delta.contiguous(), torch.tensor(lines).to(delta.device), num_rows, len(parts), headroom / 2,
        SEARCH=(len(parts) - 1).bit_length(), BITS=bits, GRID=TYPES[dtype], LIMIT=torch.finfo(dtype).max, EPS=eps,
        PER_LEVEL=(1 + eps) / (2**bits - 1), DIM=dim, BLOCK_K=block_k, BLOCK_D=block_d, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
