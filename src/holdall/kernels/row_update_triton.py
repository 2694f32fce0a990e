"""Row gradients summed and applied in one pass, in Triton: no gradient per row in memory, no host synchronization.

Shapes: L lookups, R rows of D numbers, blocks of K sorted lookups.

The ids are sorted once, so lookups of one row are a run. Each program takes one block of K sorted lookups, gathers
their gradients and sums them by run (a segmented scan in registers). A run inside the block is complete: its row is
updated at once. A run that crosses blocks leaves one partial sum a block, and its first block is put on a list; a
second kernel adds up the runs of the list and updates their rows. So a popular id is spread over many programs, every
row is written by one, and (ids, K) fix the order of every sum: results are the same bit for bit.

Bytes: gradients once, touched rows and their state read and written once, 2 * L / K * D partial sums at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels.launch_sizes import ceil_div, next_power_of_2
from holdall.kernels.row_gradient import RowGradient
from holdall.kernels.row_update import NO_DEVICE_SCALARS, DeviceScalars, UpdateRule, UpdateScalars
from holdall.kernels.side_stream import beside
from holdall.kernels.stochastic import FORMATS

SGD = tl.constexpr(UpdateRule.SGD.value)
ADAGRAD = tl.constexpr(UpdateRule.ADAGRAD.value)
ROWWISE_ADAGRAD = tl.constexpr(UpdateRule.ROWWISE_ADAGRAD.value)
ADAM = tl.constexpr(UpdateRule.ADAM.value)
NORM = tl.constexpr(UpdateRule.NORM.value)
MOMENTUM_SGD = tl.constexpr(UpdateRule.MOMENTUM_SGD.value)
ADAMW = tl.constexpr(UpdateRule.ADAMW.value)

ELEMENTS = 4096
"""Numbers a program of one warp keeps, as many as leave registers for the rows and their state. 1.7 million lookups,
dim 128, SGD, on an H200, sort included: 0.96 ms with 1024, 0.72 with 2048, 0.61 with 4096, 3.2 with 8192."""
ELEMENTS_WITH_STATE = 2048
"""The same where each number of a row has state."""
LONG_RUN = 16
"""Runs of more blocks than this have a list of their own, for programs that add many partial sums at a time. A batch of
DLRM-small has 11,000 runs that cross blocks of 32 lookups, 8,600 of them once; the longest has 1,012 blocks."""
SHORT_RUNS = {"programs": 2048, "blocks": 8, "num_warps": 1}
LONG_RUNS = {"programs": 264, "blocks": 128, "num_warps": 8}
"""Number of programs that share a list, and of partial sums that each adds at a time."""


@triton.jit
def segmented_add(flag_a, value_a, flag_b, value_b):  # type: ignore[no-untyped-def]
    """Combination of an associative scan that sums by segment; a flag marks the first of a segment."""
    return flag_a | flag_b, tl.where(flag_b != 0, value_b, value_a + value_b)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """`stochastic._mixed` of uint32 numbers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(value, cell, key, FRACTION: tl.constexpr, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 `value` rounded to FRACTION bits up or down at random, as `stochastic.round_stochastically` does it."""
    low = tl.load(key).to(tl.uint32)
    high = tl.load(key + 1).to(tl.uint32)
    noise = _mix(_mix(cell.to(tl.uint32) ^ low) + (cell >> 32).to(tl.uint32) * 0x9E3779B9 + high)
    exponent = tl.maximum((value.to(tl.int32, bitcast=True) >> 23) & 0xFF, LEAST) - FRACTION
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    per_unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    DROPPED: tl.constexpr = 23 - FRACTION
    draw = (noise & ((1 << DROPPED) - 1)).to(tl.int32).to(tl.float32) * (1.0 / (1 << DROPPED))
    return tl.floor(value * per_unit + draw) * unit


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    weight, state, second_state, row, mask_row, grad, dim, lr, eps, beta1, beta2, correction1, correction2, decay,
    rates, scale, key, RULE: tl.constexpr, FRACTION: tl.constexpr, LEAST: tl.constexpr, DEVICE_RATES: tl.constexpr,
    SCALED: tl.constexpr, DECAYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Apply summed gradients `grad` [K, BLOCK_D] to the rows `row` [K] where `mask_row`."""
    column = tl.arange(0, BLOCK_D)
    mask = mask_row[:, None] & (column < dim)[None, :]
    cell = row[:, None] * dim + column[None, :]
    old = tl.load(weight + cell, mask=mask, other=0.0).to(tl.float32)
    if DEVICE_RATES:
        lr = tl.load(rates)
        correction1 = tl.load(rates + 1)
        correction2 = tl.load(rates + 2)
    if SCALED:
        grad *= tl.load(scale)
    if DECAYS:
        if RULE == ADAMW:
            old *= 1.0 - lr * decay
        else:
            grad += decay * old
    if RULE == SGD:
        new = old - lr * grad
    if RULE == MOMENTUM_SGD:
        buffer = tl.load(state + cell, mask=mask, other=0.0) * beta1 + grad
        tl.store(state + cell, buffer, mask=mask)
        new = old - lr * buffer
    if RULE == ADAGRAD:
        total = tl.load(state + cell, mask=mask, other=0.0) + grad * grad
        tl.store(state + cell, total, mask=mask)
        new = old - lr * grad / (tl.sqrt(total) + eps)
    if RULE == ROWWISE_ADAGRAD:
        total = tl.load(state + row, mask=mask_row, other=0.0) + tl.sum(grad * grad, axis=1) / dim
        tl.store(state + row, total, mask=mask_row)
        new = old - grad * (lr / (tl.sqrt(total) + eps))[:, None]
    if RULE == ADAM or RULE == ADAMW:  # noqa: SIM109  # Triton has no `in`
        first = tl.load(state + cell, mask=mask, other=0.0)
        first += (grad - first) * (1.0 - beta1)
        second = tl.load(second_state + cell, mask=mask, other=0.0) * beta2 + grad * grad * (1.0 - beta2)
        tl.store(state + cell, first, mask=mask)
        tl.store(second_state + cell, second, mask=mask)
        new = old - lr * (first / correction1) / (tl.sqrt(second / correction2) + eps)
    if FRACTION > 0:
        new = _rounded(new, cell, key, FRACTION, LEAST)
    tl.store(weight + cell, new.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def _sum_runs_kernel(  # type: ignore[no-untyped-def]
    ids, order, bag_of, lookup_weights, grads, partial, crossing, num_crossing, weight, state, second_state,
    num_lookups, dim, lr, eps, beta1, beta2, correction1, correction2, decay, rates, scale, key,
    HAS_BAGS: tl.constexpr, WEIGHTED: tl.constexpr, RULE: tl.constexpr, FRACTION: tl.constexpr,
    LEAST: tl.constexpr, DEVICE_RATES: tl.constexpr, SCALED: tl.constexpr, DECAYS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, LONG_RUN: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of a block of sorted lookups by run; update the rows of complete runs, list the others."""
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
    # Four numbers a thread, so that with dim 128 a thread holds whole columns and the scan stays within it: bf16 would
    # be loaded eight at a time, two rows a warp.
    cell = tl.max_contiguous(source[:, None] * dim + column[None, :], (1, 4))
    grad = tl.load(grads + cell, mask=mask, other=0.0).to(tl.float32)
    if WEIGHTED:
        grad *= tl.load(lookup_weights + lookup, mask=inside, other=0.0).to(tl.float32)[:, None]
    starts = tl.broadcast_to((row != before).to(tl.int32)[:, None], [BLOCK_K, BLOCK_D])
    starts, sums = tl.associative_scan((starts, grad), 0, segmented_add)
    ends = inside & (row != after)
    last = inside & (position == block * BLOCK_K + BLOCK_K - 1)
    entered = row == entering
    carried = partial + (2 * block) * dim + column[None, :] + tl.zeros([BLOCK_K, 1], dtype=tl.int64)
    carries_in = (ends | last) & entered
    tl.store(carried, sums, mask=carries_in[:, None] & (column < dim)[None, :])
    carries_out = last & (row == after) & (row != entering)
    tl.store(carried + dim, sums, mask=carries_out[:, None] & (column < dim)[None, :])
    end = (block + 1) * BLOCK_K
    final = tl.load(ids + end - 1, mask=end < num_lookups, other=-1).to(tl.int64)
    beyond = tl.load(ids + end, mask=end < num_lookups, other=-2).to(tl.int64)
    if (final == beyond) & (final != entering):
        # Short runs are listed from the front, long ones from the back.
        later = (block + LONG_RUN) * BLOCK_K
        is_long = tl.load(ids + later, mask=later < num_lookups, other=-1).to(tl.int64) == final
        slot = tl.atomic_add(num_crossing + is_long.to(tl.int32), 1)
        slot = tl.where(is_long, tl.num_programs(0) - 1 - slot, slot)
        tl.store(crossing + slot, block.to(tl.int32))
    complete = ends & (row != entering)
    if RULE == NORM:
        tl.store(state + block, tl.sum(tl.where(complete[:, None], sums * sums, 0.0)))
    else:
        _update(
            weight, state, second_state, row, complete, sums, dim, lr, eps, beta1, beta2, correction1, correction2,
            decay, rates, scale, key, RULE, FRACTION, LEAST, DEVICE_RATES, SCALED, DECAYS, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _finish_runs_kernel(  # type: ignore[no-untyped-def]
    ids, partial, crossing, num_crossing, weight, state, second_state, num_lookups, dim,
    lr, eps, beta1, beta2, correction1, correction2, decay, rates, scale, key,
    RULE: tl.constexpr, FRACTION: tl.constexpr, LEAST: tl.constexpr, DEVICE_RATES: tl.constexpr,
    SCALED: tl.constexpr, DECAYS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr, FROM_BACK: tl.constexpr,
):  # fmt: skip
    """Add up the runs that cross blocks, and update their rows."""
    item = tl.program_id(0)
    count = tl.load(num_crossing + (1 if FROM_BACK else 0))
    column = tl.arange(0, BLOCK_D)
    while item < count:
        slot = tl.cdiv(num_lookups, BLOCK_K) - 1 - item if FROM_BACK else item
        block = tl.load(crossing + slot).to(tl.int64)
        row = tl.load(ids + (block + 1) * BLOCK_K).to(tl.int64)
        total = tl.load(partial + (2 * block + 1) * dim + column, mask=column < dim, other=0.0)
        sums = tl.zeros([BLOCK_C, BLOCK_D], dtype=tl.float32)  # added up once, behind the loop
        base = block + 1
        first_of_last = row
        while first_of_last == row:
            other = base + tl.arange(0, BLOCK_C)
            first = tl.load(ids + other * BLOCK_K, mask=other * BLOCK_K < num_lookups, other=-1).to(tl.int64)
            base += BLOCK_C
            position = (base - 1) * BLOCK_K
            first_of_last = tl.load(ids + position, mask=position < num_lookups, other=-1).to(tl.int64)
            mask = (first == row)[:, None] & (column < dim)[None, :]
            sums += tl.load(partial + (2 * other)[:, None] * dim + column[None, :], mask=mask, other=0.0)
        total += tl.sum(sums, axis=0)
        if RULE == NORM:
            tl.store(state + tl.cdiv(num_lookups, BLOCK_K) + block, tl.sum(total * total))
        else:
            one = tl.zeros([1], dtype=tl.int64)
            _update(
                weight, state, second_state, row + one, one == 0, total[None, :], dim, lr, eps, beta1, beta2,
                correction1, correction2, decay, rates, scale, key, RULE, FRACTION, LEAST, DEVICE_RATES, SCALED,
                DECAYS, BLOCK_D,
            )  # fmt: skip
        item += tl.num_programs(0)


class _Launch(NamedTuple):
    """Arguments that the kernels of one update share."""

    ids: Tensor
    partial: Tensor
    """[blocks, 2, D]: sums of runs that enter and leave a block."""
    crossing: Tensor
    """[blocks]: first blocks of the runs that cross blocks, short runs from the front, long ones from the back."""
    num_crossing: Tensor
    """[2]: short and long ones."""
    arguments: tuple[Any, ...]
    """Positional arguments behind those: storages, sizes and numbers of the step."""
    constants: dict[str, Any]

    @property
    def num_blocks(self) -> int:
        return self.crossing.numel()


def update_rows(
    rule: UpdateRule,
    weight: Tensor,
    states: Sequence[Tensor],
    gradient: RowGradient,
    scalars: UpdateScalars,
    on_device: DeviceScalars = NO_DEVICE_SCALARS,
) -> None:
    """Sum `gradient` by row and apply the update (see `row_update`) to the rows of `weight` [R, D] it touches.

    `states` are those of the plain update, in its order and in float32.
    """
    if gradient.ids.numel():
        update_sorted_rows(rule, weight, states, gradient, sorted_ids(gradient, weight.shape[0]), scalars, on_device)


def sorted_ids(gradient: RowGradient, num_rows: int) -> tuple[Tensor, Tensor]:
    """The row numbers in ascending order, and the lookup that each came from, or its bag as in `gradient.sorted`."""
    return sort_rows(gradient.ids, num_rows) if gradient.sorted is None else gradient.sorted


def sort_rows(numbers: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Row numbers [L] in ascending order, and the position that each had."""
    ids, order = torch.sort(numbers.int() if num_rows < 2**31 else numbers, stable=True)
    return ids, order


def update_sorted_rows(
    rule: UpdateRule,
    weight: Tensor,
    states: Sequence[Tensor],
    gradient: RowGradient,
    sorted_rows: tuple[Tensor, Tensor],
    scalars: UpdateScalars,
    on_device: DeviceScalars = NO_DEVICE_SCALARS,
) -> None:
    """`update_rows` with the result of `sorted_ids`; `gradient.ids` itself is not read."""
    ids, order = sorted_rows
    if order.numel() == 0:
        return
    assert gradient.sorted is None or gradient.weights is None
    bag_of = gradient.bag_of if gradient.sorted is None else None
    launch = _launch(rule, weight, states, ids, scalars, on_device)
    _sum_runs_kernel[(launch.num_blocks,)](
        ids,
        order,
        order if bag_of is None else bag_of,
        order if gradient.weights is None else gradient.weights,
        gradient.grad.contiguous(),
        launch.partial,
        launch.crossing,
        launch.num_crossing,
        *launch.arguments,
        HAS_BAGS=bag_of is not None,
        WEIGHTED=gradient.weights is not None,
        LONG_RUN=LONG_RUN,
        num_warps=1,
        **launch.constants,
    )
    if launch.num_blocks > LONG_RUN:
        with beside(weight.device) as other:  # both lists are short of work: 4 us less for DLRM-small
            _finish_runs(launch, LONG_RUNS)
        _finish_runs(launch, SHORT_RUNS)
        other.join()
    elif launch.num_blocks > 1:
        _finish_runs(launch, SHORT_RUNS)


def _launch(
    rule: UpdateRule,
    weight: Tensor,
    states: Sequence[Tensor],
    ids: Tensor,
    scalars: UpdateScalars,
    on_device: DeviceScalars,
) -> _Launch:
    num_lookups, dim, device = ids.numel(), weight.shape[1], weight.device
    block_k = _lookups_per_block(dim, with_state=any(state.ndim > 1 for state in states))
    num_blocks = ceil_div(num_lookups, block_k)
    partial = torch.empty(num_blocks, 2, dim, dtype=torch.float32, device=device)
    state = states[0] if states else weight
    keys = on_device.keys
    if keys is None and scalars.rounding is not None:
        keys = torch.tensor(scalars.rounding, device=device)
    fraction, least = (0, 0) if keys is None else FORMATS.get(weight.dtype, (0, 0))
    betas = (scalars.momentum, 0.0) if rule is UpdateRule.MOMENTUM_SGD else scalars.betas
    arguments = (
        weight, state, states[1] if len(states) > 1 else state, num_lookups, dim,
        scalars.lr, scalars.eps, *betas, *(1.0 - beta**scalars.step for beta in betas), scalars.weight_decay,
        partial if on_device.rates is None else on_device.rates,
        partial if on_device.scale is None else on_device.scale,
        ids if keys is None else keys,
    )  # fmt: skip
    constants = {
        "RULE": rule.value,
        "FRACTION": fraction,
        "LEAST": least,
        "DEVICE_RATES": on_device.rates is not None,
        "SCALED": on_device.scale is not None,
        "DECAYS": scalars.weight_decay != 0.0,
        "BLOCK_K": block_k,
        "BLOCK_D": next_power_of_2(dim),
    }
    crossing = torch.empty(num_blocks, dtype=torch.int32, device=device)
    return _Launch(ids, partial, crossing, torch.zeros(2, dtype=torch.int32, device=device), arguments, constants)


def _finish_runs(launch: _Launch, runs: dict[str, int]) -> None:
    """Add up the runs of one list."""
    _finish_runs_kernel[(min(launch.num_blocks, runs["programs"]),)](
        launch.ids,
        launch.partial,
        launch.crossing,
        launch.num_crossing,
        *launch.arguments,
        BLOCK_C=max(2, min(runs["blocks"], runs["blocks"] * 128 // launch.constants["BLOCK_D"])),
        FROM_BACK=runs is LONG_RUNS,
        num_warps=runs["num_warps"],
        **launch.constants,
    )


def _lookups_per_block(dim: int, *, with_state: bool) -> int:
    elements = ELEMENTS_WITH_STATE if with_state else ELEMENTS
    return max(1, min(128, elements // next_power_of_2(dim)))


def squared_norm(gradient: RowGradient, sorted_rows: tuple[Tensor, Tensor]) -> Tensor:
    """Sum of the squares of the summed gradients of all rows, a 0-dim tensor, without writing those sums anywhere."""
    ids, dim = sorted_rows[0], gradient.grad.shape[1]
    num_blocks = ceil_div(ids.numel(), _lookups_per_block(dim, with_state=False))
    squares = torch.zeros(2 * num_blocks, dtype=torch.float32, device=ids.device)  # of runs in a block, of others
    placeholder = squares.new_empty(0, dim)
    update_sorted_rows(UpdateRule.NORM, placeholder, [squares], gradient, sorted_rows, UpdateScalars())
    return squares.sum()


def sum_by_row(gradient: RowGradient) -> tuple[Tensor, Tensor]:
    """`row_gradient.sum_by_row` in float32, whatever the type of the gradient; waits for the number of rows."""
    ids, order = sorted_ids(gradient, 2**63)
    distinct, runs = torch.unique_consecutive(ids, return_inverse=True)
    sums = torch.zeros(len(distinct), gradient.grad.shape[1], dtype=torch.float32, device=ids.device)
    update_sorted_rows(UpdateRule.SGD, sums, [], gradient, (runs, order), UpdateScalars(lr=-1.0))
    return distinct.long(), sums
