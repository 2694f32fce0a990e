"""Kernels of Frobenius-product tables; `frobenius_triton` has their equations and launches them.

Shapes: T tables of one rank r, p terms and dim D, C = p * r columns; L lookups and N bags a table. Program id 1 is the
table; a line of `meta` has pointers to its left, right and basis, its side, the source of its ids, the target of its
rows, and its first row in the gradients of all.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def u_kernel(  # type: ignore[no-untyped-def]
    meta, values, offsets, scale, u_out, num_bags, source_stride, sample_stride,
    FACTOR: tl.constexpr, HAS_BAGS: tl.constexpr, SCALED: tl.constexpr, RANK: tl.constexpr, TERMS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """u [N, r] of every bag: the products of its lookups, added up."""
    table = tl.program_id(1)
    info = meta + table * 7
    left = tl.multiple_of(tl.load(info).to(tl.pointer_type(FACTOR)), 16)
    right = tl.multiple_of(tl.load(info + 1).to(tl.pointer_type(FACTOR)), 16)
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
    cell = (table.to(tl.int64) * num_bags + bag)[:, None] * RANK + line[None, :]
    tl.store(u_out + cell, u, mask=inside[:, None] & (line < RANK)[None, :])


@triton.jit
def rows_kernel(  # type: ignore[no-untyped-def]
    meta, u_in, out, num_bags, target_stride, bag_stride,
    FACTOR: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """row = u @ W of every bag in float32, to its row of the output: for ranks of a few numbers."""
    table = tl.program_id(1)
    info = meta + table * 7
    basis = tl.multiple_of(tl.load(info + 2).to(tl.pointer_type(FACTOR)), 16)
    bag = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = bag < num_bags
    column = tl.arange(0, BLOCK_D)
    u_in += (table.to(tl.int64) * num_bags + bag) * RANK
    rows = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for r in tl.static_range(RANK):
        w = tl.load(basis + r * DIM + column, mask=column < DIM, other=0.0).to(tl.float32)
        rows += tl.load(u_in + r, mask=inside, other=0.0)[:, None] * w[None, :]
    place = tl.load(info + 5) * target_stride + bag * bag_stride
    mask = inside[:, None] & (column < DIM)[None, :]
    tl.store(out + place[:, None] * DIM + column[None, :], rows.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rows_by_matrix_kernel(  # type: ignore[no-untyped-def]
    meta, u_in, out, num_bags, target_stride, bag_stride,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`rows_kernel` with matrix products, for TILES blocks of bags that share W."""
    table = tl.program_id(1)
    info = meta + table * 7
    basis = tl.multiple_of(tl.load(info + 2).to(tl.pointer_type(FACTOR)), 16)
    line = tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    known = (line < RANK)[:, None] & (column < DIM)[None, :]
    w = tl.load(basis + line[:, None] * DIM + column[None, :], mask=known, other=0.0).to(tl.float32)
    target = tl.load(info + 5) * target_stride
    for tile in range(TILES):
        bag = (tl.program_id(0).to(tl.int64) * TILES + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = bag < num_bags
        cell = (table.to(tl.int64) * num_bags + bag)[:, None] * RANK + line[None, :]
        u = tl.load(u_in + cell, mask=inside[:, None] & (line < RANK)[None, :], other=0.0)
        rows = tl.dot(u, w, input_precision=PRECISION)
        mask = inside[:, None] & (column < DIM)[None, :]
        place = (target + bag * bag_stride)[:, None] * DIM + column[None, :]
        tl.store(out + place, rows.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _halves(x):  # type: ignore[no-untyped-def]
    """float32 x as the sum of two numbers, the first of the 11 bits that the matrix units take."""
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def basis_kernel(  # type: ignore[no-untyped-def]
    meta, u_in, grad, d_out, d_basis, num_bags, target_stride, bag_stride,
    FACTOR: tl.constexpr, PRECISE: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """d = g W^T of every bag, and this program's part of u^T g.

    With PRECISE every product is three of halves, whose error is that of float32. Splitting by hand costs two
    operations a number, where Triton's own "tf32x3" also looks for infinities: a gradient that has one gives NaN here.
    """
    table = tl.program_id(1)
    info = meta + table * 7
    basis = tl.multiple_of(tl.load(info + 2).to(tl.pointer_type(FACTOR)), 16)
    target = tl.load(info + 5) * target_stride
    line = tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    known = (column < DIM)[:, None] & (line < RANK)[None, :]
    transposed = tl.load(basis + line[None, :] * DIM + column[:, None], mask=known, other=0.0).to(tl.float32)
    if PRECISE:
        w_high, w_low = _halves(transposed)
    total = tl.zeros([BLOCK_D, BLOCK_R], dtype=tl.float32)
    for base in range(tl.program_id(0) * BLOCK_N, num_bags, tl.num_programs(0) * BLOCK_N):
        bag = base + tl.arange(0, BLOCK_N).to(tl.int64)
        place = (target + bag * bag_stride)[:, None] * DIM + column[None, :]
        mask = (bag < num_bags)[:, None] & (column < DIM)[None, :]
        g = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        cell = (table.to(tl.int64) * num_bags + bag)[:, None] * RANK + line[None, :]
        used = (bag < num_bags)[:, None] & (line < RANK)[None, :]
        u = tl.load(u_in + cell, mask=used, other=0.0)
        if PRECISE:
            g_high, g_low = _halves(g)
            u_high, u_low = _halves(u)
            # Three sums side by side: in one, each product would wait for the last. The compiler would make them one
            # if it knew that they begin at zero.
            zeros = tl.zeros([BLOCK_N, BLOCK_R], dtype=tl.float32) + tl.where(base < 0, 1.0, 0.0)
            d = tl.dot(g_low, w_high, zeros, input_precision="tf32")
            d += tl.dot(g_high, w_low, zeros, input_precision="tf32")
            d += tl.dot(g_high, w_high, zeros, input_precision="tf32")
            more = tl.dot(tl.trans(g_low), u_high, input_precision="tf32")
            more = tl.dot(tl.trans(g_high), u_low, more, input_precision="tf32")
            total += tl.dot(tl.trans(g_high), u_high, more, input_precision="tf32")  # rounded, not cut off as in there
        else:
            d = tl.dot(g, transposed, input_precision="tf32")
            total = tl.dot(tl.trans(g), u, total, input_precision="tf32")
        tl.store(d_out + cell, d, mask=used)
    program = (table * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    place = (program * RANK + line)[None, :] * DIM + column[:, None]
    tl.store(d_basis + place, total, mask=known)


@triton.jit
def scatter_kernel(  # type: ignore[no-untyped-def]
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
