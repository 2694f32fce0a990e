"""Frobenius-product tables in Triton: two kernels forward, two backward, each over all tables of one shape.

Shapes: T tables of one rank r, p terms and dim D, C = p * r columns; L lookups and N bags a table.

Forward: u = sum_k left[i1, k] * right[i2, k] of every lookup, pooled over its bag; then row = u @ W, written to the
caller's columns. Backward, with g [N, D] the gradient of the rows: one pass over g gives the gradient d = g W^T of u
and d_W = u^T g; one over the lookups gives d_left[i1, k] += d * right[i2, k], d_right[i2, k] += d * left[i1, k].

u is written and read again because the two kernels need different launches: the one that gathers is bound by the
latency of its loads and needs many programs, the one that multiplies keeps W and many numbers in each program.

Many lookups share a row of left or right: with ids in order of popularity the first row of left takes over half of
all. So the gradients of the first row are summed inside a program, and those of the others are added by atomic
operations. For a deterministic result (`by_lookup`), the gradients of all lookups are written out instead, and summed
by the sorted runs of `row_update_triton`.

Bytes: a lookup reads 2C numbers of factors (small, in cache), and D numbers of its row are written or read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from holdall.kernels.frobenius_kernels_triton import (
    basis_kernel,
    rows_by_matrix_kernel,
    rows_kernel,
    scatter_kernel,
    u_kernel,
)
from holdall.kernels.launch_sizes import ceil_div, next_power_of_2
from holdall.kernels.row_gradient import RowGradient
from holdall.kernels.row_update import UpdateRule, UpdateScalars
from holdall.kernels.side_stream import beside

Factors = tuple[Tensor, Tensor, Tensor]
"""left [q, C], right [q, C] and basis [r, D] of one table."""

U = {"numbers": 1024, "num_warps": 4}
ROWS = {"numbers": 2048, "num_warps": 1}
ROWS_BY_MATRIX = {"bags": 16, "tiles": 4, "num_warps": 1}
BASIS = {"bags": 32, "num_warps": 2, "programs": 1056}
PRECISE_BASIS = {"bags": 16, "num_warps": 1, "programs": 1056}
SCATTER = {"lookups": 32, "num_warps": 4, "programs": 1056}
"""Block sizes of a program (numbers of u, numbers of rows, bags, lookups), and the number of programs that share the
work of all tables.

65,536 ids of each of the five largest tables of DLRM-small at (8, 4), dim 128, on an H200, in float32 / bf16. u: 14 us.
Rows: 53 us / 29 by matrix products (39 without). Basis: 70 us with the products of three halves that float32 needs
(111 with Triton's own and 16 columns for the rank's 8) / 39; 8 programs fit a multiprocessor, and 1,188 in all took
104 us; loading one block ahead, or fewer registers for more programs, took longer. Scatter: 34 to 43 us; 81 and 60 when
it summed the gradients of the first 16 rows by products with one-hot matrices.
"""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class TableColumns:
    """Column of a table in the ids, and in the output."""

    source: int = 0
    target: int = 0


@dataclass(frozen=True)
class Lookups:
    """Ids of all tables, and the strides of the output [.., D] of their rows, in rows.

    Id n of the table with `source` s is `values[s * source_stride + n * sample_stride]`, and bag n is written to
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
    """[L], factor on every row."""


def one_id_a_sample(values: Tensor, num_columns: int) -> Lookups:
    """Ids [F, B], whose rows are columns of an output [B, num_columns, D]."""
    size = values.shape[1]
    return Lookups(values, size, size, values.stride(0), values.stride(1), 1, num_columns)


_METADATA: dict[tuple[object, ...], Tensor] = {}
_IN_GRAPHS: dict[tuple[object, ...], Tensor] = {}
"""Tensors that captured CUDA graphs read at every replay: never dropped."""


def metadata(factors: Sequence[Factors], table_columns: Sequence[TableColumns]) -> Tensor:
    """Line of `meta` of every table, [T, 7] on the device; cached, because making it synchronizes."""
    device = factors[0][0].device
    lines, start = [], 0
    for (left, right, basis), column in zip(factors, table_columns, strict=True):
        assert left.is_contiguous()
        assert right.is_contiguous()
        assert basis.is_contiguous()
        pointers = (left.data_ptr(), right.data_ptr(), basis.data_ptr())
        lines.append((*pointers, left.shape[0], column.source, column.target, start))
        start += left.shape[0]
    key = (device, *lines)
    if key in _IN_GRAPHS:
        return _IN_GRAPHS[key]
    if key not in _METADATA:
        if len(_METADATA) >= 256:  # tables come and go in tests and searches
            _METADATA.clear()
        _METADATA[key] = torch.tensor(lines, dtype=torch.int64).to(device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _IN_GRAPHS[key] = _METADATA[key]
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
        "BLOCK_R": max(8, next_power_of_2(rank)),
        "BLOCK_C": max(16, next_power_of_2(columns)),
        "BLOCK_D": max(16, next_power_of_2(dim)),
    }
    return {name: known[name] for name in ("FACTOR", "RANK", *names)}


