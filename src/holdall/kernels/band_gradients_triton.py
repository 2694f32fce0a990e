"""Gradients of lookups in tables of bands, in Triton: one launch over all tables and bands, as the lookup has one.

A band learns in one of three ways. Rows that train as codes are numbered across all tables, and their lookups are
written as numbers, to be sorted and summed by row. Stored rows and codewords of which there are few are summed here, by
atomic additions in float32, so in any order. Other bands are left alone. Only gradients of bands that are summed here
are read.

Shapes as in `kernels.bands_triton`; `learning` [bands of all tables, 2] has for each band a mode (of
`kernels.bands`) and a first number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels.bands_triton import ELEMENTS, NUM_WARPS, BandLaunch
from holdall.kernels.launch_sizes import ceil_div, next_power_of_2


@triton.jit
def _add(vectors, row, adds, sums, touched, DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add vectors to rows of `sums` [R, dim], and mark the rows."""
    column = tl.arange(0, BLOCK_D)
    mask = adds[:, None] & (column < DIM)[None, :]
    tl.atomic_add(sums + row[:, None] * DIM + column[None, :], vectors, mask=mask, sem="relaxed")
    tl.store(touched + row, 1, mask=adds)


@triton.jit
def _gradients_kernel(  # type: ignore[no-untyped-def]
    values, columns, info, learning, grads, numbers, sums, touched, num_samples, source_stride, sample_stride,
    out_columns, none, NUM_TABLES: tl.constexpr, PARTS: tl.constexpr, NUMBERS: tl.constexpr, SUMS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    table = tl.program_id(0) % NUM_TABLES
    column_of = columns + table * 4
    sample = (tl.program_id(0) // NUM_TABLES).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = sample < num_samples
    source = values + tl.load(column_of) * source_stride
    number = tl.load(source + sample * sample_stride, mask=inside, other=0).to(tl.int64)
    place = (sample * out_columns + tl.load(column_of + 1)) * DIM
    column = tl.arange(0, BLOCK_D)
    band = tl.load(column_of + 2)
    last = tl.load(column_of + 3)
    found = tl.zeros([BLOCK_B], dtype=tl.int64) + none
    while band < last:
        line = info + band * 8
        start = tl.load(line + 4)
        end = tl.load(line)
        mode = tl.load(learning + band * 2)
        first = tl.load(learning + band * 2 + 1)
        reads = inside & (number >= start) & (number < end)
        if NUMBERS:
            found = tl.where(reads & (mode == 1), number - start + first, found)
        if SUMS:  # noqa: SIM102  # a constant: the rest is not compiled without it
            if (mode == 2) & (tl.max(reads.to(tl.int32), axis=0) > 0):
                mask = reads[:, None] & (column < DIM)[None, :]
                vectors = tl.load(grads + place[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
                form = tl.load(line + 1)
                kind = form & 7
                if kind < 2:
                    row = (number - start) * tl.load(line + 5) // (end - start)
                    _add(vectors, first + row, reads, sums, touched, DIM, BLOCK_D)
                else:
                    address = tl.load(line + 2) + number * (form >> 32)
                    for part in tl.static_range(PARTS):
                        adds = reads & (((form >> 6) & 15) > part)
                        byte = address + tl.where(kind == 3, part // 2, part)
                        code = tl.load(byte.to(tl.pointer_type(tl.uint8)), mask=adds, other=0).to(tl.int64)
                        code = tl.where(kind == 3, (code >> (part % 2 * 4)) & 15, code)
                        word = first + code + ((form >> 10) & 1023) * part
                        _add(vectors, word, adds, sums, touched, DIM, BLOCK_D)
        band += 1
    if NUMBERS:
        tl.store(numbers + table.to(tl.int64) * num_samples + sample, found.to(numbers.dtype.element_ty), mask=inside)


class BandGradientLaunch:
    """Gradients of the lookups of a `BandLaunch`, by the mode and first number of each of its bands."""

    def __init__(self, launch: BandLaunch, learning: Sequence[tuple[int, int]], num_numbers: int, num_sums: int):
        self.launch = launch
        self.learning = torch.tensor(learning).to(launch.info.device)
        self.num_numbers, self.num_sums = num_numbers, num_sums

    def write(self, values: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers [T * B] of the lookups of each table, sums [R, dim] and whether each of the R rows was touched.

        `values` are [F, B] and `grad` is [B, F', dim], contiguous; a number of `num_numbers` means no row.
        """
        (size, width, dim), device = grad.shape, grad.device
        num_tables = len(self.launch.columns)
        few = self.num_numbers < 2**31
        numbers = torch.empty(
            num_tables * size if self.num_numbers else 0, dtype=torch.int32 if few else torch.int64, device=device
        )
        sums = torch.zeros(self.num_sums, dim, device=device)
        touched = torch.zeros(self.num_sums, dtype=torch.int8, device=device)
        block_d = next_power_of_2(max(2, dim))
        block_b = max(1, ELEMENTS // block_d)
        _gradients_kernel[(ceil_div(size, block_b) * num_tables,)](
            values, self.launch.columns, self.launch.info, self.learning, grad, numbers, sums, touched, size,
            *values.stride(), width, self.num_numbers, NUM_TABLES=num_tables, PARTS=self.launch.constants["PARTS"],
            NUMBERS=self.num_numbers > 0, SUMS=self.num_sums > 0, DIM=dim, BLOCK_B=block_b, BLOCK_D=block_d,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        return numbers, sums, touched.bool()
