"""Frobenius-product tables in Triton: gathers, products and the small matrix product in one kernel, and two backward.

Shapes: T tables of one rank r, p terms and dim D, C = p * r columns; L lookups and N bags a table.

Forward: u = sum_k left[i1, k] * right[i2, k] of every lookup, pooled over its bag, and row = u @ W on the matrix units,
written where the caller wants it. Backward, with g [N, D] the gradient of the rows: one pass over g gives the gradient
d = g W^T of u and d_W = u^T g; one over the lookups gives d_left[i1, k] += d * right[i2, k], d_right[i2, k] += d *
left[i1, k].

Many lookups share a row of left or right: with ids in order of popularity the first row of left takes over half of
all. So the gradients of the first row are summed inside a program, and those of the others are added by atomic
operations. For a result without any order left to chance (`by_lookup`), the gradients of all
lookups are written out instead, and summed by the sorted runs of `row_update_triton`.

Bytes: a lookup reads 2C numbers of factors (small, in cache), and D numbers of its row are written or read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels.row_gradient import RowGradient

Factors = tuple[Tensor, Tensor, Tensor]
"""left [q, C], right [q, C] and basis [r, D] of one table."""

FORWARD = {"bags": 16, "num_warps": 1}
BASIS = {"bags": 16, "num_warps": 2, "programs": 1056}
SCATTER = {"lookups": 32, "num_warps": 4, "programs": 1056}
"""What a program takes at a time, and how many programs share the work of all tables.

65,536 ids of each of the five largest tables of DLRM-small at (8, 4), dim 128, on an H200. Forward: 71 us in float32
(87 with 32 bags and 2 warps, 103 with products of three times 11 bits), 71 in bf16. Basis: 111 us in float32 with such
products (161 with 32 bags and 4 warps, 230 with plain ones), 33 in bf16. Scatter: 33 us; 81 and 60 when it summed the
gradients of the first 16 rows by products with one-hot matrices.
"""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Place:
    """Where a table's ids come from and its rows go: columns of the ids and of the output."""

    source: int = 0
    target: int = 0


@dataclass(frozen=True)
class Lookups:
    """The ids of all tables, and the shape of the output [.., D] they go to, in rows.

    Id n of the table with `source` s is `values[s * source_stride + n * sample_stride]`, and the row of bag n goes to
    row `target * target_stride + n * bag_stride`. With `offsets` [N + 1] (one table), bag n takes several lookups.
    """

    values: Tensor
    num_lookups: int
    num_bags: int
    source_stride: int
    sample_stride: int
    target_stride: int
    bag_stride: int
    offsets: Tensor | None = None
    bag_of: Tensor | None = None
    """[L], the bag of every lookup, for the backward of bags."""
    scale: Tensor | None = None
    """[L], what every row is multiplied by."""


