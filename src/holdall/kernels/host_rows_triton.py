"""Rows of a step between the host's memory and a room on the device, by kernels that read and write that memory.

A GPU can address host memory that is page-locked, so the rows need no copy on the host and the host need not know which
they are: what is far among the ids of a batch is found, made distinct, fetched and sent back on the device, and nothing
waits. Shapes are those of the room; how many rows there really are is a number on the device.

Shapes: L lookups, D places for far lookups, C places of a room, R rows of the host, rows of W numbers.

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
from holdall.kernels.host_rows import NOBODY, ROOM_SHIFT, Initial


class Shape(NamedTuple):
    """How a kernel that moves rows is laid out."""

    programs: int
    elements: int
    """Numbers that a program has in flight."""
    num_warps: int


WHOLE_DEVICE = Shape(16, 4096, 4)
"""The fastest where nothing else runs. 41,000 rows of 256 bytes out of 60 GB take an H200 0.78 ms there and 0.73 back;
a host's memory answers no faster, whatever is asked: 1.1 ms with 1,024 programs."""
BESIDE_STEPS = Shape(3, 16384, 16)
"""For rows that move while a step computes: few programs that fill their multiprocessors. What shares one with a
program that waits for the host's memory waits too, and with it all that waits for that: a step of 2.3 ms took 2.9
beside two programs of this size, but 3.8 beside two of half of it, and 3.7 beside 16 small ones."""
TAKEN = 4096
"""Numbers that a program has in flight where rows move on the device alone."""
GAMMA = 0x9E3779B97F4A7C15
"""The step of splitmix64's generator, as `_hash` has it too."""
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""Rows are moved as integers of their size."""

_turns: AbstractContextManager[Any] = threading.Lock() if INTERPRETED else nullcontext()
"""Triton's interpreter runs one kernel at a time; a GPU's driver has no such need."""


@triton.jit
def _hash(value, START: tl.constexpr):  # type: ignore[no-untyped-def]
    """`hash_ids` of int64 numbers; START is where its generator starts, plus the first step."""
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
    ids, info, located, far_rows, far_lookups, counts, num_lookups, num_tables, capacity, table_stride, sample_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Number the hot lookups and list the far ones, in any order."""
    lookup = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lookup < num_lookups
    sample = lookup // num_tables
    table = lookup - sample * num_tables
    number = tl.load(ids + table * table_stride + sample * sample_stride, mask=inside, other=0).to(tl.int64)
    is_far = inside & (number >= tl.load(info + table * 3, mask=inside, other=0))
    near = number + tl.load(info + table * 3 + 1, mask=inside, other=0)
    tl.store(located + lookup, near.to(located.dtype.element_ty), mask=inside & (is_far == 0))
    ones = is_far.to(tl.int32)
    first = tl.atomic_add(counts, tl.sum(ones, axis=0))
    place = first + tl.cumsum(ones, axis=0) - 1
    row = number + tl.load(info + table * 3 + 2, mask=inside, other=0)
    listed = is_far & (place < capacity)
    tl.store(far_rows + place, row, mask=listed)
    tl.store(far_lookups + place, lookup, mask=listed)


