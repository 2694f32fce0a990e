"""Dot interaction of DLRM: the products of every pair of vectors of a sample.

Shapes: B samples, V vectors of D numbers each (the dense vector first), P = V * (V - 1) / 2 pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdall.common.eager import transforms
from holdall.kernels.dispatch import Path, takes_triton

ALIGNMENT = 8
"""The output's width is a multiple of this: the matrix units of a GPU need it in bf16, and on a CPU with AVX2 the
gradient of a 2048 x 368 input takes 4.1 ms where that of 2048 x 367 takes 4.6 to 5.5 (512 outputs, two cores)."""


def interaction_width(num_vectors: int, dim: int) -> int:
    """Numbers in the output for V vectors of D numbers: D + V * (V - 1) / 2, rounded up."""
    width = dim + num_vectors * (num_vectors - 1) // 2
    return -(-width // ALIGNMENT) * ALIGNMENT


def dot_interaction_reference(vectors_BVD: Tensor) -> Tensor:
    """Reference of `dot_interaction`: [x, z_10, z_20, z_21, z_30, ..., 0] with z_ij = v_i . v_j and x = v_0."""
    num_vectors, dim = vectors_BVD.shape[1:]
    products_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
    row, column = torch.tril_indices(num_vectors, num_vectors, -1)
    output = torch.cat([vectors_BVD[:, 0], products_BVV[:, row, column]], dim=1)
    return torch.nn.functional.pad(output, (0, interaction_width(num_vectors, dim) - output.shape[1]))


def dot_interaction(vectors_BVD: Tensor, first_BD: Tensor | None = None, *, path: Path | None = None) -> Tensor:
    """[B, interaction_width]: the first vector, the products of all pairs below the diagonal row by row, then zeros.

    `first_BD`, when given, is concatenated before the others, in their type.

    Forward B*V*V*D multiply-adds, backward as many again: one batched product each, because the gradient of the
    products is kept as the full symmetric matrix. On a GPU one fused kernel each way (`interaction_triton`).
    """
    num_vectors = vectors_BVD.shape[1] + (first_BD is not None)
    if takes_triton("dot_interaction", vectors_BVD, path, fits=_fits(num_vectors, vectors_BVD)):
        from holdall.kernels import interaction_triton

        if torch.is_autocast_enabled(vectors_BVD.device.type):
            vectors_BVD = vectors_BVD.to(torch.get_autocast_dtype(vectors_BVD.device.type))
        first_BD = None if first_BD is None else first_BD.to(vectors_BVD.dtype)
        return interaction_triton.dot_interaction(first_BD, vectors_BVD)
    if first_BD is not None:
        vectors_BVD = torch.cat([first_BD[:, None].to(vectors_BVD.dtype), vectors_BVD], dim=1)
    return dot_interaction_reference(vectors_BVD) if transforms() else _DotInteraction.apply(vectors_BVD)


def dot_interaction_of_rows(
    storage_RD: Tensor,
    rows_BF: Tensor,
    first_BD: Tensor | None = None,
    others_KD: Tensor | None = None,
    *,
    path: Path | None = None,
) -> Tensor:
    """`dot_interaction(storage[rows], first)`, without a gradient for the storage: for inference.

    On a GPU the kernel that multiplies the rows reads them, and writes them nowhere. With `others`, a second storage of
    the same type, row -1 - k is its row k. The type of the result is that of `first_BD`, or of the storage
    without one.
    """
    dtype = storage_RD.dtype if first_BD is None else first_BD.dtype
    num_vectors = rows_BF.shape[1] + (first_BD is not None)
    if takes_triton("dot_interaction_of_rows", storage_RD, path, fits=_fits(num_vectors, storage_RD)):
        from holdall.kernels import interaction_triton

        return interaction_triton.dot_interaction_of_rows(first_BD, storage_RD, rows_BF, others_KD, dtype)
    vectors = torch.nn.functional.embedding(rows_BF.clamp(min=0), storage_RD)
    if others_KD is not None:
        from_others = torch.nn.functional.embedding((-1 - rows_BF).clamp(min=0), others_KD)
        vectors = torch.where((rows_BF < 0).unsqueeze(-1), from_others, vectors)
    return dot_interaction(vectors.to(dtype), first_BD, path=path)


def _fits(num_vectors: int, vectors: Tensor) -> bool:
    """Whether a sample of this shape fits into the registers of the fused kernel."""
    return num_vectors <= 64 and 0 < vectors.shape[-1] <= 256 and vectors.dtype in _FUSED_TYPES


_FUSED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


_PAIRS: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}


def _pair_indices(num_vectors: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Position of pair p in the flattened V x V matrix, and the pair of each cell of it (any, on the diagonal)."""
    if (num_vectors, device) not in _PAIRS:
        if torch.compiler.is_compiling():  # tensors of a trace have no values, and must not be kept
            return _make_pair_indices(num_vectors, device)
        _PAIRS[num_vectors, device] = _make_pair_indices(num_vectors, device)
    return _PAIRS[num_vectors, device]


def _make_pair_indices(num_vectors: int, device: torch.device) -> tuple[Tensor, Tensor]:
    row, column = torch.tril_indices(num_vectors, num_vectors, -1)
    num_pairs = row.numel()
    cell_of_pair = row * num_vectors + column
    pair_of_cell = torch.zeros(num_vectors * num_vectors, dtype=torch.int64)
    pair_of_cell[cell_of_pair] = torch.arange(num_pairs)
    pair_of_cell[column * num_vectors + row] = torch.arange(num_pairs)
    return cell_of_pair.to(device), pair_of_cell.to(device)


class _DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors_BVD: Tensor) -> Tensor:
        size, num_vectors, dim = vectors_BVD.shape
        cell_of_pair, _ = _pair_indices(num_vectors, vectors_BVD.device)
        products = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2)).view(size, -1)
        pairs = products.index_select(1, cell_of_pair)
        zeros = vectors_BVD.new_zeros(size, interaction_width(num_vectors, dim) - dim - pairs.shape[1])
        output = torch.cat([vectors_BVD[:, 0], pairs.to(vectors_BVD.dtype), zeros], dim=1)
        ctx.save_for_backward(vectors_BVD)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (vectors_BVD,) = ctx.saved_tensors
        size, num_vectors, dim = vectors_BVD.shape
        _, pair_of_cell = _pair_indices(num_vectors, vectors_BVD.device)
        # The diagonal is not among the pairs: its cells get any pair's gradient, and are then set to zero. (A single
        # vector has no pair at all.)
        column_of_cell = (pair_of_cell + dim).clamp_(max=grad.shape[1] - 1)
        grad_products = grad.index_select(1, column_of_cell).view(size, num_vectors, num_vectors)
        grad_products.diagonal(dim1=1, dim2=2).zero_()
        grad_vectors = torch.bmm(grad_products, vectors_BVD)
        grad_vectors[:, 0] += grad[:, :dim]
        return grad_vectors