def one_id_a_sample(values: Tensor, num_columns: int) -> Lookups:
    """Ids [F, B], whose rows go to columns of an output [B, num_columns, D]."""
    size = values.shape[1]
    return Lookups(values, size, size, values.stride(0), values.stride(1), 1, num_columns)


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    left, right, side, row, inside, RANK: tl.constexpr, TERMS: tl.constexpr, BLOCK_R: tl.constexpr
):
    """u [K, BLOCK_R] of ids `row` [K], in float32."""
    i1 = row // side
    i2 = (row - i1 * side).to(tl.int64)[:, None] * (RANK * TERMS)
    i1 = i1.to(tl.int64)[:, None] * (RANK * TERMS)
    column = tl.arange(0, BLOCK_R)[None, :]
    mask = inside[:, None] & (column < RANK)
    u = tl.zeros([row.shape[0], BLOCK_R], dtype=tl.float32)
    for term in tl.static_range(TERMS):
        a = tl.load(left + i1 + term * RANK + column, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(right + i2 + term * RANK + column, mask=mask, other=0.0).to(tl.float32)
        u += a * b
    return u


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    meta, values, offsets, scale, out, u_out, num_bags, source_stride, sample_stride, target_stride, bag_stride,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr, HAS_BAGS: tl.constexpr, SCALED: tl.constexpr,
    SAVES_U: tl.constexpr, RANK: tl.constexpr, TERMS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    table = tl.program_id(1)
    info = meta + table * 7
    left = tl.multiple_of(tl.load(info).to(tl.pointer_type(FACTOR)), 16)
    right = tl.multiple_of(tl.load(info + 1).to(tl.pointer_type(FACTOR)), 16)
    basis = tl.multiple_of(tl.load(info + 2).to(tl.pointer_type(FACTOR)), 16)
    side = tl.load(info + 3).to(values.dtype.element_ty)
    bag = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = bag < num_bags
    if HAS_BAGS:
        start = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
        length = tl.load(offsets + bag + 1, mask=inside, other=0).to(tl.int64) - start
        longest = tl.max(length, axis=0)
        u = tl.zeros([BLOCK_N, BLOCK_R], dtype=tl.float32)
        for step in range(longest):
            reads = inside & (step < length)
            lookup = tl.where(reads, start + step, 0)  # not masked, see `lookup_triton._pool_kernel`
            row = tl.load(values + lookup)
            more = _products(left, right, side, row, reads, RANK, TERMS, BLOCK_R)
            if SCALED:
                more *= tl.where(reads, tl.load(scale + lookup).to(tl.float32), 0.0)[:, None]
            u += more
    else:
        source = tl.load(info + 4) * source_stride + bag * sample_stride
        row = tl.load(values + source, mask=inside, other=0)
        u = _products(left, right, side, row, inside, RANK, TERMS, BLOCK_R)
        if SCALED:
            u *= tl.load(scale + bag, mask=inside, other=0.0).to(tl.float32)[:, None]
    line = tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    known = (line < RANK)[:, None] & (column < DIM)[None, :]
    w = tl.load(basis + line[:, None] * DIM + column[None, :], mask=known, other=0.0).to(tl.float32)
    rows = tl.dot(u, w, input_precision=PRECISION)
    place = tl.load(info + 5) * target_stride + bag * bag_stride
    mask = inside[:, None] & (column < DIM)[None, :]
    tl.store(out + place[:, None] * DIM + column[None, :], rows.to(out.dtype.element_ty), mask=mask)
    if SAVES_U:
        cell = (table.to(tl.int64) * num_bags + bag)[:, None] * RANK + line[None, :]
        tl.store(u_out + cell, u, mask=inside[:, None] & (line < RANK)[None, :])


@triton.jit
def _basis_kernel(  # type: ignore[no-untyped-def]
    meta, u_in, grad, d_out, d_basis, num_bags, target_stride, bag_stride,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """d = g W^T of every bag, and this program's part of u^T g."""
    table = tl.program_id(1)
    info = meta + table * 7
    basis = tl.multiple_of(tl.load(info + 2).to(tl.pointer_type(FACTOR)), 16)
    target = tl.load(info + 5) * target_stride
    line = tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    known = (column < DIM)[:, None] & (line < RANK)[None, :]
    transposed = tl.load(basis + line[None, :] * DIM + column[:, None], mask=known, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for base in range(tl.program_id(0) * BLOCK_N, num_bags, tl.num_programs(0) * BLOCK_N):
        bag = base + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = bag < num_bags
        place = target + bag * bag_stride
        mask = inside[:, None] & (column < DIM)[None, :]
        g = tl.load(grad + place[:, None] * DIM + column[None, :], mask=mask, other=0.0).to(tl.float32)
        cell = (table.to(tl.int64) * num_bags + bag)[:, None] * RANK + line[None, :]
        used = inside[:, None] & (line < RANK)[None, :]
        u = tl.load(u_in + cell, mask=used, other=0.0)
        tl.store(d_out + cell, tl.dot(g, transposed, input_precision=PRECISION), mask=used)
        total += tl.dot(tl.trans(u), g, input_precision=PRECISION)
    program = (table * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    place = (program * RANK + line)[:, None] * DIM + column[None, :]
    tl.store(d_basis + place, total, mask=(line < RANK)[:, None] & (column < DIM)[None, :])


@triton.jit
def _scatter_kernel(  # type: ignore[no-untyped-def]
    meta, values, bag_of, scale, d_in, d_left, d_right, d_scale, num_lookups, num_bags, source_stride, sample_stride,
    FACTOR: tl.constexpr, HAS_BAGS: tl.constexpr, SCALED: tl.constexpr,
    NEEDS_SCALE: tl.constexpr, BY_LOOKUP: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows of left and right, from d of every bag."""
    table = tl.program_id(1)
    info = meta + table * 7
    left = tl.multiple_of(tl.load(info).to(tl.pointer_type(FACTOR)), 16)
    right = tl.multiple_of(tl.load(info + 1).to(tl.pointer_type(FACTOR)), 16)
    side = tl.load(info + 3).to(values.dtype.element_ty)
    source = tl.load(info + 4) * source_stride
    start = tl.load(info + 6)  # of this table's rows in the gradients of all
    column = tl.arange(0, BLOCK_C)
    hot_left = tl.zeros([BLOCK_L, BLOCK_C], dtype=tl.float32)
    hot_right = tl.zeros([BLOCK_L, BLOCK_C], dtype=tl.float32)
    for base in range(tl.program_id(0) * BLOCK_L, num_lookups, tl.num_programs(0) * BLOCK_L):
        lookup = base + tl.arange(0, BLOCK_L).to(tl.int64)
        inside = lookup < num_lookups
        used = inside[:, None] & (column < COLUMNS)[None, :]
        bag = lookup
        if HAS_BAGS:
            bag = tl.load(bag_of + lookup, mask=inside, other=0).to(tl.int64)
        bag += table.to(tl.int64) * num_bags
        row = tl.load(values + source + lookup * sample_stride, mask=inside, other=0)
        i1 = row // side
        i2 = (row - i1 * side).to(tl.int64)
        i1 = i1.to(tl.int64)
        a = tl.load(left + i1[:, None] * COLUMNS + column[None, :], mask=used, other=0.0).to(tl.float32)
        b = tl.load(right + i2[:, None] * COLUMNS + column[None, :], mask=used, other=0.0).to(tl.float32)
        d = tl.load(d_in + bag[:, None] * RANK + (column % RANK)[None, :], mask=used, other=0.0)
        if NEEDS_SCALE:
            tl.store(d_scale + lookup, tl.sum(a * b * d, axis=1), mask=inside)
        if SCALED:
            d *= tl.load(scale + lookup, mask=inside, other=0.0).to(tl.float32)[:, None]
        for_left = d * b
        for_right = d * a
        if BY_LOOKUP:
            cell = (table.to(tl.int64) * num_lookups + lookup)[:, None] * COLUMNS + column[None, :]
            tl.store(d_left + cell, for_left, mask=used)
            tl.store(d_right + cell, for_right, mask=used)
        else:
            is_hot = (i1 == 0)[:, None]
            hot_left += tl.where(is_hot, for_left, 0.0)
            cell = (start + i1)[:, None] * COLUMNS + column[None, :]
            tl.atomic_add(d_left + cell, for_left, mask=used & (i1 > 0)[:, None], sem="relaxed")
            is_hot = (i2 == 0)[:, None]
            hot_right += tl.where(is_hot, for_right, 0.0)
            cell = (start + i2)[:, None] * COLUMNS + column[None, :]
            tl.atomic_add(d_right + cell, for_right, mask=used & (i2 > 0)[:, None], sem="relaxed")
    if not BY_LOOKUP:
        first = start * COLUMNS + column
        tl.atomic_add(d_left + first, tl.sum(hot_left, axis=0), mask=column < COLUMNS, sem="relaxed")
        tl.atomic_add(d_right + first, tl.sum(hot_right, axis=0), mask=column < COLUMNS, sem="relaxed")


_METADATA: dict[tuple[object, ...], Tensor] = {}


def metadata(factors: Sequence[Factors], places: Sequence[Place]) -> Tensor:
    """What the kernels must know of every table, [T, 7] on the device; kept, because making it waits for the GPU."""
    device = factors[0][0].device
    lines, start = [], 0
    for (left, right, basis), place in zip(factors, places, strict=True):
        assert left.is_contiguous()
        assert right.is_contiguous()
        assert basis.is_contiguous()
        pointers = (left.data_ptr(), right.data_ptr(), basis.data_ptr())
        lines.append((*pointers, left.shape[0], place.source, place.target, start))
        start += left.shape[0]
    key = (device, *lines)
    if key not in _METADATA:
        if len(_METADATA) >= 256:  # tables come and go in tests and searches
            _METADATA.clear()
        _METADATA[key] = torch.tensor(lines, dtype=torch.int64).to(device)
    return _METADATA[key]


def _sizes(factors: Sequence[Factors], *names: str) -> dict[str, object]:
    left, _, basis = factors[0]
    (rank, dim), columns = basis.shape, left.shape[1]
    known = {
        "FACTOR": _TYPES[left.dtype],
        "RANK": rank,
        "TERMS": columns // rank,
        "COLUMNS": columns,
        "DIM": dim,
        "BLOCK_R": max(16, triton.next_power_of_2(rank)),
        "BLOCK_C": max(16, triton.next_power_of_2(columns)),
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
    }
    return {name: known[name] for name in ("FACTOR", "RANK", *names)}


def _warps(settings: dict[str, int], factors: Sequence[Factors]) -> int:
    """Warps of a program, more of them for rows wider than the 128 numbers the settings are for."""
    return settings["num_warps"] * max(1, triton.next_power_of_2(factors[0][2].shape[1]) // 128)


def _precision(precise: str, *tensors: Tensor) -> str:
    """The matrix units' 11 bits where something has no more than that, else `precise`."""
    return precise if all(tensor.dtype == torch.float32 for tensor in tensors) else "tf32"


def forward(
    factors: Sequence[Factors], places: Sequence[Place], lookups: Lookups, out: Tensor, *, saves_u: bool = False
) -> Tensor | None:
    """Write the rows (or sums of rows) of every table to their places in `out` [.., D], in its type.

    Returns u [T, N, r], what the backward needs of it, if asked to.
    """
    values, num_bags, num_tables = lookups.values, lookups.num_bags, len(factors)
    u = values.new_empty(num_tables, num_bags, factors[0][2].shape[0], dtype=torch.float32) if saves_u else None
    if num_bags:
        _forward_kernel[(triton.cdiv(num_bags, FORWARD["bags"]), num_tables)](
            metadata(factors, places),
            values,
            values if lookups.offsets is None else lookups.offsets,
            values if lookups.scale is None else lookups.scale,
            out,
            out if u is None else u,
            num_bags,
            lookups.source_stride,
            lookups.sample_stride,
            lookups.target_stride,
            lookups.bag_stride,
            PRECISION=_precision("ieee", factors[0][0], out),
            HAS_BAGS=lookups.offsets is not None,
            SCALED=lookups.scale is not None,
            SAVES_U=saves_u,
            BLOCK_N=FORWARD["bags"],
            num_warps=_warps(FORWARD, factors),
            **_sizes(factors, "TERMS", "DIM", "BLOCK_R", "BLOCK_D"),
        )
    return u


@dataclass(frozen=True)
class Gradients:
    """Gradients of T tables. `left` and `right` hold a row for each row of the tables, one table below the other, or,
    `by_lookup`, for each lookup [T * L, C]; `basis` is [T, r, D]; `scale` [L] where it was asked for; all float32."""

    left: Tensor
    right: Tensor
    basis: Tensor
    scale: Tensor | None


def backward(
    factors: Sequence[Factors],
    places: Sequence[Place],
    lookups: Lookups,
    u: Tensor,
    grad: Tensor,
    *,
    by_lookup: bool = False,
    needs_scale: bool = False,
) -> Gradients:
    """Gradients of the factors for the `u` of `forward` and a gradient `grad` of its output, in the same places."""
    (left, _, basis), num_tables, num_lookups = factors[0], len(factors), lookups.num_lookups
    (rank, dim), columns, device = basis.shape, left.shape[1], grad.device
    programs = max(1, min(triton.cdiv(lookups.num_bags, BASIS["bags"]), BASIS["programs"] // num_tables))
    partial = torch.empty(num_tables, programs, rank, dim, dtype=torch.float32, device=device)
    d = torch.empty_like(u)
    info = metadata(factors, places)
    _basis_kernel[(programs, num_tables)](
        info,
        u,
        grad,
        d,
        partial,
        lookups.num_bags,
        lookups.target_stride,
        lookups.bag_stride,
        PRECISION=_precision("tf32x3", left, grad),
        BLOCK_N=BASIS["bags"],
        num_warps=_warps(BASIS, factors),
        **_sizes(factors, "DIM", "BLOCK_R", "BLOCK_D"),
    )
    num_rows = num_tables * num_lookups if by_lookup else sum(table[0].shape[0] for table in factors)
    make = torch.empty if by_lookup else torch.zeros
    d_left, d_right = make(2, num_rows, columns, dtype=torch.float32, device=device).unbind(0)
    d_scale = torch.empty(num_lookups, dtype=torch.float32, device=device) if needs_scale else None
    values = lookups.values
    if num_lookups:
        programs = max(1, min(triton.cdiv(num_lookups, SCATTER["lookups"]), SCATTER["programs"] // num_tables))
        _scatter_kernel[(programs, num_tables)](
            info,
            values,
            values if lookups.bag_of is None else lookups.bag_of,
            values if lookups.scale is None else lookups.scale,
            d,
            d_left,
            d_right,
            d if d_scale is None else d_scale,
            num_lookups,
            lookups.num_bags,
            lookups.source_stride,
            lookups.sample_stride,
            HAS_BAGS=lookups.bag_of is not None,
            SCALED=lookups.scale is not None,
            NEEDS_SCALE=needs_scale,
            BY_LOOKUP=by_lookup,
            BLOCK_L=SCATTER["lookups"],
            num_warps=SCATTER["num_warps"],
            **_sizes(factors, "COLUMNS", "BLOCK_C"),
        )
    return Gradients(d_left, d_right, partial.sum(1), d_scale)


def sum_by_row(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """[num_rows, C]: gradients of lookups added up by row, in a fixed order, by the row update w -= -1 * g from 0."""
    from holdall.kernels.row_update_triton import update_rows

    total = torch.zeros(num_rows, rows.shape[1], dtype=torch.float32, device=rows.device)
    update_rows("sgd", total, RowGradient(index, rows), lr=-1.0)
    return total
