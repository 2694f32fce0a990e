"""The dot interaction of DLRM: every pair of vectors of a sample, multiplied.

Shapes: B samples, V vectors of D numbers each (the dense vector first), P = V * (V - 1) / 2 pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def dot_interaction_reference(vectors_BVD: Tensor) -> Tensor:
    """`dot_interaction`, said plainly: [x, z_10, z_20, z_21, z_30, ...] with z_ij = v_i . v_j and x = v_0."""
    products_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
    row, column = torch.tril_indices(vectors_BVD.shape[1], vectors_BVD.shape[1], -1)
    return torch.cat([vectors_BVD[:, 0], products_BVV[:, row, column]], dim=1)


def dot_interaction(vectors_BVD: Tensor) -> Tensor:
    """[B, D + P]: the first vector, then the products of all pairs below the diagonal, row by row.

    Forward B*V*V*D multiply-adds, backward as many again: one batched product each, because the gradient of the
    products is kept as the full symmetric matrix.
    """
    return _DotInteraction.apply(vectors_BVD)


_PAIRS: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}


def _pair_indices(num_vectors: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where pair p lies in the flattened V x V matrix, and which pair (P for none) each cell of that matrix holds."""
    if (num_vectors, device) not in _PAIRS:
        _PAIRS[num_vectors, device] = _make_pair_indices(num_vectors, device)
    return _PAIRS[num_vectors, device]


def _make_pair_indices(num_vectors: int, device: torch.device) -> tuple[Tensor, Tensor]:
    row, column = torch.tril_indices(num_vectors, num_vectors, -1)
    num_pairs = row.numel()
    cell_of_pair = row * num_vectors + column
    pair_of_cell = torch.full((num_vectors * num_vectors,), num_pairs)
    pair_of_cell[cell_of_pair] = torch.arange(num_pairs)
    pair_of_cell[column * num_vectors + row] = torch.arange(num_pairs)
    return cell_of_pair.to(device), pair_of_cell.to(device)


class _DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors_BVD: Tensor) -> Tensor:
        size, num_vectors, dim = vectors_BVD.shape
        cell_of_pair, _ = _pair_indices(num_vectors, vectors_BVD.device)
        products = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2)).view(size, -1)
        output = vectors_BVD.new_empty(size, dim + cell_of_pair.numel())
        output[:, :dim] = vectors_BVD[:, 0]
        output[:, dim:] = products.index_select(1, cell_of_pair)
        ctx.save_for_backward(vectors_BVD)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (vectors_BVD,) = ctx.saved_tensors
        size, num_vectors, dim = vectors_BVD.shape
        _, pair_of_cell = _pair_indices(num_vectors, vectors_BVD.device)
        # A last column of zeros stands for the diagonal, which is not among the pairs.
        padded = torch.nn.functional.pad(grad[:, dim:], (0, 1))
        grad_products = padded.index_select(1, pair_of_cell).view(size, num_vectors, num_vectors)
        grad_vectors = torch.bmm(grad_products, vectors_BVD)
        grad_vectors[:, 0] += grad[:, :dim]
        return grad_vectors
