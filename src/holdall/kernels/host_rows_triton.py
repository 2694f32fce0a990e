"""Copies of a batch's rows between pinned host memory and a staging buffer, by kernels that address host memory.

A GPU can address page-locked host memory. So the host makes no copy of the rows and need not know which they are: the
device finds the host rows among the ids of a batch, makes them distinct, fetches them and writes them back, and nothing
synchronizes. Tensors have the capacity of the staging buffer; the number of rows in use is a number on the device.

Shapes: L lookups, D the most host lookups of a batch, C slots of a staging buffer, R host rows, rows of W numbers.

Bytes: a row each way over the bus. An H200 reads and writes some 50 million rows of 256 bytes a second so.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels.dispatch import INTERPRETED
from holdall.kernels.host_rows import BUFFER_SHIFT, NO_ROW, InitialRowParams
from holdall.kernels.launch_sizes import ceil_div, next_power_of_2


class LaunchShape(NamedTuple):
    """Grid and block of a kernel that copies rows to or from the host."""

    programs: int
    elements: int
    """Numbers that a program has in flight."""
    num_warps: int


WHOLE_DEVICE = LaunchShape(16, 4096, 4)
"""The fastest shape on an idle device. 41,000 rows of 256 bytes out of 60 GB take an H200 0.78 ms in and 0.73 back;
more programs do not make host memory faster: 1.1 ms with 1,024 programs."""
BESIDE_STEPS = LaunchShape(3, 16384, 16)
"""For copies that overlap a step: few programs that fill their multiprocessors. A kernel that shares a multiprocessor
with a program stalled on host memory stalls too, and so does everything that depends on it: a step of 2.3 ms took 2.9
beside two programs of this size, but 3.8 beside two of half of it, and 3.7 beside 16 small ones."""
DEVICE_COPY_ELEMENTS = 4096
"""Numbers that a program has in flight in copies within the device."""
GAMMA = 0x9E3779B97F4A7C15
"""Increment of splitmix64's generator; `_hash` contains it too."""
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""Rows are copied as integers of their size."""

_launch_lock: AbstractContextManager[Any] = threading.Lock() if INTERPRETED else nullcontext()
"""Triton's interpreter runs one kernel at a time; a GPU's driver needs no lock."""


@triton.jit
def _hash(value, START: tl.constexpr):  # type: ignore[no-untyped-def]
    """`hash_ids` of int64 numbers; START is the initial state of its generator, plus the first increment."""
    z = value * -7046029254386353131 + START
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _initial_bits(  # type: ignore[no-untyped-def]
    row, column, starts, seeds, stds, quantiles, num_tables, STEPS: tl.constexpr, START_0: tl.constexpr,
    START_1: tl.constexpr, DTYPE: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """Bits of the initial values of rows `row` [N] at `column` [W]."""
    low = tl.zeros_like(row)
    high = low + num_tables
    for _ in tl.static_range(STEPS):  # the last table that starts at or before the row
        middle = (low + high) // 2
        reached = tl.load(starts + middle) <= row
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    key = _hash(row - tl.load(starts + low), START_0) ^ tl.load(seeds + low)
    number = _hash(key[:, None] + (column // 4).to(tl.int64)[None, :], START_1)
    part = (number >> (16 * (column % 4)).to(tl.int64)[None, :]) & 0xFFFF
    value = tl.load(quantiles + (part ^ 0x8000)) * tl.load(stds + low)[:, None]
    return value.to(DTYPE).to(INTEGER, bitcast=True)


@triton.jit
def _find_kernel(  # type: ignore[no-untyped-def]
    ids, info, located, host_rows, host_lookups, counts, num_lookups, num_tables, capacity, table_stride, sample_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Storage rows of the hot lookups, and a list of the host lookups, in any order."""
    lookup = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lookup < num_lookups
    sample = lookup // num_tables
    table = lookup - sample * num_tables
    number = tl.load(ids + table * table_stride + sample * sample_stride, mask=inside, other=0).to(tl.int64)
    on_host = inside & (number >= tl.load(info + table * 3, mask=inside, other=0))
    hot_row = number + tl.load(info + table * 3 + 1, mask=inside, other=0)
    tl.store(located + lookup, hot_row.to(located.dtype.element_ty), mask=inside & (on_host == 0))
    ones = on_host.to(tl.int32)
    first = tl.atomic_add(counts, tl.sum(ones, axis=0))
    item = first + tl.cumsum(ones, axis=0) - 1
    row = number + tl.load(info + table * 3 + 2, mask=inside, other=0)
    listed = on_host & (item < capacity)
    tl.store(host_rows + item, row, mask=listed)
    tl.store(host_lookups + item, lookup, mask=listed)


