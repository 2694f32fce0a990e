"""One-hot lookup in tables of bands, in Triton: one launch over all tables and bands, see `kernels.bands`.

A program looks up a block of samples of one table, band by band, from the most popular one. Kind, type and addresses of
a band are the same for the whole program, and a band that no lookup of the block is in costs a comparison. So registers
hold one kind of band at a time, and most blocks read one band. Codes and codewords are read in the layout in which
vectors are stored: reading more of them at once would move the decoded numbers between threads. Arithmetic on ids and
addresses is in int64.

Shapes: B samples, T tables; `columns` [T, 4] has source, target, first band and end of the bands of each table, and
`info` [bands of all tables, 8] a line for each band.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels.bands import FLOATS, BandColumn, StoredBand
from holdall.kernels.launch_sizes import ceil_div, next_power_of_2

ELEMENTS = 1024
NUM_WARPS = 2
"""Numbers and warps of a program. DLRM-small in bands on an H200, 65,536 samples, float32 and bfloat16: 0.318 and 0.206
ms; (512, 1) takes 0.305 and 0.271 ms, as 426,000 programs are as many as start in that time, and (1024, 1), (2048, 4)
and (4096, 4) are slower for both. `benchmarks.bands --shapes` measures them."""

ROWS, SHARED, WORDS_8, WORDS_4, GRID_8, GRID_4 = range(6)
"""Kinds of bands; SHARED are rows of several ids each."""


@triton.jit
def _floats(address, reads, DTYPE: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Float32 numbers [BLOCK_B, BLOCK_D] of the rows of type DTYPE at `address`; 0 where not `reads`."""
    column = tl.arange(0, BLOCK_D)
    pointers = tl.multiple_of(address.to(tl.pointer_type(DTYPE))[:, None] + column[None, :], [1, ALIGN])
    return tl.load(pointers, mask=reads[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _pair(address, reads, DTYPE: tl.constexpr, BITS: tl.constexpr, BOTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two numbers of type DTYPE at `address` in float32, by one load; BITS and BOTH are integers of 1 and 2."""
    both = tl.load(address.to(tl.pointer_type(BOTH)), mask=reads, other=0)
    first = both.to(BITS).to(DTYPE, bitcast=True).to(tl.float32)
    return first, (both >> BITS.primitive_bitwidth).to(BITS).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _grid(extra, number, kind, reads, TYPES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zero and step of each lookup; `kind` is the type of the grid."""
    zero = tl.zeros(number.shape, dtype=tl.float32)
    step = zero
    if TYPES & 1:
        first, second = _pair(extra + number * 8, reads & (kind == 0), tl.float32, tl.uint32, tl.uint64)
        zero += first
        step += second
    if TYPES & 2:
        first, second = _pair(extra + number * 4, reads & (kind == 1), tl.bfloat16, tl.uint16, tl.uint32)
        zero += first
        step += second
    if TYPES & 4:
        first, second = _pair(extra + number * 4, reads & (kind == 2), tl.float16, tl.uint16, tl.uint32)
        zero += first
        step += second
    return zero, step


@triton.jit
def _write(vectors, out, place, reads, DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, BLOCK_D)
    mask = reads[:, None] & (column < DIM)[None, :]
    tl.store(out + place[:, None] + column[None, :], vectors.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    line, number, reads, form, data, extra, KINDS: tl.constexpr, PARTS: tl.constexpr, TYPES: tl.constexpr,
    ALIGN: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Vectors of a band of rows or of codewords."""
    kind = form & 7
    number_type = (form >> 3) & 7
    row = number
    if KINDS & 2:  # SHARED
        start = tl.load(line + 4)
        row = tl.where(kind == 1, (number - start) * tl.load(line + 5) // (tl.load(line) - start), number)
    address = data + row * (form >> 32)
    vectors = tl.zeros([number.shape[0], BLOCK_D], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        adds = reads & (((form >> 6) & 15) > part)
        where = address
        if KINDS & 12:  # codewords
            half = kind == 3
            byte = address + tl.where(half, part // 2, part)
            code = tl.load(byte.to(tl.pointer_type(tl.uint8)), mask=adds & (kind > 1), other=0).to(tl.int64)
            code = tl.where(half, (code >> (part % 2 * 4)) & 15, code)
            word = code + ((form >> 10) & 1023) * part
            where = tl.where(kind > 1, extra + word * tl.where(number_type == 0, DIM * 4, DIM * 2), address)
        if TYPES & 1:
            vectors += _floats(where, adds & (number_type == 0), tl.float32, ALIGN, DIM, BLOCK_D)
        if TYPES & 2:
            vectors += _floats(where, adds & (number_type == 1), tl.bfloat16, ALIGN, DIM, BLOCK_D)
        if TYPES & 4:
            vectors += _floats(where, adds & (number_type == 2), tl.float16, ALIGN, DIM, BLOCK_D)
    return vectors


@triton.jit
def _codes(address, reads, ALIGN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The WIDTH bytes at `address` of each lookup."""
    column = tl.arange(0, BLOCK)
    pointers = tl.multiple_of(address.to(tl.pointer_type(tl.uint8))[:, None] + column[None, :], [1, ALIGN])
    return tl.load(pointers, mask=reads[:, None] & (column < WIDTH)[None, :], other=0)


@triton.jit
def _bands_kernel(  # type: ignore[no-untyped-def]
    values, columns, info, out, num_samples, source_stride, sample_stride, out_columns, NUM_TABLES: tl.constexpr,
    KINDS: tl.constexpr, PARTS: tl.constexpr, FLOAT_TYPES: tl.constexpr, GRID_TYPES: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_8: tl.constexpr, ALIGN_4: tl.constexpr, DIM: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    column_of = columns + tl.program_id(0) % NUM_TABLES * 4
    sample = (tl.program_id(0) // NUM_TABLES).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = sample < num_samples
    source = values + tl.load(column_of) * source_stride
    number = tl.load(source + sample * sample_stride, mask=inside, other=0).to(tl.int64)
    place = (sample * out_columns + tl.load(column_of + 1)) * DIM
    band = tl.load(column_of + 2)
    last = tl.load(column_of + 3)
    while band < last:
        line = info + band * 8
        form = tl.load(line + 1)
        data = tl.load(line + 2)
        extra = tl.load(line + 3)
        reads = inside & (number >= tl.load(line + 4)) & (number < tl.load(line))
        if tl.max(reads.to(tl.int32), axis=0) > 0:
            kind = form & 7
            number_type = (form >> 3) & 7
            address = data + number * (form >> 32)
            if KINDS & 16:  # noqa: SIM102  # a constant: the rest is not compiled without it
                if kind == 4:
                    zero, step = _grid(extra, number, number_type, reads, GRID_TYPES)
                    codes = _codes(address, reads, ALIGN_8, DIM, BLOCK_D).to(tl.float32)
                    _write(zero[:, None] + step[:, None] * codes, out, place, reads, DIM, BLOCK_D)
            if KINDS & 32:  # noqa: SIM102
                if kind == 5:
                    zero, step = _grid(extra, number, number_type, reads, GRID_TYPES)
                    pairs = _codes(address, reads, ALIGN_4, (DIM + 1) // 2, BLOCK_D // 2)
                    codes = tl.interleave((pairs & 15).to(tl.float32), (pairs >> 4).to(tl.float32))
                    _write(zero[:, None] + step[:, None] * codes, out, place, reads, DIM, BLOCK_D)
            if KINDS & 15:  # noqa: SIM102
                if kind < 4:
                    vectors = _sums(
                        line, number, reads, form, data, extra, KINDS, PARTS, FLOAT_TYPES, ALIGN, DIM, BLOCK_D
                    )
                    _write(vectors, out, place, reads, DIM, BLOCK_D)
        band += 1


class BandLaunch:
    """Lookup in some tables, with the lines of their bands on the device; valid while their tensors stay in place."""

    def __init__(self, columns: Sequence[BandColumn], device: torch.device):
        bands = [band for column in columns for band in column.bands]
        lines: list[list[int]] = []
        places: list[tuple[int, int, int, int]] = []
        for column in columns:
            places.append((column.source, column.target, len(lines), len(lines) + len(column.bands)))
            lines.extend(_line(band) for band in column.bands)
        self.info = torch.tensor(lines).to(device)
        self.columns = torch.tensor(places).to(device)
        floats = [_numbers(band) for band in bands if _kind(band) < GRID_8]
        grids = [_numbers(band) for band in bands if _kind(band) >= GRID_8]
        self.constants = {
            "NUM_TABLES": len(columns),
            "KINDS": sum(1 << kind for kind in {_kind(band) for band in bands}),
            "PARTS": max(band.parts for band in bands),
            "FLOAT_TYPES": _bits(floats),
            "GRID_TYPES": _bits(grids),
        }
        self._alignment = _alignment(floats)
        self._alignment_8 = _alignment([band.data for band in bands if _kind(band) == GRID_8])
        self._alignment_4 = _alignment([band.data for band in bands if _kind(band) == GRID_4])

    def write(self, values: Tensor, out: Tensor) -> None:
        """Write the vectors of `values` [F, B] into columns of `out` [B, F', dim], contiguous."""
        size, dim = values.shape[1], out.shape[2]
        if size == 0:
            return
        block_d = next_power_of_2(max(2, dim))
        block_b = max(1, ELEMENTS // block_d)
        a_store = 16 // out.element_size()  # a thread loads what it stores at once
        _bands_kernel[(ceil_div(size, block_b) * len(self.columns),)](
            values, self.columns, self.info, out, size, *values.stride(), out.shape[1], **self.constants,
            ALIGN=min(self._alignment, a_store), ALIGN_8=min(self._alignment_8, a_store),
            ALIGN_4=min(self._alignment_4, a_store // 2), DIM=dim, BLOCK_B=block_b, BLOCK_D=block_d,
            num_warps=NUM_WARPS,
        )  # fmt: skip


def _kind(band: StoredBand) -> int:
    if band.kind == "rows":
        return ROWS if band.data.shape[0] in (1, band.end - band.start) else SHARED
    kinds = {("words", 8): WORDS_8, ("words", 4): WORDS_4, ("grid", 8): GRID_8, ("grid", 4): GRID_4}
    return kinds[band.kind, band.bits]


def _numbers(band: StoredBand) -> Tensor:
    """The tensor of a band whose numbers are floating point."""
    return band.data if band.extra is None else band.extra


def _line(band: StoredBand) -> list[int]:
    """End, form, addresses of data and extra, start, stored rows, and two zeros.

    A form has kind, type, parts, codewords of a part and bytes of a row in its bits from 0, 3, 6, 10 and 32. Where ids
    count rows, addresses are those that row 0 of the table would have: they go with the id itself. A single row for all
    ids has a width of 0.
    """
    kind, numbers, stored = _kind(band), _numbers(band), band.data.shape[0]
    width = 0 if stored == 1 and kind == ROWS else band.data.stride(0) * band.data.element_size()
    data = band.data.data_ptr() - (0 if kind == SHARED else band.start * width)
    extra = numbers.data_ptr()
    if kind >= GRID_8:
        extra -= band.start * 2 * numbers.element_size()
    form = kind | FLOATS.index(numbers.dtype) << 3 | band.parts << 6 | band.num_words << 10 | width << 32
    return [band.end, form, data, extra, band.start, stored, 0, 0]


def _bits(tensors: Sequence[Tensor]) -> int:
    return sum(1 << FLOATS.index(dtype) for dtype in {tensor.dtype for tensor in tensors})


def _alignment(tensors: Sequence[Tensor]) -> int:
    """The largest power of two up to 16 that divides the address of each row."""
    found = 16
    for tensor in tensors:
        while tensor.data_ptr() % found or tensor.shape[1] * tensor.element_size() % found:
            found //= 2
    return found
