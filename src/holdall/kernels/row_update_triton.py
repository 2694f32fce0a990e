"""Sum the gradients of looked-up rows and apply the optimizer, in Triton: no gradient per row in memory, no host sync.

Shapes: L lookups, R rows of D numbers, blocks of K sorted lookups.

The ids are sorted once, so lookups of one row are a run. Each program takes one block of K sorted lookups, gathers
their gradients and sums them by run (a segmented scan in registers). A run inside the block is complete: its row is
updated at once. A run that crosses blocks leaves one partial sum a block, and a second kernel, at the block where the
run begins, adds these up and updates the row. So a popular id is spread over many programs, every row is written by
one, and the order of every sum is fixed by (ids, K): the result is deterministic, bit for bit.

Bytes: gradients once, touched rows and their state read and written once, 2 * L / K * D partial sums at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels.row_gradient import RowGradient

OPTIMIZERS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3}
ELEMENTS = 2048
"""Numbers a program of one warp holds: 64 registers a thread for the gradients."""
FINISH_BLOCKS = 64
"""Partial sums that the second kernel adds at a time."""


@triton.jit
def _later(flag_a, value_a, flag_b, value_b):  # type: ignore[no-untyped-def]
    return flag_a | flag_b, tl.where(flag_b != 0, value_b, value_a + value_b)


@triton.jit
def _rounded(value, weight, seed, position, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 `value` in the type of `weight`'s elements; up or down at random, in proportion, if asked (bfloat16)."""
    if STOCHASTIC:
        noise = tl.randint(seed, position).to(tl.uint32, bitcast=True) & 0xFFFF
        bits = (value.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
        value = bits.to(tl.float32, bitcast=True)
    return value.to(weight.dtype.element_ty)


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    weight, state, second_state, row, mask_row, grad, dim, lr, eps, beta1, beta2, correction1, correction2, seed,
    OPTIMIZER: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Apply summed gradients `grad` [K, BLOCK_D] to the rows `row` [K] where `mask_row`."""
    column = tl.arange(0, BLOCK_D)
    mask = mask_row[:, None] & (column < dim)[None, :]
    cell = row[:, None] * dim + column[None, :]
    old = tl.load(weight + cell, mask=mask, other=0.0).to(tl.float32)
    if OPTIMIZER == 0:
        new = old - lr * grad
    if OPTIMIZER == 1:
        total = tl.load(state + cell, mask=mask, other=0.0) + grad * grad
        tl.store(state + cell, total, mask=mask)
        new = old - lr * grad / (tl.sqrt(total) + eps)
    if OPTIMIZER == 2:
        total = tl.load(state + row, mask=mask_row, other=0.0) + tl.sum(grad * grad, axis=1) / dim
        tl.store(state + row, total, mask=mask_row)
        new = old - grad * (lr / (tl.sqrt(total) + eps))[:, None]
    if OPTIMIZER == 3:
        first = tl.load(state + cell, mask=mask, other=0.0)
        first += (grad - first) * (1.0 - beta1)
        second = tl.load(second_state + cell, mask=mask, other=0.0) * beta2 + grad * grad * (1.0 - beta2)
        tl.store(state + cell, first, mask=mask)
        tl.store(second_state + cell, second, mask=mask)
        new = old - lr * (first / correction1) / (tl.sqrt(second / correction2) + eps)
    tl.store(weight + cell, _rounded(new, weight, seed, cell, STOCHASTIC), mask=mask)


@triton.jit
def _sum_runs_kernel(  # type: ignore[no-untyped-def]
    ids, order, bag_of, lookup_weights, grads, partial, weight, state, second_state, num_lookups, dim,
    lr, eps, beta1, beta2, correction1, correction2, seed,
    HAS_BAGS: tl.constexpr, WEIGHTED: tl.constexpr, OPTIMIZER: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    position = block * BLOCK_K + tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_D)
    inside = position < num_lookups
    row = tl.load(ids + position, mask=inside, other=-1).to(tl.int64)
    before = tl.load(ids + position - 1, mask=inside & (position > 0), other=-1).to(tl.int64)
    after = tl.load(ids + position + 1, mask=position + 1 < num_lookups, other=-1).to(tl.int64)
    entering = tl.load(ids + block * BLOCK_K - 1, mask=block > 0, other=-1).to(tl.int64)  # id just before this block
    source = tl.load(order + position, mask=inside, other=0).to(tl.int64)
    lookup = source
    if HAS_BAGS:
        source = tl.load(bag_of + lookup, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (column < dim)[None, :]
    grad = tl.load(grads + source[:, None] * dim + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if WEIGHTED:
        grad *= tl.load(lookup_weights + lookup, mask=inside, other=0.0).to(tl.float32)[:, None]
    starts = tl.broadcast_to((row != before).to(tl.int32)[:, None], [BLOCK_K, BLOCK_D])
    starts, sums = tl.associative_scan((starts, grad), 0, _later)
    ends = inside & (row != after)
    last = inside & (position == block * BLOCK_K + BLOCK_K - 1)
    entered = row == entering
    place = partial + (2 * block) * dim + column[None, :] + tl.zeros([BLOCK_K, 1], dtype=tl.int64)
    carries_in = (ends | last) & entered
    tl.store(place, sums, mask=carries_in[:, None] & (column < dim)[None, :])
    carries_out = last & (row == after) & (row != entering)
    tl.store(place + dim, sums, mask=carries_out[:, None] & (column < dim)[None, :])
    _update(
        weight, state, second_state, row, ends & (row != entering), sums, dim, lr, eps, beta1, beta2, correction1,
        correction2, seed, OPTIMIZER, STOCHASTIC, BLOCK_D,
    )  # fmt: skip


@triton.jit
def _finish_runs_kernel(  # type: ignore[no-untyped-def]
    ids, partial, weight, state, second_state, num_lookups, dim,
    lr, eps, beta1, beta2, correction1, correction2, seed,
    OPTIMIZER: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program a block: if a run begins in it and goes on behind it, add up the run and update its row."""
    block = tl.program_id(0).to(tl.int64)
    end = (block + 1) * BLOCK_K
    row = tl.load(ids + end - 1, mask=end < num_lookups, other=-1).to(tl.int64)
    after = tl.load(ids + end, mask=end < num_lookups, other=-2).to(tl.int64)
    entering = tl.load(ids + block * BLOCK_K - 1, mask=block > 0, other=-1).to(tl.int64)
    if (row == after) & (row != entering):
        column = tl.arange(0, BLOCK_D)
        total = tl.load(partial + (2 * block + 1) * dim + column, mask=column < dim, other=0.0)
        other = block + 1 + tl.arange(0, BLOCK_C)
        found = BLOCK_C
        while found == BLOCK_C:
            first = tl.load(ids + other * BLOCK_K, mask=other * BLOCK_K < num_lookups, other=-1).to(tl.int64)
            member = first == row
            mask = member[:, None] & (column < dim)[None, :]
            total += tl.sum(tl.load(partial + (2 * other)[:, None] * dim + column[None, :], mask=mask, other=0.0), 0)
            found = tl.sum(member.to(tl.int32), axis=0)
            other += BLOCK_C
        one = tl.zeros([1], dtype=tl.int64)
        _update(
            weight, state, second_state, row + one, one == 0, total[None, :], dim, lr, eps, beta1, beta2, correction1,
            correction2, seed, OPTIMIZER, STOCHASTIC, BLOCK_D,
        )  # fmt: skip


def update_rows(
    optimizer: str,
    weight: Tensor,
    gradient: RowGradient,
    *states: Tensor,
    lr: float,
    eps: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    step: int = 1,
    stochastic_seed: int | None = None,
) -> None:
    """Sum `gradient` by row and apply the optimizer (see `row_update`) to the rows of `weight` [R, D] it touches.

    `states` are the optimizer's, as the functions of `row_update` take them, in float32. With `stochastic_seed`, new
    values of a bfloat16 storage are rounded up or down at random, so that small updates are not lost.
    """
    num_lookups, dim = gradient.ids.numel(), weight.shape[1]
    if num_lookups == 0:
        return
    ids, order = torch.sort(gradient.ids.int() if weight.shape[0] < 2**31 else gradient.ids, stable=True)
    grads = gradient.grad.contiguous()
    block_d = triton.next_power_of_2(dim)
    block_k = max(1, min(128, ELEMENTS // block_d))
    num_blocks = triton.cdiv(num_lookups, block_k)
    partial = torch.empty(num_blocks, 2, dim, dtype=torch.float32, device=weight.device)
    rates = (lr, eps, betas[0], betas[1], 1.0 - betas[0] ** step, 1.0 - betas[1] ** step, stochastic_seed or 0)
    state = states[0] if states else weight
    second = states[1] if len(states) > 1 else state
    shared = {
        "OPTIMIZER": OPTIMIZERS[optimizer],
        "STOCHASTIC": stochastic_seed is not None and weight.dtype == torch.bfloat16,
        "BLOCK_K": block_k,
        "BLOCK_D": block_d,
    }
    _sum_runs_kernel[(num_blocks,)](
        ids,
        order,
        order if gradient.bag_of is None else gradient.bag_of,
        order if gradient.weights is None else gradient.weights,
        grads,
        partial,
        weight,
        state,
        second,
        num_lookups,
        dim,
        *rates,
        HAS_BAGS=gradient.bag_of is not None,
        WEIGHTED=gradient.weights is not None,
        num_warps=1,
        **shared,
    )
    if num_blocks > 1:
        _finish_runs_kernel[(num_blocks,)](
            ids,
            partial,
            weight,
            state,
            second,
            num_lookups,
            dim,
            *rates,
            BLOCK_C=max(4, min(FINISH_BLOCKS, 4 * ELEMENTS // block_d)),
            num_warps=4,
            **shared,
        )
