"""Matrix products of tensor trains of three cores in Triton: prefixes, rows, and the gradients of both.

`tensor_train_triton` has their equations. Slices, ids and prefixes are those of `tensor_train_layout_triton`; D1, D2,
D3, R1 and R2 are (d1, d2, d3) and the largest ranks, and D1P is D1 padded to a power of two.
Where trains have different ranks (SAME is off), `slices2` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels.launch_sizes import ceil_div, next_power_of_2
from holdall.kernels.tensor_train_layout_triton import Distinct, Trains
from holdall.kernels.tensor_train_sums_triton import sum_by_slice

TILES = {
    "prefixes": {"rows": 32, "columns": 64, "inner": 32, "num_warps": 2},
    "rows": {"ids": 4, "inner": 32, "num_warps": 1, "programs": 4224},
    "grad_prefixes": {"ids": 4, "inner": 32, "num_warps": 1, "programs": 4224},
    "grad_middle": {"rows": 32, "columns": 128, "inner": 32, "num_warps": 4},
    "grad_first": {"rows": 64, "columns": 64, "inner": 64, "num_warps": 4},
}
"""Block sizes of a program. About ten of each were timed on an H200: rank 32 with 65,536 ids, 64 and 128 with
8,192, Zipf and uniform. These are within a third of the best for each; others took up to 2.5 times as long."""


@triton.jit
def _first_slices(core1, place1, part, inner, r1, inside):  # type: ignore[no-untyped-def]
    """Columns `inner` of the first slices at `place1`, a line for each of their d1 parts: [prefixes * d1, inner]."""
    mask = inside[:, None] & (inner < r1)[None, :]
    return tl.load(core1 + (place1 + part * r1)[:, None] + inner[None, :], mask=mask, other=0.0)


@triton.jit
def _last_slices(core3, place3, digit, inner, r2, inside, D3: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lines `inner` of the last slices at `place3`, a column for each of their d3 digits: [inner, ids * d3]."""
    mask = inside[None, :] & (inner < r2)[:, None]
    return tl.load(core3 + (place3 + digit)[None, :] + (inner * D3)[:, None], mask=mask, other=0.0)


