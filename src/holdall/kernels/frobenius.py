"""Rows and pooled rows of a Frobenius-product (FPD) table: one gather, a multiply-add and one matrix product.

    i = i1 * q + i2,    u[i] = sum_k A[i1, k, :] * B[i2, k, :],    row[i] = u[i] @ basis

A row is linear in u, so a bag pools u (r numbers a lookup) and multiplies by the basis once a bag; and duplicate ids
are cheaper to compute twice than to find, since sorting the ids costs as much as all gathers and products.

L lookups, N bags, q = side of the grid of ids, p terms, r rank. `factors` [2*q, p*r] holds A in its first q rows and B
in the others, so that one gather and one sum of gradients serve both; columns are term-major. `basis` is [r, dim]. A
lookup costs 2*p*r flops and reads 2*p*r numbers; a bag costs 2*r*dim flops.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def frobenius_rows(factors: Tensor, basis: Tensor, ids: Tensor, *, fast: bool = True) -> Tensor:
    """Rows [L, dim] of 1-D int64 ids, differentiable in factors and basis; `fast=False` is the plain reference."""
    return frobenius_bags(factors, basis, ids, None, fast=fast)


def frobenius_bags(
    factors: Tensor,
    basis: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    scale: Tensor | None = None,
    *,
    fast: bool = True,
) -> Tensor:
    """Sums [N, dim] of the rows of 1-D int64 ids over bags, each row times its `scale` [L] when given.

    `offsets` [N + 1] holds the start of every bag and the end of the last, or is None when every bag is one id.
    Differentiable in factors, basis and `scale`. Computes in the type of the factors, also under autocast: like an
    embedding, and so that the backward meets the types that the forward had.
    """
    if torch.is_autocast_enabled(ids.device.type):
        with torch.autocast(ids.device.type, enabled=False):
            return frobenius_bags(factors, basis, ids, offsets, scale, fast=fast)
    if not fast:
        return frobenius_bags_reference(factors, basis, ids, offsets, scale)
    return _Bags.apply(factors, basis, ids, offsets, scale)


def frobenius_bags_reference(
    factors: Tensor, basis: Tensor, ids: Tensor, offsets: Tensor | None, scale: Tensor | None
) -> Tensor:
    """The formula as it is written: every row, then every bag, with autograd's own gradient."""
    A, B = factors.unflatten(1, (-1, basis.shape[0])).chunk(2)
    side = A.shape[0]
    rows = (A[ids // side] * B[ids % side]).sum(1) @ basis
    if scale is not None:
        rows = rows * scale.unsqueeze(1)
    if offsets is None:
        return rows
    return rows.new_zeros(offsets.numel() - 1, rows.shape[1]).index_add(0, bag_of(offsets, ids.numel()), rows)


def bag_of(offsets: Tensor, num_lookups: int) -> Tensor:
    """The bag [L] of every lookup, for offsets [N + 1]."""
    bags = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(bags, offsets.diff(), output_size=num_lookups)


class _Bags(torch.autograd.Function):
    """The reference with u pooled before the product, and a backward by hand whose arrays are all contiguous.

    With g [N, dim] the gradient of the bags and v [N, r] the pooled u: d_basis = v^T g, and with d = g basis^T of a
    lookup's bag, times its scale: d_A[i1] += d * b and d_B[i2] += d * a for every term, with a, b the gathered rows.
    """

    @staticmethod
    def forward(
        ctx: Any, factors: Tensor, basis: Tensor, ids: Tensor, offsets: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        side = factors.shape[0] // 2
        i1 = ids // side  # int64 throughout: exact for any number of rows
        places = torch.cat([i1, ids.sub(i1, alpha=side).add_(side)])  # ids - i1*side: half the time of a remainder
        gathered = factors.index_select(0, places)
        a, b = gathered.chunk(2)
        pooled = _sum_terms(a * b, basis.shape[0])
        if offsets is not None:
            pooled = _pool(pooled, offsets, scale)
        elif scale is not None:
            pooled.mul_(scale.unsqueeze(1))
        ctx.save_for_backward(pooled, places, gathered, basis, offsets, scale)
        ctx.num_rows = 2 * side
        return pooled @ basis

    @staticmethod
    @once_differentiable  # what was gathered and pooled is saved as a constant: a second derivative would be wrong
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pooled, places, gathered, basis, offsets, scale = ctx.saved_tensors
        need_factors, need_basis, _, _, need_scale = ctx.needs_input_grad
        d_factors = d_scale = None
        d_basis = pooled.t() @ gradient if need_basis else None
        if need_factors or need_scale:
            ab = gathered.unflatten(0, (2, -1))
            d = _repeated_product(gradient, basis, ab.shape[2] // basis.shape[0])
            if offsets is not None:
                d = d.index_select(0, bag_of(offsets, ab.shape[1]))
            if need_scale:
                d_scale = (ab[0] * ab[1]).mul_(d).sum(1)
            if scale is not None:
                d = d * scale.unsqueeze(1)
            if need_factors:
                i1, i2 = places.chunk(2)
                d_factors = _sum_rows((ab * d).flatten(0, 1), torch.cat([i2, i1]), ctx.num_rows)
        return d_factors, d_basis, None, None, d_scale


def _sum_terms(products: Tensor, rank: int) -> Tensor:
    """u [L, r] from the products [L, p*r] of all terms, which it overwrites.

    Adding halves onto each other keeps the inner loops long: 2 to 4 times faster than a sum over the middle of
    [L, p, r] from 4,096 lookups on.
    """
    while (num_terms := products.shape[1] // rank) > 1:
        half = num_terms // 2 * rank
        products[:, :half].add_(products[:, -half:])
        products = products[:, :-half]
    return products


def _repeated_product(gradient: Tensor, basis: Tensor, num_terms: int) -> Tensor:
    """`gradient @ basis.T`, [N, r], repeated for every term: [N, p*r].

    Copies cost less than a broadcast in the products that follow, and matrix products of fewer than 16 columns run at
    a fraction of the speed, so some copies come from repeating the basis. With the two products that follow, at
    N=4,096, p=4, r=8, dim 64 on two cores: 98 us; all copies from the basis 126; a broadcast 218.
    """
    in_product = math.gcd(num_terms, max(1, 16 // basis.shape[0]))
    once = gradient @ torch.cat([basis] * in_product).t()
    return torch.cat([once] * (num_terms // in_product), 1)


def _pool(u: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    """Sums [N, r] of u [L, r] over bags, outside of autograd."""
    if u.shape[0] == 0:  # embedding_bag wants a table of at least one row
        return u.new_zeros(offsets.numel() - 1, u.shape[1])
    places = torch.arange(u.shape[0], device=u.device)
    return F.embedding_bag(places, u, offsets, mode="sum", per_sample_weights=scale, include_last_offset=True)


def _sum_rows(rows: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Dense [num_rows, columns] with `rows` added at `places`; many lookups share a row, so halves sum in float32.

    index_add_ is as fast as sorting and summing segments at 2,000 rows of 32 columns and 5 times faster at 15,000.
    """
    sums = rows.dtype if rows.dtype in (torch.float32, torch.float64) else torch.float32
    total = torch.zeros(num_rows, rows.shape[1], dtype=sums, device=rows.device)
    return total.index_add_(0, places, rows.to(sums)).to(rows.dtype)