def _warps(settings: dict[str, int], numbers: int, usual: int) -> int:
    """Warps of a program of `numbers`, scaled from the settings for the `usual` number of rank 8 and dim 128."""
    return min(8, settings["num_warps"] * max(1, numbers // usual))


def forward(
    factors: Sequence[Factors],
    table_columns: Sequence[TableColumns],
    lookups: Lookups,
    out: Tensor,
    *,
    saves_u: bool = False,
) -> Tensor | None:
    """Write the rows (or sums of rows) of every table to their columns of `out` [.., D], in its type.

    Returns u [T, N, r] for the backward, with `saves_u`.
    """
    values, num_bags, num_tables = lookups.values, lookups.num_bags, len(factors)
    rank = factors[0][2].shape[0]
    u = values.new_empty(num_tables, num_bags, rank, dtype=torch.float32)
    if num_bags:
        info = metadata(factors, table_columns)
        bags = max(1, U["numbers"] // next_power_of_2(rank))
        u_kernel[(ceil_div(num_bags, bags), num_tables)](
            info,
            values,
            values if lookups.offsets is None else lookups.offsets,
            values if lookups.scale is None else lookups.scale,
            u,
            num_bags,
            lookups.source_stride,
            lookups.sample_stride,
            HAS_BAGS=lookups.offsets is not None,
            SCALED=lookups.scale is not None,
            BLOCK_N=bags,
            BLOCK_R=next_power_of_2(rank),
            num_warps=U["num_warps"],
            **_sizes(factors, "TERMS"),
        )
        _multiply(factors, info, lookups, u, out)
    return u if saves_u else None


def _multiply(factors: Sequence[Factors], info: Tensor, lookups: Lookups, u: Tensor, out: Tensor) -> None:
    """Rows u @ W of every bag: on the matrix units, except for few numbers in full float32."""
    rank, dim = factors[0][2].shape
    shared = (info, u, out, lookups.num_bags, lookups.target_stride, lookups.bag_stride)
    precise, width = _is_precise(factors[0][0], out), next_power_of_2(dim)
    if precise and rank <= 16:
        bags = max(1, ROWS["numbers"] // width)
        rows_kernel[(ceil_div(lookups.num_bags, bags), len(factors))](
            *shared, BLOCK_N=bags, num_warps=_warps(ROWS, width, 128), **_sizes(factors, "DIM", "BLOCK_D")
        )
        return
    bags, tiles = ROWS_BY_MATRIX["bags"], ROWS_BY_MATRIX["tiles"]
    rows_by_matrix_kernel[(ceil_div(lookups.num_bags, bags * tiles), len(factors))](
        *shared,
        PRECISION="ieee" if precise else "tf32",
        TILES=tiles,
        BLOCK_N=bags,
        BLOCK_R=max(16, next_power_of_2(rank)),
        num_warps=_warps(ROWS_BY_MATRIX, next_power_of_2(rank) * width, 16 * 128),
        num_stages=1,
        **_sizes(factors, "DIM", "BLOCK_D"),
    )


def _is_precise(*tensors: Tensor) -> bool:
    """Whether everything has more than the 11 bits of the matrix units."""
    return all(tensor.dtype == torch.float32 for tensor in tensors)


@dataclass(frozen=True)
class Gradients:
    """Gradients of T tables, in float32. `left` and `right` have a row for each row of the concatenated tables or,
    `by_lookup`, for each lookup [T * L, C]; `basis` is [T, r, D]; `scale` [L] where it is needed."""

    left: Tensor
    right: Tensor
    basis: Tensor
    scale: Tensor | None


def backward(
    factors: Sequence[Factors],
    table_columns: Sequence[TableColumns],
    lookups: Lookups,
    u: Tensor,
    grad: Tensor,
    *,
    by_lookup: bool = False,
    needs_scale: bool = False,
) -> Gradients:
    """Gradients of the factors for the `u` of `forward` and the gradient `grad` of its output, in the same columns."""
    (left, _, basis), num_tables, num_lookups = factors[0], len(factors), lookups.num_lookups
    (rank, dim), columns, device = basis.shape, left.shape[1], grad.device
    precise = _is_precise(left, grad)
    settings = PRECISE_BASIS if precise else BASIS
    programs = max(1, min(ceil_div(lookups.num_bags, settings["bags"]), settings["programs"] // num_tables))
    partial = torch.empty(num_tables, programs, rank, dim, dtype=torch.float32, device=device)
    d = torch.empty_like(u)
    info = metadata(factors, table_columns)
    basis_kernel[(programs, num_tables)](
        info,
        u,
        grad,
        d,
        partial,
        lookups.num_bags,
        lookups.target_stride,
        lookups.bag_stride,
        PRECISE=precise,
        BLOCK_N=settings["bags"],
        num_warps=_warps(settings, next_power_of_2(rank) * next_power_of_2(dim), 8 * 128),
        num_stages=1,
        **_sizes(factors, "DIM", "BLOCK_R", "BLOCK_D"),
    )
    num_rows = num_tables * num_lookups if by_lookup else sum(table[0].shape[0] for table in factors)
    make = torch.empty if by_lookup else torch.zeros
    d_left, d_right = make(2, num_rows, columns, dtype=torch.float32, device=device).unbind(0)
    d_scale = torch.empty(num_lookups, dtype=torch.float32, device=device) if needs_scale else None
    values = lookups.values
    with beside(device) as scatter:
        programs = max(1, min(ceil_div(num_lookups, SCATTER["lookups"]), SCATTER["programs"] // num_tables))
        scatter_kernel[(programs, num_tables)](
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
    d_basis = partial.sum(1)
    scatter.join()
    return Gradients(d_left, d_right, d_basis, d_scale)


def sum_by_row(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """[num_rows, C]: gradients of lookups added up by row, in a fixed order, by the row update w -= -1 * g from 0."""
    from holdall.kernels.row_update_triton import update_rows

    total = torch.zeros(num_rows, rows.shape[1], dtype=torch.float32, device=rows.device)
    update_rows(UpdateRule.SGD, total, [], RowGradient(index, rows), UpdateScalars(lr=-1.0))
    return total