@triton.jit
def _number_kernel(  # type: ignore[no-untyped-def]
    host_rows, order, slots, host_lookups, rows, located, counts, num_listed, capacity, num_hot, NO_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots of the distinct host rows, which are sorted, and the storage rows of their lookups."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(host_rows + item, mask=item < num_listed, other=NO_ROW)
    before = tl.load(host_rows + item - 1, mask=(item > 0) & (item < num_listed), other=-1)
    after = tl.load(host_rows + item + 1, mask=item + 1 < num_listed, other=NO_ROW)
    is_row = row != NO_ROW
    slot = tl.load(slots + item, mask=is_row, other=1) - 1
    tl.store(rows + slot, row, mask=is_row & (row != before) & (slot < capacity))
    lookup = tl.load(host_lookups + tl.load(order + item, mask=is_row, other=0), mask=is_row, other=0)
    tl.store(located + lookup, (num_hot + slot).to(located.dtype.element_ty), mask=is_row)
    tl.store(counts + 1 + item * 0, (slot + 1).to(tl.int32), mask=is_row & (after == NO_ROW))


@triton.jit
def _find_in_buffer_kernel(  # type: ignore[no-untyped-def]
    rows, cached, source, counts, capacity, num_cached, first, NO_ROW: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that one other staging buffer has, its slots from `first`; after the LAST, the count of all buffers'."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < capacity
    row = tl.load(rows + slot, mask=inside, other=NO_ROW)
    is_row = row != NO_ROW
    low = tl.zeros_like(row)
    high = low + num_cached
    for _ in tl.static_range(STEPS):  # the last that is not above the row
        middle = (low + high) // 2
        reached = tl.load(cached + middle, mask=is_row & (middle < num_cached), other=NO_ROW) <= row
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    same = is_row & (tl.load(cached + low, mask=is_row & (low < num_cached), other=NO_ROW) == row)
    before = tl.full([BLOCK], -1, tl.int64)
    if not FIRST:
        before = tl.load(source + slot, mask=inside, other=-1)
    found = tl.where(same, low + first, before)
    tl.store(source + slot, found, mask=inside)
    if LAST:
        tl.atomic_add(counts + 2, tl.sum((inside & (found >= 0)).to(tl.int32), axis=0))


@triton.jit
def _copy_rows_kernel(  # type: ignore[no-untyped-def]
    host, rows, source, buffer, touched, counts, starts, seeds, stds, quantiles, capacity, width, num_tables,
    WRITE_BACK: tl.constexpr, SKIP_CACHED: tl.constexpr, LAZY: tl.constexpr, MARK: tl.constexpr, STEPS: tl.constexpr,
    START_0: tl.constexpr, START_1: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Rows from the host into their slots, except those another staging buffer has; or WRITE_BACK to the host."""
    count = tl.minimum(tl.load(counts + 1), capacity)
    column = tl.arange(0, BLOCK_W)
    block = tl.program_id(0)
    while block * BLOCK_N < count:
        slot = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        copied = slot < count
        row = tl.load(rows + slot, mask=copied, other=0)
        if SKIP_CACHED:
            copied &= tl.load(source + slot, mask=copied, other=0) < 0
        mask = copied[:, None] & (column < width)[None, :]
        host_at = host + row[:, None] * width + column[None, :]
        slot_at = buffer + slot[:, None] * width + column[None, :]
        bits = tl.load(slot_at if WRITE_BACK else host_at, mask=mask, other=0)
        if LAZY:
            bits ^= _initial_bits(
                row, column, starts, seeds, stds, quantiles, num_tables, STEPS, START_0, START_1, DTYPE, bits.dtype
            )
        tl.store(host_at if WRITE_BACK else slot_at, bits, mask=mask)
        if MARK:
            tl.store(touched + row, (row * 0 + 1).to(touched.dtype.element_ty), mask=copied)
        block += tl.num_programs(0)


@triton.jit
def _copy_between_buffers_kernel(  # type: ignore[no-untyped-def]
    storage, source, counts, capacity, width, num_hot, buffer_rows, own_buffer, BUFFER_SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Rows that other staging buffers have, into their slots of this one."""
    count = tl.minimum(tl.load(counts + 1), capacity)
    column = tl.arange(0, BLOCK_W)
    slot = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    cached = tl.load(source + slot, mask=slot < count, other=-1)
    mask = (cached >= 0)[:, None] & (column < width)[None, :]
    source_row = num_hot + (cached >> BUFFER_SHIFT) * buffer_rows + (cached & ((1 << BUFFER_SHIFT) - 1))
    target_row = num_hot + own_buffer * buffer_rows + slot
    bits = tl.load(storage + source_row[:, None] * width + column[None, :], mask=mask, other=0)
    tl.store(storage + target_row[:, None] * width + column[None, :], bits, mask=mask)


def find_host_rows(
    ids: Tensor, info: Tensor, located: Tensor, rows: Tensor, counts: Tensor, max_lookups: int, num_hot: int
) -> None:
    """Distinct host rows of a batch and the storage row of every lookup, without synchronizing.

    As `host_rows.find_host_rows`, for row numbers `ids` [T, B]: fills `located` [B, T], with the staging buffer at row
    `num_hot` of the storage. `rows` [C] int64 gets the distinct host rows, ascending, then NO_ROW. `counts` [3] int32
    on the device gets the number of host lookups, of which the first `max_lookups` are processed; the number of
    distinct host rows among those, of which the first C are stored; and 0.
    """
    num_tables, num_lookups = ids.shape[0], ids.numel()
    counts.zero_()
    host_rows = torch.full((max_lookups,), NO_ROW, dtype=torch.int64, device=ids.device)
    host_lookups = torch.empty_like(host_rows)
    rows.fill_(NO_ROW)
    with _launch_lock:
        _find_kernel[(ceil_div(num_lookups, 1024),)](
            ids, info, located, host_rows, host_lookups, counts, num_lookups, num_tables, max_lookups, *ids.stride(),
            BLOCK=1024,
        )  # fmt: skip
    if max_lookups == 0:
        return
    ordered, order = torch.sort(host_rows)
    is_first = torch.ones_like(ordered)
    torch.ne(ordered[1:], ordered[:-1], out=is_first[1:])
    slots = is_first.cumsum(0)
    with _launch_lock:
        _number_kernel[(ceil_div(max_lookups, 256),)](
            ordered, order, slots, host_lookups, rows, located, counts, max_lookups, rows.numel(), num_hot,
            NO_ROW=NO_ROW, BLOCK=256,
        )  # fmt: skip


def find_in_buffers(rows: Tensor, counts: Tensor, buffers: Sequence[tuple[int, Tensor]], source: Tensor) -> None:
    """As `host_rows.find_in_buffers`, for `rows` as `find_host_rows` leaves them, into `source` [C].

    Also counts the rows that `buffers`, at least one, have: the third of `counts`.
    """
    if rows.numel() == 0:
        return
    for number, (buffer, cached) in enumerate(buffers):
        with _launch_lock:
            _find_in_buffer_kernel[(ceil_div(rows.numel(), 256),)](
                rows,
                cached,
                source,
                counts,
                rows.numel(),
                cached.numel(),
                buffer << BUFFER_SHIFT,
                NO_ROW=NO_ROW,
                FIRST=number == 0,
                LAST=number == len(buffers) - 1,
                STEPS=cached.numel().bit_length(),
                BLOCK=256,
            )


def copy_rows(
    host: Tensor,
    rows: Tensor,
    counts: Tensor,
    buffer: Tensor,
    *,
    write_back: bool,
    source: Tensor | None = None,
    initial: InitialRowParams | None = None,
    touched: Tensor | None = None,
    shape: LaunchShape = WHOLE_DEVICE,
) -> None:
    """Copy rows of `host` [R, W], pinned memory, into `buffer` [C, W], or `write_back` to the host.

    `rows` and `counts` are as `find_host_rows` leaves them. Rows that another staging buffer has, by `source`, are not
    copied. With `initial`, the host stores the exclusive-or of a row with its initial values. `touched` [R] bool is set
    for the rows copied.
    """
    width, capacity = host.shape[1], rows.numel()
    if capacity == 0:
        return
    block_w = next_power_of_2(width)
    block_n = max(1, shape.elements // block_w)
    first = counts if initial is None else initial.starts
    with _launch_lock:
        _copy_rows_kernel[(min(shape.programs, ceil_div(capacity, block_n)),)](
            host.view(BITS[host.dtype]),
            rows,
            rows if source is None else source,
            buffer.view(BITS[buffer.dtype]),
            counts if touched is None else touched.view(torch.uint8),
            counts,
            first,
            first if initial is None else initial.seeds,
            first if initial is None else initial.stds,
            first if initial is None else initial.quantiles,
            capacity,
            width,
            0 if initial is None else initial.starts.numel(),
            WRITE_BACK=write_back,
            SKIP_CACHED=source is not None,
            LAZY=initial is not None,
            MARK=touched is not None,
            STEPS=0 if initial is None else initial.starts.numel().bit_length(),
            START_0=0 if initial is None else _signed(initial.streams[0] + GAMMA),
            START_1=0 if initial is None else _signed(initial.streams[1] + GAMMA),
            DTYPE=_TYPES[host.dtype],
            BLOCK_N=block_n,
            BLOCK_W=block_w,
            num_warps=shape.num_warps,
        )


def copy_between_buffers(
    storage: Tensor, source: Tensor, counts: Tensor, *, num_hot: int, buffer_rows: int, own_buffer: int, num_rows: int
) -> None:
    """Copy the rows of a step that other staging buffers have, by `source`, into `own_buffer` of `storage` [S, W]."""
    if num_rows == 0:
        return
    width = storage.shape[1]
    block_w = next_power_of_2(width)
    block_n = max(1, DEVICE_COPY_ELEMENTS // block_w)
    with _launch_lock:
        _copy_between_buffers_kernel[(ceil_div(num_rows, block_n),)](
            storage.view(BITS[storage.dtype]), source, counts, num_rows, width, num_hot, buffer_rows, own_buffer,
            BUFFER_SHIFT=BUFFER_SHIFT, BLOCK_N=block_n, BLOCK_W=block_w,
        )  # fmt: skip


def _signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