@triton.jit
def _places(rows, id, part, digit, D12: tl.constexpr, D3: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to the numbers of rows `id`: [d1*d2, ids * d3]."""
    return rows + id.to(tl.int64)[None, :] * (D12 * D3) + (part * D3)[:, None] + digit[None, :]


@triton.jit
def _prefixes_kernel(  # type: ignore[no-untyped-def]
    core1, core2, slices2, starts, first, products, STRIDE, NUM_SPLITS,
    D1: tl.constexpr, D1P: tl.constexpr, D2: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, 
    R1: tl.constexpr, R2: tl.constexpr, SAME: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """products[p] [d1, d2*r2] = G1[i1] [d1, r1] @ G2[i2] [r1, d2*r2], for the prefixes of one middle slice."""
    slice2 = tl.program_id(0)
    begin = tl.load(starts + slice2)
    end = tl.load(starts + slice2 + 1)
    place2 = tl.multiple_of(tl.load(slices2 + 4 * slice2), ALIGNED)
    r1 = R1 if SAME else tl.multiple_of(tl.load(slices2 + 4 * slice2 + 2).to(tl.int32), ALIGNED)
    r2 = R2 if SAME else tl.multiple_of(tl.load(slices2 + 4 * slice2 + 3).to(tl.int32), ALIGNED)
    width = D2 * r2
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_P * D1P)
    part = row % D1P
    for start in range(begin + tl.program_id(2) * BLOCK_P, end, NUM_SPLITS * BLOCK_P):
        prefix = start + row // D1P
        inside = (prefix < end) & (part < D1)
        place1 = tl.multiple_of(tl.load(first + prefix, mask=inside, other=0), ALIGNED)
        total = tl.zeros([BLOCK_P * D1P, BLOCK_N], dtype=tl.float32)
        for k in range(0, R1, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K)
            left = _first_slices(core1, place1, part, inner, r1, inside)
            right = tl.load(
                core2 + place2 + inner[:, None] * width + column[None, :],
                mask=(inner < r1)[:, None] & (column < width)[None, :],
                other=0.0,
            )
            total = tl.dot(left, right, total, input_precision=PRECISION)
        out = products + prefix.to(tl.int64)[:, None] * STRIDE + (part * width)[:, None] + column[None, :]
        tl.store(out, total, mask=inside[:, None] & (column < width)[None, :])


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    core3, slices2, middle, first_id, last, counts, products, rows, STRIDE,
    D12: tl.constexpr, D12P: tl.constexpr, D3: tl.constexpr, D3P: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, SAME: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rows[u] [d1*d2, d3] = products[p] [d1*d2, r2] @ G3[i3] [r2, d3], for the ids of one prefix after the other."""
    num_prefixes = tl.load(counts + 1)
    part = tl.arange(0, D12P)
    column = tl.arange(0, BLOCK_U * D3P)
    digit = column % D3P
    prefix = tl.program_id(0)
    while prefix < num_prefixes:
        slice2 = 0 if SAME else tl.load(middle + prefix)
        r2 = R2 if SAME else tl.multiple_of(tl.load(slices2 + 4 * slice2 + 3).to(tl.int32), ALIGNED)
        end = tl.load(first_id + prefix + 1)
        product = products + prefix.to(tl.int64) * STRIDE
        for start in range(tl.load(first_id + prefix), end, BLOCK_U):
            id = start + column // D3P
            inside = (id < end) & (digit < D3)
            place3 = tl.load(last + id, mask=inside, other=0)
            total = tl.zeros([D12P, BLOCK_U * D3P], dtype=tl.float32)
            for k in range(0, R2, BLOCK_K):
                inner = k + tl.arange(0, BLOCK_K)
                left = tl.load(
                    product + (part * r2)[:, None] + inner[None, :],
                    mask=(part < D12)[:, None] & (inner < r2)[None, :],
                    other=0.0,
                )
                right = _last_slices(core3, place3, digit, inner, r2, inside, D3)
                total = tl.dot(left, right, total, input_precision=PRECISION)
            places = _places(rows, id, part, digit, D12, D3)
            tl.store(places, total, mask=inside[None, :] & (part < D12)[:, None])
        prefix += tl.num_programs(0)


@triton.jit
def _grad_prefixes_kernel(  # type: ignore[no-untyped-def]
    core3, slices2, middle, first_id, last, counts, products, grad_rows, grad_products, grad_last, STRIDE,
    LAST_STRIDE, D12: tl.constexpr, D12P: tl.constexpr, D3: tl.constexpr, D3P: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, SAME: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d products[p] = sum over its ids of d rows[u] @ G3[i3]^T, and of every id products[p]^T @ d rows[u] [r2, d3]."""
    num_prefixes = tl.load(counts + 1)
    part = tl.arange(0, D12P)
    column = tl.arange(0, BLOCK_U * D3P)
    digit = column % D3P
    inner = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    prefix = tl.program_id(0)
    while prefix < num_prefixes:
        slice2 = 0 if SAME else tl.load(middle + prefix)
        r2 = R2 if SAME else tl.multiple_of(tl.load(slices2 + 4 * slice2 + 3).to(tl.int32), ALIGNED)
        end = tl.load(first_id + prefix + 1)
        cell = prefix.to(tl.int64) * STRIDE + (part * r2)[:, None] + inner[None, :]
        mask = (part < D12)[:, None] & (inner < r2)[None, :]
        product = tl.load(products + cell, mask=mask, other=0.0)
        total = tl.zeros([D12P, BLOCK_K], dtype=tl.float32)
        for start in range(tl.load(first_id + prefix), end, BLOCK_U):
            id = start + column // D3P
            inside = (id < end) & (digit < D3)
            place3 = tl.load(last + id, mask=inside, other=0)
            right = _last_slices(core3, place3, digit, inner, r2, inside, D3)
            places = _places(grad_rows, id, part, digit, D12, D3)
            grad = tl.load(places, mask=inside[None, :] & (part < D12)[:, None], other=0.0)
            total = tl.dot(grad, tl.trans(right), total, input_precision=PRECISION)
            of_last = tl.dot(tl.trans(product), grad, input_precision=PRECISION)
            out = grad_last + id.to(tl.int64)[None, :] * LAST_STRIDE + (inner * D3)[:, None] + digit[None, :]
            tl.store(out, of_last, mask=inside[None, :] & (inner < r2)[:, None])
        tl.store(grad_products + cell, total, mask=mask)
        prefix += tl.num_programs(0)


@triton.jit
def _grad_middle_kernel(  # type: ignore[no-untyped-def]
    core1, slices2, starts, first, grad_products, grad_cores, STRIDE,
    D1: tl.constexpr, D1P: tl.constexpr, D2: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, 
    R1: tl.constexpr, R2: tl.constexpr, SAME: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d G2[i2] [r1, d2*r2] = sum over its prefixes of G1[i1]^T [r1, d1] @ d products[p] [d1, d2*r2]."""
    slice2 = tl.program_id(0)
    begin = tl.load(starts + slice2)
    end = tl.load(starts + slice2 + 1)
    place = tl.multiple_of(tl.load(slices2 + 4 * slice2 + 1), ALIGNED)
    r1 = R1 if SAME else tl.multiple_of(tl.load(slices2 + 4 * slice2 + 2).to(tl.int32), ALIGNED)
    r2 = R2 if SAME else tl.multiple_of(tl.load(slices2 + 4 * slice2 + 3).to(tl.int32), ALIGNED)
    width = D2 * r2
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_P * D1P)
    part = row % D1P
    total = tl.zeros([BLOCK_K, BLOCK_N], dtype=tl.float32)
    for start in range(begin, end, BLOCK_P):
        prefix = start + row // D1P
        inside = (prefix < end) & (part < D1)
        place1 = tl.multiple_of(tl.load(first + prefix, mask=inside, other=0), ALIGNED)
        left = _first_slices(core1, place1, part, inner, r1, inside)
        grad = tl.load(
            grad_products + prefix.to(tl.int64)[:, None] * STRIDE + (part * width)[:, None] + column[None, :],
            mask=inside[:, None] & (column < width)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(left), grad, total, input_precision=PRECISION)
    out = grad_cores + place + inner[:, None] * width + column[None, :]
    tl.store(out, total, mask=(inner < r1)[:, None] & (column < width)[None, :])


@triton.jit
def _grad_first_kernel(  # type: ignore[no-untyped-def]
    core2, slices2, starts, grad_products, grad_first, STRIDE, FIRST_STRIDE, NUM_SPLITS,
    D1: tl.constexpr, D1P: tl.constexpr, D2: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, 
    R1: tl.constexpr, R2: tl.constexpr, SAME: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_first[p] [d1, r1] = d products[p] [d1, d2*r2] @ G2[i2]^T, for the prefixes of one middle slice."""
    slice2 = tl.program_id(0)
    begin = tl.load(starts + slice2)
    end = tl.load(starts + slice2 + 1)
    place2 = tl.multiple_of(tl.load(slices2 + 4 * slice2), ALIGNED)
    r1 = R1 if SAME else tl.multiple_of(tl.load(slices2 + 4 * slice2 + 2).to(tl.int32), ALIGNED)
    r2 = R2 if SAME else tl.multiple_of(tl.load(slices2 + 4 * slice2 + 3).to(tl.int32), ALIGNED)
    width = D2 * r2
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # of r1
    row = tl.arange(0, BLOCK_P * D1P)
    part = row % D1P
    for start in range(begin + tl.program_id(2) * BLOCK_P, end, NUM_SPLITS * BLOCK_P):
        prefix = start + row // D1P
        inside = (prefix < end) & (part < D1)
        cell = prefix.to(tl.int64) * STRIDE + part * width
        total = tl.zeros([BLOCK_P * D1P, BLOCK_N], dtype=tl.float32)
        for k in range(0, D2 * R2, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K)
            grad = tl.load(
                grad_products + cell[:, None] + inner[None, :],
                mask=inside[:, None] & (inner < width)[None, :],
                other=0.0,
            )
            right = tl.load(
                core2 + place2 + column[:, None] * width + inner[None, :],
                mask=(column < r1)[:, None] & (inner < width)[None, :],
                other=0.0,
            )
            total = tl.dot(grad, tl.trans(right), total, input_precision=PRECISION)
        out = grad_first + prefix.to(tl.int64)[:, None] * FIRST_STRIDE + (part * r1)[:, None] + column[None, :]
        tl.store(out, total, mask=inside[:, None] & (column < r1)[None, :])


def _precision() -> str:
    """Precision of float32 products: the one that torch is set to."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def _ranks(trains: Trains) -> dict[str, Any]:
    return {
        "R1": trains.ranks[0], "R2": trains.ranks[1], "SAME": trains.same_ranks, "ALIGNED": trains.aligned,
        "PRECISION": _precision(),
    }  # fmt: skip


def _blocks(trains: Trains, name: str, *, columns: int, inner: int) -> dict[str, Any]:
    """Compile-time sizes of a kernel that takes a tile of prefixes by a block of columns."""
    d1, d2, _ = trains.dims
    tile = TILES[name]
    return {
        "D1": d1, "D1P": next_power_of_2(d1), "D2": d2, "BLOCK_P": max(1, tile["rows"] // next_power_of_2(d1)),
        "BLOCK_N": min(tile["columns"], max(16, next_power_of_2(columns))),
        "BLOCK_K": min(tile["inner"], max(16, next_power_of_2(inner))),
        **_ranks(trains),
        "num_warps": tile["num_warps"],
    }  # fmt: skip


def _id_blocks(trains: Trains, name: str) -> dict[str, Any]:
    """Compile-time sizes of a kernel that takes the ids of a prefix."""
    d1, d2, d3 = trains.dims
    tile = TILES[name]
    return {
        "D12": d1 * d2, "D12P": max(16, next_power_of_2(d1 * d2)), "D3": d3, "D3P": next_power_of_2(d3),
        "BLOCK_U": max(1, 16 // next_power_of_2(d3), min(tile["ids"], 64 // next_power_of_2(d3))),
        "BLOCK_K": min(tile["inner"], max(16, next_power_of_2(trains.ranks[1]))),
        **_ranks(trains), "num_warps": tile["num_warps"],
    }  # fmt: skip


def _num_splits(trains: Trains, distinct: Distinct, block_p: int) -> int:
    """Number of programs that share the prefixes of a middle slice: half a tile's worth of an even share, 8 at most."""
    return max(1, min(8, distinct.max_prefixes // (trains.sizes[1] * block_p)))


def prefix_products(trains: Trains, distinct: Distinct, cores: Sequence[Tensor]) -> Tensor:
    """Products of the first two cores for each distinct prefix, [P, d1*d2*r2]."""
    (d1, d2, _), (r1, r2) = trains.dims, trains.ranks
    products = cores[0].new_empty(distinct.max_prefixes, d1 * d2 * r2)
    blocks = _blocks(trains, "prefixes", columns=d2 * r2, inner=r1)
    splits = _num_splits(trains, distinct, blocks["BLOCK_P"])
    _prefixes_kernel[(trains.sizes[1], ceil_div(d2 * r2, blocks["BLOCK_N"]), splits)](
        cores[0], cores[1], trains.slices[1], distinct.starts, distinct.first,
        products, products.shape[1], splits, **blocks,
    )  # fmt: skip
    return products


def distinct_rows(trains: Trains, distinct: Distinct, cores: Sequence[Tensor], products: Tensor) -> Tensor:
    """[U, dim]."""
    rows = cores[0].new_empty(distinct.num_lookups, trains.dim)
    _rows_kernel[(min(distinct.max_prefixes, TILES["rows"]["programs"]),)](
        cores[2], trains.slices[1], distinct.middle, distinct.first_id, distinct.last,
        distinct.counts, products, rows, products.shape[1], **_id_blocks(trains, "rows"),
    )  # fmt: skip
    return rows


def _prefix_gradients(
    trains: Trains, distinct: Distinct, cores: Sequence[Tensor], products: Tensor, grad_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the prefix products [P, d1*d2*r2], and every id's term of that of its last slice [U, r2*d3]."""
    r2, d3 = trains.ranks[1], trains.dims[2]
    grad_products = torch.empty_like(products)
    grad_last = products.new_empty(distinct.num_lookups, r2 * d3)
    blocks = _id_blocks(trains, "grad_prefixes")
    programs = min(distinct.max_prefixes, TILES["grad_prefixes"]["programs"])
    _grad_prefixes_kernel[(programs, ceil_div(r2, blocks["BLOCK_K"]))](
        cores[2], trains.slices[1], distinct.middle, distinct.first_id, distinct.last,
        distinct.counts, products, grad_rows, grad_products, grad_last, products.shape[1], grad_last.shape[1], **blocks,
    )  # fmt: skip
    return grad_products, grad_last


def _first_gradients(trains: Trains, distinct: Distinct, cores: Sequence[Tensor], grad_products: Tensor) -> Tensor:
    """Every prefix's term of the gradient of its first slice, [P, d1*r1]."""
    (d1, d2, _), (r1, r2) = trains.dims, trains.ranks
    grad_first = grad_products.new_empty(distinct.max_prefixes, d1 * r1)
    blocks = _blocks(trains, "grad_first", columns=r1, inner=d2 * r2)
    splits = _num_splits(trains, distinct, blocks["BLOCK_P"])
    _grad_first_kernel[(trains.sizes[1], ceil_div(r1, blocks["BLOCK_N"]), splits)](
        cores[1], trains.slices[1], distinct.starts, grad_products, grad_first,
        grad_products.shape[1], grad_first.shape[1], splits, **blocks,
    )  # fmt: skip
    return grad_first


def _middle_gradients(
    trains: Trains, distinct: Distinct, cores: Sequence[Tensor], grad_products: Tensor, gradient: Tensor
) -> None:
    """Gradients of all middle slices, into `gradient`."""
    width, r1 = trains.dims[1] * trains.ranks[1], trains.ranks[0]
    blocks = _blocks(trains, "grad_middle", columns=width, inner=r1)
    grid = (trains.sizes[1], ceil_div(width, blocks["BLOCK_N"]), ceil_div(r1, blocks["BLOCK_K"]))
    _grad_middle_kernel[grid](
        cores[0], trains.slices[1], distinct.starts, distinct.first, grad_products,
        gradient, grad_products.shape[1], **blocks,
    )  # fmt: skip


def core_gradients(
    trains: Trains, distinct: Distinct, cores: Sequence[Tensor], products: Tensor, grad_rows: Tensor
) -> list[Tensor]:
    """Gradients of all cores, views of one buffer, of which every number is written."""
    grad_products, grad_last = _prefix_gradients(trains, distinct, cores, products, grad_rows)
    grad_first = _first_gradients(trains, distinct, cores, grad_products)
    gradient = products.new_empty(sum(trains.core_sizes))
    _middle_gradients(trains, distinct, cores, grad_products, gradient)
    sum_by_slice(trains, distinct, grad_first, grad_last, gradient)
    parts = gradient.split(trains.core_sizes)
    return [part.view(core.shape) for part, core in zip(parts, cores, strict=True)]