@triton.jit
def _number_kernel(  # type: ignore[no-untyped-def]
    far_rows, order, places, far_lookups, rows, located, counts, num_listed, capacity, num_hot, NOBODY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Give every distinct far row, sorted now, its place in a room, and say so to its lookups."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(far_rows + item, mask=item < num_listed, other=NOBODY)
    before = tl.load(far_rows + item - 1, mask=(item > 0) & (item < num_listed), other=-1)
    after = tl.load(far_rows + item + 1, mask=item + 1 < num_listed, other=NOBODY)
    is_row = row != NOBODY
    place = tl.load(places + item, mask=is_row, other=1) - 1
    tl.store(rows + place, row, mask=is_row & (row != before) & (place < capacity))
    lookup = tl.load(far_lookups + tl.load(order + item, mask=is_row, other=0), mask=is_row, other=0)
    tl.store(located + lookup, (num_hot + place).to(located.dtype.element_ty), mask=is_row)
    tl.store(counts + 1 + item * 0, (place + 1).to(tl.int32), mask=is_row & (after == NOBODY))


@triton.jit
def _held_kernel(  # type: ignore[no-untyped-def]
    rows, held, source, counts, capacity, num_held, first, NOBODY: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Note which rows one other room holds, whose places start at `first`; after the LAST, count those any holds."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < capacity
    row = tl.load(rows + place, mask=inside, other=NOBODY)
    is_row = row != NOBODY
    low = tl.zeros_like(row)
    high = low + num_held
    for _ in tl.static_range(STEPS):  # the last that is not above the row
        middle = (low + high) // 2
        reached = tl.load(held + middle, mask=is_row & (middle < num_held), other=NOBODY) <= row
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    same = is_row & (tl.load(held + low, mask=is_row & (low < num_held), other=NOBODY) == row)
    before = tl.full([BLOCK], -1, tl.int64)
    if not FIRST:
        before = tl.load(source + place, mask=inside, other=-1)
    found = tl.where(same, low + first, before)
    tl.store(source + place, found, mask=inside)
    if LAST:
        tl.atomic_add(counts + 2, tl.sum((inside & (found >= 0)).to(tl.int32), axis=0))


@triton.jit
def _move_kernel(  # type: ignore[no-untyped-def]
    far, rows, source, room, touched, counts, starts, seeds, stds, quantiles, capacity, width, num_tables,
    HOME: tl.constexpr, FORWARDED: tl.constexpr, LAZY: tl.constexpr, MARKED: tl.constexpr, STEPS: tl.constexpr,
    START_0: tl.constexpr, START_1: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Rows from the host to their places in a room, but for those that another room holds; or HOME again."""
    count = tl.minimum(tl.load(counts + 1), capacity)
    column = tl.arange(0, BLOCK_W)
    block = tl.program_id(0)
    while block * BLOCK_N < count:
        place = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        moves = place < count
        row = tl.load(rows + place, mask=moves, other=0)
        if FORWARDED:
            moves &= tl.load(source + place, mask=moves, other=0) < 0
        mask = moves[:, None] & (column < width)[None, :]
        there = far + row[:, None] * width + column[None, :]
        here = room + place[:, None] * width + column[None, :]
        bits = tl.load(here if HOME else there, mask=mask, other=0)
        if LAZY:
            bits ^= _initial_bits(
                row, column, starts, seeds, stds, quantiles, num_tables, STEPS, START_0, START_1, DTYPE, bits.dtype
            )
        tl.store(there if HOME else here, bits, mask=mask)
        if MARKED:
            tl.store(touched + row, (row * 0 + 1).to(touched.dtype.element_ty), mask=moves)
        block += tl.num_programs(0)


@triton.jit
def _take_kernel(  # type: ignore[no-untyped-def]
    storage, source, counts, capacity, width, num_hot, room_rows, own_room, ROOM_SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Rows that other rooms hold, to their places in this one."""
    count = tl.minimum(tl.load(counts + 1), capacity)
    column = tl.arange(0, BLOCK_W)
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    held = tl.load(source + place, mask=place < count, other=-1)
    mask = (held >= 0)[:, None] & (column < width)[None, :]
    there = num_hot + (held >> ROOM_SHIFT) * room_rows + (held & ((1 << ROOM_SHIFT) - 1))
    here = num_hot + own_room * room_rows + place
    bits = tl.load(storage + there[:, None] * width + column[None, :], mask=mask, other=0)
    tl.store(storage + here[:, None] * width + column[None, :], bits, mask=mask)


def find(
    ids: Tensor, info: Tensor, located: Tensor, rows: Tensor, counts: Tensor, num_listed: int, num_hot: int
) -> None:
    """Find the distinct far rows of a batch, and where every lookup finds its row.

    As `far_rows.find`, for places `ids` [T, B], without waiting: `located` [B, T] is filled, with the room starting at
    row `num_hot` of the storage; `rows` [C] int64 gets the distinct far rows, ascending, then NOBODY. `counts` [3]
    int32 on the device gets far lookups, of which `num_listed` can be dealt with; distinct far rows among those, of
    which C can; and 0.
    """
    num_tables, num_lookups = ids.shape[0], ids.numel()
    counts.zero_()
    far_rows = torch.full((num_listed,), NOBODY, dtype=torch.int64, device=ids.device)
    far_lookups = torch.empty_like(far_rows)
    rows.fill_(NOBODY)
    with _turns:
        _find_kernel[(triton.cdiv(num_lookups, 1024),)](
            ids, info, located, far_rows, far_lookups, counts, num_lookups, num_tables, num_listed, *ids.stride(),
            BLOCK=1024,
        )  # fmt: skip
    if num_listed == 0:
        return
    ordered, order = torch.sort(far_rows)
    is_first = torch.ones_like(ordered)
    torch.ne(ordered[1:], ordered[:-1], out=is_first[1:])
    places = is_first.cumsum(0)
    with _turns:
        _number_kernel[(triton.cdiv(num_listed, 256),)](
            ordered, order, places, far_lookups, rows, located, counts, num_listed, rows.numel(), num_hot,
            NOBODY=NOBODY, BLOCK=256,
        )  # fmt: skip


def held_by(rows: Tensor, counts: Tensor, others: Sequence[tuple[int, Tensor]], source: Tensor) -> None:
    """As `far_rows.held_by`, for sets as `find` leaves them, into `source` [C]; also counts the rows that others hold,
    as the third of `counts`. There must be others."""
    if rows.numel() == 0:
        return
    for number, (room, held) in enumerate(others):
        with _turns:
            _held_kernel[(triton.cdiv(rows.numel(), 256),)](
                rows,
                held,
                source,
                counts,
                rows.numel(),
                held.numel(),
                room << ROOM_SHIFT,
                NOBODY=NOBODY,
                FIRST=number == 0,
                LAST=number == len(others) - 1,
                STEPS=held.numel().bit_length(),
                BLOCK=256,
            )


def move(
    far: Tensor,
    rows: Tensor,
    counts: Tensor,
    room: Tensor,
    *,
    home: bool,
    source: Tensor | None = None,
    initial: Initial | None = None,
    touched: Tensor | None = None,
    shape: Shape = WHOLE_DEVICE,
) -> None:
    """Copy rows of `far` [R, W], which a kernel can reach, to `room` [C, W], or `home` again.

    `rows` and `counts` are as `find` left them. Rows that `source` says another room holds stay behind. With `initial`,
    what is stored of a row is the exclusive-or with its initial values. `touched` [R] bool is set for the rows moved.
    """
    width, capacity = far.shape[1], rows.numel()
    if capacity == 0:
        return
    block_w = triton.next_power_of_2(width)
    block_n = max(1, shape.elements // block_w)
    first = counts if initial is None else initial.starts
    with _turns:
        _move_kernel[(min(shape.programs, triton.cdiv(capacity, block_n)),)](
            far.view(BITS[far.dtype]),
            rows,
            rows if source is None else source,
            room.view(BITS[room.dtype]),
            counts if touched is None else touched.view(torch.uint8),
            counts,
            first,
            first if initial is None else initial.seeds,
            first if initial is None else initial.stds,
            first if initial is None else initial.quantiles,
            capacity,
            width,
            0 if initial is None else initial.starts.numel(),
            HOME=home,
            FORWARDED=source is not None,
            LAZY=initial is not None,
            MARKED=touched is not None,
            STEPS=0 if initial is None else initial.starts.numel().bit_length(),
            START_0=0 if initial is None else _signed(initial.streams[0] + GAMMA),
            START_1=0 if initial is None else _signed(initial.streams[1] + GAMMA),
            DTYPE=_TYPES[far.dtype],
            BLOCK_N=block_n,
            BLOCK_W=block_w,
            num_warps=shape.num_warps,
        )


def take(
    storage: Tensor, source: Tensor, counts: Tensor, *, num_hot: int, room_rows: int, own_room: int, num_rows: int
) -> None:
    """Copy the rows of a step that `source` says other rooms hold into room `own_room` of `storage` [S, W]."""
    if num_rows == 0:
        return
    width = storage.shape[1]
    block_w = triton.next_power_of_2(width)
    block_n = max(1, TAKEN // block_w)
    with _turns:
        _take_kernel[(triton.cdiv(num_rows, block_n),)](
            storage.view(BITS[storage.dtype]), source, counts, num_rows, width, num_hot, room_rows, own_room,
            ROOM_SHIFT=ROOM_SHIFT, BLOCK_N=block_n, BLOCK_W=block_w,
        )  # fmt: skip


def _signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
