"""Fit of a Frobenius-product table to given rows, by alternating least squares over blocks of rows.

Seen as a tensor X[i1, i2, d] (q x q x dim, the id being i1*q + i2), the table is a block-term decomposition

    X[i1, i2, :] ~ sum_c (sum_k A[c, i1, k] B[c, i2, k]) W[c, :]

in `rank` terms of multilinear rank (terms, terms, 1) (De Lathauwer, 2008). Given two of A, B, W the third is a linear
least-squares problem with a normal matrix of at most rank*terms columns. The result depends on the start, so the start
is searched where sweeps cost little: the tensor is projected onto its leading subspaces in all three modes (a truncated
Tucker decomposition), the small core is fitted from several starts, and the best is refined on all rows.

Cells of the grid without a row are left out of every sum. All sums are float64; a pass over the rows keeps one block of
them and its products with the factors. There are 3 passes, and 2 for every sweep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.tables.fitting import BLOCK_NUMBERS
from holdall.tables.method import require

CORE = 1 << 12  # columns of the projected unfoldings, [q, CORE] float64: bounds the memory of large settings
STARTS = 4  # of the core: leading directions, then random ones; the first suffices for nine planted tables of ten
CORE_SWEEPS = 200
CONVERGED = 1e-7  # relative error below which a fit stops: the sums of squares cancel at about 1e-8


@dataclass(frozen=True)
class Factors:
    """A and B [rank, side, terms] and W [rank, dim], float64, with the relative error after every sweep."""

    A: Tensor
    B: Tensor
    W: Tensor
    errors: list[float] = field(default_factory=list)


class Grid:
    """Rows [num_rows, dim] laid out as a grid of `side` columns, read block by block."""

    def __init__(self, weight: Tensor, side: int, device: torch.device):
        self.weight = weight
        self.side = side
        self.device = device
        self.num_full, self.num_last = divmod(weight.shape[0], side)
        """Filled grid rows, and cells filled in the row after them (0 when there is none)."""
        self.num_used = self.num_full + (self.num_last > 0)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of grid rows, and their cells [m * side, dim] in float64, zero where there is no row."""
        height = max(1, BLOCK_NUMBERS // (self.side * self.weight.shape[1]))
        for start in range(0, self.num_used, height):
            stop = min(start + height, self.num_used)
            cells = self.weight[start * self.side : stop * self.side].detach().to(self.device, torch.float64)
            missing = (stop - start) * self.side - cells.shape[0]
            yield slice(start, stop), F.pad(cells, (0, 0, 0, missing)) if missing else cells

    def slices(self, W: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """As `blocks`, but their projections [c, m, side] on the rows of W [c, dim]."""
        for place, X in self.blocks():
            yield place, (W @ X.t()).reshape(W.shape[0], -1, self.side)


def fit_factors(
    weight: Tensor, side: int, rank: int, terms: int, *, sweeps: int = 50, device: torch.device | None = None
) -> Factors:
    """Factors of the closest table to `weight` [num_rows, dim] that the search finds; the same on every call.

    Computes on `device` (that of `weight` if None), and copies the blocks there one by one.
    """
    device = weight.device if device is None else device
    generator = torch.Generator(device=device).manual_seed(0)
    grid = Grid(weight, side, device)
    core, E, G, V = _tucker(grid, rank, terms, generator)
    small = _fit_core(core, rank, terms, generator)
    return _alternate(grid, Factors(E @ small.A, G @ small.B, small.W @ V), sweeps, patience=1)


def _tucker(grid: Grid, rank: int, terms: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The core [s, R, R] of the tensor in its leading subspaces, and these: E, G [side, R] and V [s, dim].

    V is exact; E comes from a random projection of the second mode, G from the tensor projected on E. A grid row that
    is not filled is left out, since the zeros in it belong to no low-rank tensor; the sweeps use it.
    """
    dim = grid.weight.shape[1]
    options: dict[str, Any] = {"dtype": torch.float64, "device": grid.device}
    gram = torch.zeros(dim, dim, **options)
    for _, X in grid.blocks():
        gram += X.t() @ X
    require(bool(gram.isfinite().all()), "frobenius", "the rows to fit hold NaN or infinity: clean them first")
    V = torch.linalg.eigh(gram).eigenvectors.t().flip(0)[:rank]
    s = V.shape[0]
    R = min(grid.side, rank * terms, max(CORE // s, 8))

    first = torch.zeros(grid.side, s * R, **options)
    probe = torch.randn(grid.side, R, generator=generator, **options)
    for place, Y in grid.slices(V):
        first[place] = (Y @ probe).transpose(0, 1).flatten(1)
    first[max(grid.num_full, 1) :] = 0
    E = _leading(first, R, generator)

    second = torch.zeros(s, R, grid.side, **options)
    for place, Y in grid.slices(V):
        second += E[place].t() @ Y
    G = _leading(second.permute(2, 0, 1).flatten(1), R, generator)
    return second @ G, E, G, V


def _leading(matrix: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Orthonormal columns that span the `count` leading left singular vectors, by subspace iteration."""
    width = count + 8
    if min(matrix.shape) <= width:
        found = torch.linalg.svd(matrix, full_matrices=False).U[:, :count]
        return F.pad(found, (0, count - found.shape[1]))
    probe = torch.randn(matrix.shape[1], width, generator=generator, dtype=matrix.dtype, device=matrix.device)
    basis = torch.linalg.qr(matrix @ probe).Q
    for _ in range(3):
        basis = torch.linalg.qr(matrix @ (matrix.t() @ basis)).Q
    return basis @ torch.linalg.svd(basis.t() @ matrix, full_matrices=False).U[:, :count]


def _fit_core(core: Tensor, rank: int, terms: int, generator: torch.Generator) -> Factors:
    """The best of several starts on the core [s, R, R], each swept until it stops improving."""
    grid = Grid(core.flatten(1).t(), core.shape[2], core.device)
    best: Factors | None = None
    for start in range(STARTS):
        found = _alternate(grid, _start(core, rank, terms, start > 0, generator), CORE_SWEEPS, patience=20)
        if best is None or found.errors[-1] < best.errors[-1]:
            best = found
        if best.errors[-1] < CONVERGED:
            break
    assert best is not None
    return best


def _start(core: Tensor, rank: int, terms: int, random: bool, generator: torch.Generator) -> Factors:
    """W the leading directions (or random ones), and for each the `terms` leading singular pairs of its R x R slice.

    Directions beyond those there are, and pairs beyond R, are small and random: the alternation changes them.
    """
    s, R, _ = core.shape
    options: dict[str, Any] = {"generator": generator, "dtype": core.dtype, "device": core.device}
    W = F.normalize(torch.randn(rank, s, **options), dim=1)
    if not random:
        W[:s] = torch.eye(rank, s, dtype=core.dtype, device=core.device)[:s]
    left, values, right = torch.linalg.svd(torch.einsum("sij,cs->cij", core, W), full_matrices=False)
    num_pairs = min(terms, R)
    size = values[:, None, :num_pairs].sqrt()
    A, B = (torch.randn(rank, R, terms, **options) * (1e-3 * values.max()).sqrt() for _ in range(2))
    A[..., :num_pairs] += left[..., :num_pairs] * size
    B[..., :num_pairs] += right.transpose(1, 2)[..., :num_pairs] * size
    return Factors(A, B, W)


def _alternate(grid: Grid, factors: Factors, sweeps: int, patience: int) -> Factors:
    """At most `sweeps` sweeps; stops when the last `patience` of them gained less than a thousandth of the error."""
    errors: list[float] = []
    for _ in range(sweeps):
        factors, error = _sweep(grid, factors)
        factors = balance(factors)
        errors.append(error)
        if error < CONVERGED or (len(errors) > patience and error > (1 - 1e-3) * errors[-1 - patience]):
            break
    return replace(factors, errors=errors)


def _sweep(grid: Grid, factors: Factors) -> tuple[Factors, float]:
    """A, then B, then W set to their least-squares optimum given the others, and the relative error after it.

    A grid row's A depends on that row alone, so one pass solves A and sums the moments of B; W takes the other.
    """
    A, B, W = factors.A.clone(), factors.B, factors.W
    full, last = grid.num_full, grid.num_last
    mixing = (W @ W.t()).repeat_interleave(A.shape[2], 0).repeat_interleave(A.shape[2], 1)
    normal, normal_last = _gram(B) * mixing, _gram(B[:, :last]) * mixing
    moments = torch.zeros_like(B)
    for place, P in grid.slices(W):
        found = _solve(normal, P @ B, A[:, place])
        if last and place.stop > full:
            found[:, -1:] = _solve(normal_last, P[:, -1:] @ B, A[:, full : full + 1])
        A[:, place] = found
        moments += P.transpose(1, 2) @ found
    A[:, grid.num_used :] = 0
    split = last or grid.side
    upper = _solve(_gram(A) * mixing, moments[:, :split], B[:, :split])
    lower = _solve(_gram(A[:, :full]) * mixing, moments[:, split:], B[:, split:])
    return _solve_basis(grid, A, torch.cat([upper, lower], 1), W)


def _solve_basis(grid: Grid, A: Tensor, B: Tensor, W: Tensor) -> tuple[Factors, float]:
    """W set to its optimum given A and B; the error comes with the sums."""
    normal, moments, total = W.new_zeros(W.shape[0], W.shape[0]), torch.zeros_like(W), 0.0
    for place, X in grid.blocks():
        U = A[:, place] @ B.transpose(1, 2)
        if grid.num_last and place.stop > grid.num_full:
            U[:, -1, grid.num_last :] = 0
        U = U.flatten(1)
        normal += U @ U.t()
        moments += U @ X
        total += float(X.flatten() @ X.flatten())
    W = _solve(normal, moments.unsqueeze(2), W.unsqueeze(2)).squeeze(2)
    squared = total - 2 * float((moments * W).sum()) + float((normal * (W @ W.t())).sum())
    return Factors(A, B, W), (max(squared, 0.0) / total) ** 0.5 if total else 0.0


def _gram(factor: Tensor) -> Tensor:
    """Products [rank*terms, rank*terms] of the columns of a factor [rank, rows, terms]."""
    columns = factor.transpose(1, 2).flatten(0, 1)
    return columns @ columns.t()


def _solve(normal: Tensor, moments: Tensor, old: Tensor) -> Tensor:
    """The factor x that minimises x'Nx - 2 m'x + e |x - old|^2 for every row of moments m [rank, rows, terms].

    The tiny e keeps singular systems solvable, and never lets the error grow.
    """
    e = 1e-9 * normal.diagonal().mean() + torch.finfo(normal.dtype).tiny
    damped = normal + e * torch.eye(normal.shape[0], dtype=normal.dtype, device=normal.device)
    target = (moments + e * old).transpose(1, 2)
    found = torch.linalg.solve(damped, target.flatten(0, 1))
    return found.reshape(target.shape).transpose(1, 2)


def balance(factors: Factors) -> Factors:
    """The same table with its scale spread evenly over the factors: A[c, :, k] as large as B[c, :, k] and W[c].

    Training moves factors of equal size at the same rate; an uneven split costs more AUC than the choice of method. A
    term that the fit does not use is the exception: A alone is small, so that A can still learn.
    """
    tiny = torch.finfo(factors.W.dtype).tiny ** 0.25
    a, b = (factor.square().mean(1, keepdim=True).sqrt().clamp(min=tiny) for factor in (factors.A, factors.B))
    w = factors.W.square().mean(1)[:, None, None].sqrt().clamp(min=tiny)
    product = a * b * w
    floor = 0.1 * product.mean() ** (1 / 3)
    w_new = product.mean(2, keepdim=True).pow(1 / 3).clamp(min=floor)
    b_new = (product / w_new).sqrt().clamp(min=floor)
    a_new = product / (w_new * b_new)
    return replace(factors, A=factors.A * (a_new / a), B=factors.B * (b_new / b), W=factors.W * (w_new / w).squeeze(2))
