"""TT-SVD: the tensor train nearest to given rows, up to a factor of sqrt(cores - 1), from a few passes over them.

The rows [num_rows, dim], padded to a full grid, are a tensor of modes (n_1 d_1), ..., (n_N d_N). The first and the last
core are the leading singular vectors of the first and the last unfolding; the tensor projected onto both is small, and
plain truncated SVDs split it into the inner cores.

Where the last row leaves a first digit incomplete, the fit is done twice: to the complete first digits, then to all,
with the rows that are missing taken from the first fit. So rows of a tensor train are fitted exactly whatever its
padding contains (with zeros there they would not have its rank), if the complete digits have that rank.

`weight` may be a tensor over a memory map larger than memory. Memory, in float64, is one block of rows, the Gram
matrices of (n_1 d_1)^2 and (n_N d_N)^2 numbers (past `LARGEST_GRAM` only some vectors), and the projected tensor of
r_1 * n_2 d_2 * ... * n_(N-1) d_(N-1) * r_(N-1) numbers, which for three cores is the inner core itself. 10M rows of
dim 64 at rank 32 take 12 MB and 7 MB beside the block. A fit takes three passes over the rows (two for two cores), the
longest of 2 * num_rows * dim * n d flops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod
from operator import mul

import torch
from torch import Tensor

from holdall.kernels.tensor_train import tensor_train_rows

BLOCK_NUMBERS = 1 << 22
"""Numbers of a block of rows (or one prefix's rows, if more): 32 MB in float64."""

LARGEST_GRAM = 4096
"""Up to this side a Gram matrix is formed and decomposed exactly, 134 MB; beyond it, subspace iteration."""

# Subspace iteration: every step is one pass over the rows and squares the ratio of wanted to unwanted singular values.
STEPS = 6
OVERSAMPLING = 16


def tt_svd(weight: Tensor, sizes: Sequence[int], dims: Sequence[int], rank: int, device: torch.device) -> list[Tensor]:
    """Cores [n_k, r_(k-1), d_k, r_k] in float64 for rows [num_rows, dim], of ranks `rank` or those of `full_ranks`."""
    rows = _Rows(weight, tuple(sizes), tuple(dims), device)
    num_complete, num_left = divmod(rows.num_rows, rows.per_first)
    if num_complete and num_left:
        complete = _Rows(weight[: num_complete * rows.per_first], (num_complete, *sizes[1:]), tuple(dims), device)
        rows.past = _continued(rows, _train(complete, rank), num_complete)
    return _train(rows, rank)


def full_ranks(sizes: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """(r_0, ..., r_N) with which a tensor train represents every table of these factors."""
    before = [1, *accumulate((n * d for n, d in zip(sizes, dims, strict=True)), mul)]
    return tuple(min(left, before[-1] // left) for left in before)


def _continued(rows: _Rows, cores: list[Tensor], digit: int) -> list[Tensor]:
    """A train whose only first digit is `digit`, the incomplete one of the last row, and the others as in `cores`.

    Least squares over the existing rows: a row is linear in the first core.
    """
    rank, first = cores[1].shape[1], rows.dims[0]
    # Rows of this train are the right-hand factors of the slice [d_1, r_1] of the first core.
    unit = torch.eye(rank, dtype=torch.float64, device=rows.device).view(1, 1, rank, rank)
    gram, target = unit.new_zeros(rank, rank), unit.new_zeros(rank, first)
    start = digit * rows.per_first
    step = max(1, BLOCK_NUMBERS // max(rows.dim, rows.dim // first * rank))
    for offset in range(0, rows.num_rows - start, step):
        count = min(step, rows.num_rows - start - offset)
        ids = torch.arange(offset, offset + count, device=rows.device)
        factors = tensor_train_rows(ids, [unit, *cores[1:]]).view(count, rank, -1).transpose(0, 1).reshape(rank, -1)
        values = rows.read([start + offset], count).view(count, first, -1).transpose(0, 1).reshape(first, -1)
        gram.addmm_(factors, factors.T)
        target.addmm_(factors, values.T)
    solution = torch.linalg.pinv(gram, hermitian=True) @ target
    return [solution.T.reshape(1, 1, first, rank), *cores[1:]]


def _train(rows: _Rows, rank: int) -> list[Tensor]:
    sizes, dims, device = rows.sizes, rows.dims, rows.device
    ranks = [min(rank, full) for full in full_ranks(sizes, dims)]
    left = _leading_vectors(rows.first_unfolding, sizes[0] * dims[0], ranks[1], device)
    right = None
    if len(sizes) > 2:
        right = _leading_vectors(rows.last_unfolding, sizes[-1] * dims[-1], ranks[-2], device)
    rest = rows.projected(left, right)

    cores = [left.view(sizes[0], 1, dims[0], ranks[1])]
    for k in range(1, len(sizes) - 2):
        vectors, values, others = torch.linalg.svd(rest.reshape(ranks[k] * sizes[k] * dims[k], -1), full_matrices=False)
        cores.append(_core(vectors[:, : ranks[k + 1]], sizes[k], dims[k]))
        rest = values[: ranks[k + 1], None] * others[: ranks[k + 1]]
    k = len(cores)
    cores.append(_core(rest.reshape(ranks[k] * sizes[k] * dims[k], -1), sizes[k], dims[k]))
    if right is not None:
        cores.append(right.view(sizes[-1], dims[-1], ranks[-2], 1).transpose(1, 2))
    return cores


def _core(matrix: Tensor, size: int, dim: int) -> Tensor:
    """[r*n*d, s] as [n, r, d, s]."""
    return matrix.reshape(-1, size, dim, matrix.shape[1]).transpose(0, 1)


class _Rows:
    """Rows of a table as unfoldings of the tensor, block by block."""

    def __init__(self, weight: Tensor, sizes: tuple[int, ...], dims: tuple[int, ...], device: torch.device):
        self.weight, self.sizes, self.dims, self.device = weight, sizes, dims, device
        self.num_rows, self.dim = weight.shape
        self.per_first = prod(sizes[1:])  # rows that share a first digit
        self.end = -(-self.num_rows // self.per_first) * self.per_first
        self.past: list[Tensor] | None = None
        """The train of one first digit that continues the rows up to `end`; zeros when None."""

    def read(self, starts: Sequence[int], length: int) -> Tensor:
        """Rows [start, start + length) for every start, [len(starts), length, dim]."""
        block = torch.zeros(len(starts), length, self.dim, dtype=torch.float64, device=self.device)
        for index, start in enumerate(starts):
            if start < self.num_rows:
                rows = self.weight[start : start + length].detach()
                block[index, : len(rows)] = rows.to(self.device, torch.float64)
            first, end = max(start, self.num_rows), min(start + length, self.end)
            if self.past is not None and first < end:
                ids = torch.arange(first, end, device=self.device) % self.per_first
                block[index, first - start : end - start] = tensor_train_rows(ids, self.past)
        return block

    def first_unfolding(self) -> Iterator[Tensor]:
        """Columns of the matrix [n_1 d_1, all others]."""
        step = max(1, BLOCK_NUMBERS // (self.sizes[0] * self.dim))
        for offset in range(0, self.per_first, step):
            starts = [first * self.per_first + offset for first in range(self.sizes[0])]
            block = self.read(starts, min(step, self.per_first - offset))
            block = block.view(*block.shape[:2], self.dims[0], -1).transpose(1, 2)
            yield block.reshape(self.sizes[0] * self.dims[0], -1)

    def last_unfolding(self) -> Iterator[Tensor]:
        """Rows of the matrix [all others, n_N d_N], transposed."""
        last = self.sizes[-1]
        step = max(1, BLOCK_NUMBERS // (last * self.dim)) * last
        for start in range(0, self.end, step):
            block = self.read([start], step).view(-1, last, self.dim // self.dims[-1], self.dims[-1])
            yield block.permute(1, 3, 0, 2).reshape(last * self.dims[-1], -1)

    def projected(self, left: Tensor, right: Tensor | None) -> Tensor:
        """The tensor times `left` [n_1 d_1, r_1] and `right` [n_N d_N, r_(N-1)]: [r_1, n_2 d_2, ..., r_(N-1)]."""
        first, last, dims = self.dims[0], self.sizes[-1], self.dims
        num_prefixes = self.per_first // last  # of inner digits
        inner = prod(dims[1:-1])
        num_right = last * dims[-1] if right is None else right.shape[1]
        result = left.new_zeros(left.shape[1], num_prefixes, inner, num_right)
        step = max(1, BLOCK_NUMBERS // (last * self.dim))
        for digit, vectors in enumerate(left.view(self.sizes[0], first, -1)):
            for offset in range(0, num_prefixes, step):
                count = min(step, num_prefixes - offset)
                block = self.read([digit * self.per_first + offset * last], count * last)
                block = block.view(count, last, first * inner, dims[-1]).transpose(1, 2).reshape(-1, last * dims[-1])
                if right is not None:
                    block = block @ right
                block = block.view(count, first, -1).transpose(0, 1).reshape(first, -1)
                result[:, offset : offset + count] += (vectors.T @ block).view(-1, count, inner, num_right)
        # [r_1, n_2, n_3, ..., d_2, d_3, ..., r]: bring every n_k and d_k together.
        count = len(self.sizes) - 2
        order = [0, *(axis for k in range(count) for axis in (1 + k, 1 + count + k)), 2 * count + 1]
        shape = (left.shape[1], *self.sizes[1:-1], *dims[1:-1], num_right)
        return result.view(shape).permute(order)


def _leading_vectors(blocks: Callable[[], Iterator[Tensor]], size: int, rank: int, device: torch.device) -> Tensor:
    """The `rank` leading left singular vectors [size, rank] of a matrix given as blocks of columns."""
    if size <= LARGEST_GRAM:
        gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        for block in blocks():
            gram.addmm_(block, block.T)
        return torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1).contiguous()
    count = min(size, rank + OVERSAMPLING)
    generator = torch.Generator(device).manual_seed(0)
    basis = torch.randn(size, count, dtype=torch.float64, device=device, generator=generator)
    for _ in range(STEPS):
        basis = torch.linalg.qr(basis).Q
        image = torch.zeros_like(basis)
        for block in blocks():
            image.addmm_(block, block.T @ basis)
        basis = image
    return torch.linalg.svd(basis, full_matrices=False).U[:, :rank].contiguous()
