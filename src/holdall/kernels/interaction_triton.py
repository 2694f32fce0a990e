"""Dot interaction in Triton, forward and backward: one program a sample, no V x V matrix in memory.

Shapes: B samples, V vectors of D numbers (the first may come from another tensor than the rest), P = V(V - 1)/2 pairs.
A program loads its sample's V x D tile, multiplies it by its own transpose on the matrix units, and writes only the
pairs below the diagonal; the backward rebuilds the symmetric V x V gradient in registers. With `rows`, the vectors are
read from the tables' storage and never written.

Bytes, in 2-byte numbers: 2 * (V * D + D + P) a sample forward, twice that backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdall.kernels.interaction import interaction_width
from holdall.kernels.launch_sizes import next_power_of_2

ELEMENTS_A_WARP = 4096
"""One warp for a sample of 32 x 128. V=27, D=128, bf16, B=65,536 on an H200: forward 0.13 ms with 1 warp, 0.22 with 2,
0.48 with 4 (products change hands between warps); backward 0.26 ms with 1, 0.31 with 2, 0.28 with 4."""


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    first, vectors, others, rows, sample, num_vectors, dim, COMPUTE: tl.constexpr, HAS_FIRST: tl.constexpr,
    GATHER: tl.constexpr, TWO: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A sample's vectors [BLOCK_V, BLOCK_D], zeros where there are none."""
    vector = tl.arange(0, BLOCK_V)
    column = tl.arange(0, BLOCK_D)
    skipped = 1 if HAS_FIRST else 0
    given = (vector >= skipped) & (vector < num_vectors)
    place = sample * (num_vectors - skipped) + vector - skipped
    if GATHER:
        place = tl.load(rows + place, mask=given, other=0).to(tl.int64)
    mask = given[:, None] & (column < dim)[None, :]
    if TWO:
        base = tl.where(place < 0, others, vectors)
        place = tl.where(place < 0, -1 - place, place)
        tile = tl.load(base[:, None] + place[:, None] * dim + column[None, :], mask=mask, other=0.0).to(COMPUTE)
    else:
        tile = tl.load(vectors + place[:, None] * dim + column[None, :], mask=mask, other=0.0).to(COMPUTE)
    if HAS_FIRST:
        head = tl.load(first + sample * dim + column, mask=column < dim, other=0.0).to(COMPUTE)
        tile = tl.where((vector == 0)[:, None], head[None, :], tile)
    return tile


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    first, vectors, others, rows, out, num_vectors, dim, width, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    HAS_FIRST: tl.constexpr, GATHER: tl.constexpr, TWO: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    tile = _tile(
        first, vectors, others, rows, sample, num_vectors, dim, COMPUTE, HAS_FIRST, GATHER, TWO, BLOCK_V, BLOCK_D
    )  # fmt: skip
    products = tl.dot(tile, tl.trans(tile), input_precision=PRECISION)
    out += sample * width
    vector = tl.arange(0, BLOCK_V)
    column = tl.arange(0, BLOCK_D)
    head = tl.sum(tl.where((vector == 0)[:, None], tile, 0.0).to(tl.float32), axis=0)
    tl.store(out + column, head.to(out.dtype.element_ty), mask=column < dim)
    i = vector[:, None]
    j = vector[None, :]
    tl.store(out + dim + i * (i - 1) // 2 + j, products.to(out.dtype.element_ty), mask=(j < i) & (i < num_vectors))
    padding = dim + num_vectors * (num_vectors - 1) // 2 + tl.arange(0, 8)
    tl.store(out + padding, tl.zeros([8], dtype=out.dtype.element_ty), mask=padding < width)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    first, vectors, rows, grad, grad_first, grad_vectors, num_vectors, dim, width, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, HAS_FIRST: tl.constexpr, GATHER: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    tile = _tile(
        first, vectors, vectors, rows, sample, num_vectors, dim, COMPUTE, HAS_FIRST, GATHER, False, BLOCK_V, BLOCK_D
    )  # fmt: skip
    grad += sample * width
    vector = tl.arange(0, BLOCK_V)
    column = tl.arange(0, BLOCK_D)
    higher = tl.maximum(vector[:, None], vector[None, :])
    lower = tl.minimum(vector[:, None], vector[None, :])
    pairs = (higher != lower) & (higher < num_vectors)
    grad_products = tl.load(grad + dim + higher * (higher - 1) // 2 + lower, mask=pairs, other=0.0).to(COMPUTE)
    result = tl.dot(grad_products, tile, input_precision=PRECISION)
    head = tl.load(grad + column, mask=column < dim, other=0.0).to(tl.float32)
    result += tl.where((vector == 0)[:, None], head[None, :], 0.0)
    skipped = 1 if HAS_FIRST else 0
    if HAS_FIRST:
        mask = (vector == 0)[:, None] & (column < dim)[None, :]
        place = grad_first + sample * dim + column[None, :] + tl.zeros([BLOCK_V, 1], dtype=tl.int64)
        tl.store(place, result.to(grad_first.dtype.element_ty), mask=mask)
    given = (vector >= skipped) & (vector < num_vectors)
    place = sample * (num_vectors - skipped) + vector - skipped
    mask = given[:, None] & (column < dim)[None, :]
    place = grad_vectors + place[:, None] * dim + column[None, :]
    tl.store(place, result.to(grad_vectors.dtype.element_ty), mask=mask)


_COMPUTE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _sizes(num_vectors: int, dim: int, dtype: torch.dtype) -> dict[str, object]:
    block_v, block_d = (max(16, next_power_of_2(size)) for size in (num_vectors, dim))
    return {
        "COMPUTE": _COMPUTE[dtype],
        "PRECISION": "ieee",  # for float32; other types are multiplied as they are
        "BLOCK_V": block_v,
        "BLOCK_D": block_d,
        "num_warps": max(1, block_v * block_d // ELEMENTS_A_WARP),
    }


def forward(
    first: Tensor | None, vectors: Tensor, rows: Tensor | None, out: Tensor, others: Tensor | None = None
) -> None:
    """Write the interaction [B, width] of `first` [B, D] and `vectors` [B, V', D], or of rows [B, V'] of a storage.

    With `others` [.., D], of the storage's type, row -1 - k is row k of that.
    """
    assert others is None or others.dtype == vectors.dtype
    size, num_rest = (vectors if rows is None else rows).shape[:2]
    num_vectors, dim = num_rest + (first is not None), vectors.shape[-1]
    if size == 0:
        return
    _forward_kernel[(size,)](
        vectors if first is None else first,
        vectors,
        vectors if others is None else others,
        vectors if rows is None else rows,
        out,
        num_vectors,
        dim,
        out.shape[1],
        HAS_FIRST=first is not None,
        GATHER=rows is not None,
        TWO=others is not None,
        **_sizes(num_vectors, dim, out.dtype),
    )


def backward(
    first: Tensor | None, vectors: Tensor, grad: Tensor, grad_first: Tensor | None, grad_vectors: Tensor
) -> None:
    """Write the gradients of `first` and `vectors` for a gradient [B, width] of the output."""
    size, num_rest, dim = vectors.shape
    num_vectors = num_rest + (first is not None)
    if size == 0:
        return
    _backward_kernel[(size,)](
        vectors if first is None else first,
        vectors,
        vectors,
        grad,
        grad_vectors if grad_first is None else grad_first,
        grad_vectors,
        num_vectors,
        dim,
        grad.shape[1],
        HAS_FIRST=first is not None,
        GATHER=False,
        **_sizes(num_vectors, dim, vectors.dtype),
    )


# Custom operators, so that torch.compile does not trace into them.


@torch.library.custom_op(
    "holdall::dot_interaction", mutates_args=(), schema="(Tensor? first, Tensor vectors) -> Tensor"
)
def dot_interaction(first: Tensor | None, vectors: Tensor) -> Tensor:
    width = interaction_width(vectors.shape[1] + (first is not None), vectors.shape[2])
    out = vectors.new_empty(vectors.shape[0], width)
    forward(None if first is None else first.contiguous(), vectors.contiguous(), None, out)
    return out


@dot_interaction.register_fake
def _(first: Tensor | None, vectors: Tensor) -> Tensor:
    width = interaction_width(vectors.shape[1] + (first is not None), vectors.shape[2])
    return vectors.new_empty(vectors.shape[0], width)


@torch.library.custom_op(
    "holdall::dot_interaction_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor? first, Tensor vectors) -> (Tensor, Tensor)",
)
def dot_interaction_backward(grad: Tensor, first: Tensor | None, vectors: Tensor) -> tuple[Tensor, Tensor]:
    vectors = vectors.contiguous()
    grad_vectors = torch.empty_like(vectors)
    grad_first = (
        vectors.new_empty(0) if first is None else torch.empty_like(first, memory_format=torch.contiguous_format)
    )
    head = None if first is None else first.contiguous()
    backward(head, vectors, grad.contiguous(), None if first is None else grad_first, grad_vectors)
    return grad_first, grad_vectors


@dot_interaction_backward.register_fake
def _(grad: Tensor, first: Tensor | None, vectors: Tensor) -> tuple[Tensor, Tensor]:
    grad_first = (
        vectors.new_empty(0) if first is None else torch.empty_like(first, memory_format=torch.contiguous_format)
    )
    return grad_first, torch.empty_like(vectors, memory_format=torch.contiguous_format)


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor | None, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)  # type: ignore[arg-type]


def _gradient(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    first, vectors = ctx.saved_tensors  # type: ignore[attr-defined]
    grad_first, grad_vectors = dot_interaction_backward(grad, first, vectors)
    return None if first is None else grad_first, grad_vectors


dot_interaction.register_autograd(_gradient, setup_context=_setup)


@torch.library.custom_op(
    "holdall::dot_interaction_of_rows",
    mutates_args=(),
    schema="(Tensor? first, Tensor storage, Tensor rows, Tensor? others, ScalarType dtype) -> Tensor",
)
def dot_interaction_of_rows(
    first: Tensor | None, storage: Tensor, rows: Tensor, others: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`dot_interaction` of `storage[rows]` (of `others[-1 - rows]` where negative), without a gradient."""
    width = interaction_width(rows.shape[1] + (first is not None), storage.shape[1])
    out = storage.new_empty(rows.shape[0], width, dtype=dtype)
    forward(None if first is None else first.contiguous(), storage, rows.contiguous(), out, others)
    return out


@dot_interaction_of_rows.register_fake
def _(first: Tensor | None, storage: Tensor, rows: Tensor, others: Tensor | None, dtype: torch.dtype) -> Tensor:
    width = interaction_width(rows.shape[1] + (first is not None), storage.shape[1])
    return storage.new_empty(rows.shape[0], width, dtype=dtype)
