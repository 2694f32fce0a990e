"""Distinct ids and prefixes of tensor trains, found on the device without synchronizing.

L lookups of U distinct ids with P distinct prefixes (i1, i2). Buffers have L entries, of which the first U or P are
in use; the two counts stay on the device, so nothing waits and a CUDA graph can capture it all.

Several trains are one: their cores' slices are numbered consecutively, N1, N2 and N3 of them, and a lookup is the
number `(i2 * N1 + i1) * N3 + i3` of its slices. One sort by it puts lookups of one id side by side, ids of one prefix,
and prefixes of one middle slice. A second sort, of 16 bits mostly, lists prefixes by first slice and ids by last slice,
for the gradients. Both are stable, so the ids fix the order of every sum that follows.

To balance the load of programs, popular ids and prefixes are cut: an id is counted again at every `WINDOW`-th sorted
lookup, and a prefix at every `PIECE`-th id of a block. Ids and prefixes below are such parts; gradients are sums over
them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import gcd, prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels.launch_sizes import ceil_div

BLOCK = 1024
"""Sorted lookups a program numbers."""
PIECE = 32
"""Most ids that a prefix has. A batch of 8,192 Zipf ids has one of 214 and a mean of 2.3."""
WINDOW = 32
"""Most lookups that an id has: those of a window are summed in registers. It divides BLOCK."""


@dataclass(frozen=True)
class Trains:
    """Addresses and shapes of the slices of one or more trains of three cores, for kernels that know slices only.

    The offset of a slice is its distance, in numbers, from the first train's core. Trains may be anywhere in memory.
    """

    num_trains: int
    dims: tuple[int, int, int]
    """(d1, d2, d3), the same for all."""
    ranks: tuple[int, int]
    """The largest (r1, r2)."""
    sizes: tuple[int, int, int]
    """(N1, N2, N3), slices of all trains."""
    num_prefixes: int
    """Number of possible prefixes (i1, i2)."""
    same_ranks: bool
    """Whether all trains have the largest ranks."""
    aligned: int
    """Every rank and every slice's offset is a multiple of this many numbers, 4 at most."""
    core_sizes: tuple[int, ...]
    """Numbers of every core, for cutting a buffer with all gradients."""
    shapes: Tensor
    """[T, 6]: n1, n2, n3 and the number of the first slice of each core."""
    slices: tuple[Tensor, Tensor, Tensor]
    """[N, 4] for each core: offset of the slice, offset of its gradient, r before, r after."""

    @property
    def dim(self) -> int:
        return prod(self.dims)


def trains_of(cores: Sequence[Tensor]) -> Trains:
    """The trains whose cores, three each, are given one train after the other."""
    shapes = tuple(tuple(core.shape) for core in cores)
    return _trains(tuple(core.data_ptr() for core in cores), shapes, cores[0].element_size(), cores[0].device)


@lru_cache(maxsize=1024)  # a graph keeps using the tensors it captured: large enough that none in use is ever dropped
def _trains(
    pointers: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], element_size: int, device: torch.device
) -> Trains:
    assert len(shapes) % 3 == 0
    trains = [shapes[i : i + 3] for i in range(0, len(shapes), 3)]
    assert len({tuple(shape[2] for shape in train) for train in trains}) == 1, "all trains split the dim alike"
    starts = [[0, *accumulate(train[k][0] for train in trains)] for k in range(3)]
    gradients = [0, *accumulate(prod(shape) for shape in shapes)]
    slices = []
    for k in range(3):
        rows: list[Tensor] = []
        for t, train in enumerate(trains):
            n, before, _, after = train[k]
            place = (pointers[3 * t + k] - pointers[k]) // element_size
            index = torch.arange(n) * prod(train[k][1:])
            rank = torch.ones_like(index)
            rows.append(torch.stack([index + place, index + gradients[3 * t + k], rank * before, rank * after], dim=1))
        slices.append(torch.cat(rows))
    sizes = tuple(line[-1] for line in starts)
    numbers = torch.tensor([[s[0] for s in train] + [line[t] for line in starts] for t, train in enumerate(trains)])
    return Trains(
        num_trains=len(trains),
        dims=tuple(shape[2] for shape in trains[0]),  # type: ignore[arg-type]
        ranks=(max(train[0][3] for train in trains), max(train[1][3] for train in trains)),
        sizes=sizes,  # type: ignore[arg-type]
        num_prefixes=sum(train[0][0] * train[1][0] for train in trains),
        same_ranks=len({(train[0][3], train[1][3]) for train in trains}) == 1,
        aligned=gcd(4, *(value for core in slices for value in core[:, :2].flatten().unique().tolist()),
                    *(rank for train in trains for rank in (train[0][3], train[1][3]))),
        core_sizes=tuple(prod(shape) for shape in shapes),
        shapes=numbers.to(device),
        slices=tuple(core.to(device) for core in slices),  # type: ignore[arg-type]
    )  # fmt: skip


@dataclass(frozen=True)
class Distinct:
    """The distinct ids and prefixes of L lookups, each numbered in the order of the sort. int32, and offsets int64."""

    num_lookups: int
    max_prefixes: int
    counts: Tensor
    """[2]: U, P."""
    order: Tensor
    """[L] int64: the lookups, sorted."""
    run_of: Tensor
    """[L]: the distinct id of every sorted lookup, ascending."""
    id_of: Tensor
    """[L]: the distinct id of every lookup."""
    first_id: Tensor
    """[P + 1]: the first distinct id of every prefix."""
    middle: Tensor
    """[P]: middle slice of every prefix, ascending."""
    starts: Tensor
    """[N2 + 1]: the first prefix of every middle slice."""
    first: Tensor
    """[P]: offset of the first slice of every prefix."""
    last: Tensor
    """[U]: offset of the last slice of every distinct id."""
    bins: Tensor | None
    """[2L]: first slice of every prefix, then N1 + last slice of every distinct id; N1 + N3 where there is none."""


@triton.jit
def _keys_kernel(  # type: ignore[no-untyped-def]
    ids, bounds, bounds_stride, shapes, keys, num_lookups, per_train, num_trains, N1, N3,
    RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_lookups
    id = tl.load(ids + position, mask=inside, other=0).to(tl.int64)
    if RAGGED:
        train = tl.zeros([BLOCK], dtype=tl.int64)
        for t in range(1, num_trains):
            train += (position >= tl.load(bounds + t * bounds_stride)).to(tl.int64)
    else:
        train = position // per_train
    place = shapes + 6 * train
    n2 = tl.load(place + 1, mask=inside, other=1)
    n3 = tl.load(place + 2, mask=inside, other=1)
    prefix = id // n3
    first = prefix // n2 + tl.load(place + 3, mask=inside, other=0)
    middle = prefix % n2 + tl.load(place + 4, mask=inside, other=0)
    last = id % n3 + tl.load(place + 5, mask=inside, other=0)
    key = (middle * N1 + first) * N3 + last
    tl.store(keys + position, key.to(keys.dtype.element_ty), mask=inside)


@triton.jit
def _starts(keys, position, num_lookups, N3, PIECE: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys at `position` and before it, running count of ids in the block, first of every id, first of every prefix."""
    inside = position < num_lookups
    key = tl.load(keys + position, mask=inside, other=0)
    before = tl.load(keys + position - 1, mask=inside & (position > 0), other=-1)
    new_id = inside & ((key != before) | (position % WINDOW == 0))
    num_begun = tl.cumsum(new_id.to(tl.int32), axis=0)
    new_prefix = inside & ((key // N3 != before // N3) | (position == 0))
    return key, before, num_begun, new_id, new_prefix | (new_id & (num_begun % PIECE == 1))


@triton.jit
def _count_kernel(  # type: ignore[no-untyped-def]
    keys, block_counts, num_lookups, N3, BLOCK: tl.constexpr, PIECE: tl.constexpr, WINDOW: tl.constexpr
):
    block = tl.program_id(0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, _, _, new_id, new_prefix = _starts(keys, position, num_lookups, N3, PIECE, WINDOW)
    tl.store(block_counts + 2 * block, tl.sum(new_id.to(tl.int32), axis=0))
    tl.store(block_counts + 2 * block + 1, tl.sum(new_prefix.to(tl.int32), axis=0))


@triton.jit
def _number_kernel(  # type: ignore[no-untyped-def]
    keys, order, slices1, slices3, block_counts, counts, run_of, id_of, first_id, middle, starts, first, last,
    bins, num_lookups, N1, N2, N3,
    TRAINS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Number ids and prefixes, from the counts of all blocks, and store the slices of each."""
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    ids_before = 0
    prefixes_before = 0
    num_ids = 0
    num_prefixes = 0
    for start in range(0, num_blocks, BLOCK):
        other = start + tl.arange(0, BLOCK)
        of_ids = tl.load(block_counts + 2 * other, mask=other < num_blocks, other=0)
        of_prefixes = tl.load(block_counts + 2 * other + 1, mask=other < num_blocks, other=0)
        num_ids += tl.sum(of_ids, axis=0)
        num_prefixes += tl.sum(of_prefixes, axis=0)
        ids_before += tl.sum(tl.where(other < block, of_ids, 0), axis=0)
        prefixes_before += tl.sum(tl.where(other < block, of_prefixes, 0), axis=0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_lookups
    key, before, num_begun, new_id, new_prefix = _starts(keys, position, num_lookups, N3, PIECE, WINDOW)
    id = ids_before + num_begun - 1
    prefix = prefixes_before + tl.cumsum(new_prefix.to(tl.int32), axis=0) - 1
    slice1 = (key // N3 % N1).to(tl.int32)
    slice2 = (key // N3 // N1).to(tl.int32)
    slice3 = (key % N3).to(tl.int32)
    tl.store(run_of + position, id, mask=inside)
    tl.store(id_of + tl.load(order + position, mask=inside, other=0), id, mask=inside)
    tl.store(first_id + prefix, id, mask=new_prefix)
    tl.store(middle + prefix, slice2, mask=new_prefix)
    tl.store(first + prefix, tl.load(slices1 + 4 * slice1, mask=new_prefix, other=0), mask=new_prefix)
    tl.store(last + id, tl.load(slices3 + 4 * slice3, mask=new_id, other=0), mask=new_id)
    # The first prefix of a middle slice is also the start and the end of the empty slices before it.
    slice_before = tl.where(position > 0, (before // N3 // N1).to(tl.int32), -1)
    gap = tl.where(inside, slice2 - slice_before, 0)
    widest = tl.max(gap, axis=0)
    back = tl.zeros_like(widest)
    while back < widest:
        tl.store(starts + slice2 - back, prefix, mask=back < gap)
        back += 1
    if block == num_blocks - 1:
        tl.store(counts, num_ids)
        tl.store(counts + 1, num_prefixes)
        tl.store(first_id + num_prefixes, num_ids)
        final = (tl.load(keys + num_lookups - 1) // N3 // N1).to(tl.int32)
        for start in range(0, N2 + 1, BLOCK):
            empty = start + tl.arange(0, BLOCK)
            beyond = (empty > final) & (empty <= N2)
            tl.store(starts + empty, tl.zeros([BLOCK], dtype=tl.int32) + num_prefixes, mask=beyond)
    if TRAINS:
        kind = bins.dtype.element_ty
        tl.store(bins + prefix, slice1.to(kind), mask=new_prefix)
        tl.store(bins + num_lookups + id, (slice3 + N1).to(kind), mask=new_id)
        none = tl.zeros([BLOCK], dtype=tl.int32) + (N1 + N3)
        tl.store(bins + position, none.to(kind), mask=inside & (position >= num_prefixes))
        tl.store(bins + num_lookups + position, none.to(kind), mask=inside & (position >= num_ids))


@triton.jit
def run_bounds(keys, count, value, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Start and end of `value` in ascending `keys[:count]`; both searches at once, `2**STEPS > count`."""
    side = tl.arange(0, 2)
    low = tl.zeros([2], dtype=tl.int32)
    high = low + count
    for _ in range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        below = tl.load(keys + middle, mask=searching, other=0).to(tl.int32) < value + side
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & (below == 0), middle, high)
    return tl.sum(tl.where(side == 0, low, 0), axis=0), tl.sum(tl.where(side == 1, low, 0), axis=0)


def find_distinct(trains: Trains, ids: Tensor, bounds: Tensor | None, *, training: bool) -> Distinct:
    """The distinct ids and prefixes of ids [L], int64 or int32, L > 0.

    Lookups are train-major: train t has those from `bounds[t]` on (a 1-D tensor on the device), or all trains have
    equally many when None. `training` also prepares the second sort.
    """
    num_lookups, device = ids.numel(), ids.device
    n1, n2, n3 = trains.sizes
    assert num_lookups < 2**30, "lookups are numbered in int32"
    num_blocks = ceil_div(num_lookups, BLOCK)
    keys = torch.empty(num_lookups, dtype=torch.int32 if n1 * n2 * n3 < 2**31 else torch.int64, device=device)
    _keys_kernel[(num_blocks,)](
        ids, ids if bounds is None else bounds, 0 if bounds is None else bounds.stride(0), trains.shapes, keys,
        num_lookups, ceil_div(num_lookups, trains.num_trains), trains.num_trains, n1, n3,
        RAGGED=bounds is not None, BLOCK=BLOCK,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    width = ceil_div(num_lookups + 1, 16) * 16  # every line aligned
    run_of, id_of, first_id, middle = torch.empty((4, width), dtype=torch.int32, device=device).unbind(0)
    first, last = torch.empty((2, width), dtype=torch.int64, device=device).unbind(0)
    few = torch.empty(2 * num_blocks + 16 + n2 + 1, dtype=torch.int32, device=device)
    counts, block_counts, starts = few.split([16, 2 * num_blocks, n2 + 1])
    bins = None
    if training:
        kind = torch.int16 if n1 + n3 < 2**15 else torch.int32
        bins = torch.empty(2 * num_lookups, dtype=kind, device=device)
    cuts = {"BLOCK": BLOCK, "PIECE": PIECE, "WINDOW": WINDOW}
    _count_kernel[(num_blocks,)](keys, block_counts, num_lookups, n3, **cuts)
    _number_kernel[(num_blocks,)](
        keys, order, trains.slices[0], trains.slices[2], block_counts, counts, run_of, id_of, first_id, middle, starts,
        first, last, run_of if bins is None else bins, num_lookups, n1, n2, n3, TRAINS=training, **cuts,
    )  # fmt: skip
    max_prefixes = min(num_lookups, trains.num_prefixes + num_blocks * ceil_div(BLOCK, PIECE))
    return Distinct(
        num_lookups=num_lookups, max_prefixes=max_prefixes, counts=counts, order=order, run_of=run_of,
        id_of=id_of[:num_lookups], first_id=first_id, middle=middle, starts=starts, first=first, last=last, bins=bins,
    )  # fmt: skip
