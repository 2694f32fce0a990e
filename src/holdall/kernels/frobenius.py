"""Rows and pooled rows of a Frobenius-product (FPD) table: two gathers, a multiply-add and one matrix product.

    i = i1 * q + i2,    u[i] = sum_k left[i1, k, :] * right[i2, k, :],    row[i] = u[i] @ basis

A row is linear in u, so a bag pools u (r numbers a lookup) and multiplies by the basis once. Duplicate ids are computed
twice: to find them, a sort of the ids costs as much as all gathers and products.

L lookups, N bags, q = side of the grid of ids, p terms, r rank. `left` and `right` are [q, p*r], term-major, so that a
gather copies one contiguous row; `basis` is [r, dim]. A lookup costs 2*p*r flops and reads 2*p*r numbers; a bag costs
2*r*dim flops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.common.eager import has_values, transforms
from holdall.kernels.dispatch import INTERPRETED, Path, takes_triton
from holdall.kernels.second_derivative import gradients_of_reference, records_gradients

if TYPE_CHECKING:
    from holdall.kernels import frobenius_triton

Factors = tuple[Tensor, Tensor, Tensor]
"""left [q, p*r], right [q, p*r] and basis [r, dim] of one table."""


def frobenius_bags(
    left: Tensor,
    right: Tensor,
    basis: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    scale: Tensor | None = None,
    *,
    sparse: bool = False,
    fast: bool = True,
    path: Path | None = None,
) -> Tensor:
    """Sums [N, dim] of the rows of 1-D int64 ids over bags, each row times its `scale` [L] when given.

    `offsets` [N + 1] has the start of every bag and the end of the last; None when every bag is one id.
    Differentiable in the factors and in `scale`; with `sparse` the gradients of left and right are sparse, a row for
    each lookup. Computes in the type of the factors, also under autocast, like an embedding: so the backward has the
    types of the forward. On a GPU one kernel each way (`frobenius_triton`).
    """
    if not ids.is_meta and torch.is_autocast_enabled(ids.device.type):
        with torch.autocast(ids.device.type, enabled=False):
            return frobenius_bags(left, right, basis, ids, offsets, scale, sparse=sparse, fast=fast, path=path)
    if not fast or transforms() or not has_values(ids):
        return frobenius_bags_reference(left, right, basis, ids, offsets, scale, sparse)
    if takes_triton("the Frobenius lookup", left, path, fits=fits_triton([(left, right, basis)])):
        return _FusedRows.apply(ids, offsets, scale, sparse, left, right, basis)
    return _Bags.apply(left, right, basis, ids, offsets, scale, sparse)


def frobenius_bags_reference(
    left: Tensor,
    right: Tensor,
    basis: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    scale: Tensor | None,
    sparse: bool = False,
) -> Tensor:
    """Reference by the formula: every row, then every bag, with autograd's own gradient."""
    side, rank = left.shape[0], basis.shape[0]
    a = F.embedding(ids // side, left, sparse=sparse).unflatten(1, (-1, rank))
    b = F.embedding(ids % side, right, sparse=sparse).unflatten(1, (-1, rank))
    rows = (a * b).sum(1) @ basis
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
    lookup's bag, times its scale: d_left[i1] += d * b and d_right[i2] += d * a for every term.
    """

    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        basis: Tensor,
        ids: Tensor,
        offsets: Tensor | None,
        scale: Tensor | None,
        sparse: bool,
    ) -> Tensor:
        side = left.shape[0]
        i1 = ids // side  # int64 throughout: exact for any number of rows
        i2 = ids.sub(i1, alpha=side)  # the remainder, without dividing again
        a, b = left.index_select(0, i1), right.index_select(0, i2)
        pooled = _sum_terms(a * b, basis.shape[0])
        if offsets is not None:
            pooled = _pool(pooled, offsets, scale)
        elif scale is not None:
            pooled.mul_(scale.unsqueeze(1))
        ctx.save_for_backward(pooled, i1, i2, a, b, basis, offsets, scale, left, right)
        ctx.sparse, ctx.row_gradient = sparse, _sparse_rows if sparse else _sum_rows
        ctx.side = side
        return pooled @ basis

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pooled, i1, i2, a, b, basis, offsets, scale, left, right = ctx.saved_tensors
        if records_gradients():
            factors, needed = (left, right, basis), ctx.needs_input_grad
            return _reference_gradients(ctx.sparse, i1 * ctx.side + i2, offsets, scale, factors, needed, gradient)
        need_left, need_right, need_basis, _, _, need_scale, _ = ctx.needs_input_grad
        d_left = d_right = d_scale = None
        d = _repeated_product(gradient, basis, a.shape[1] // basis.shape[0])
        d_basis = pooled.t() @ gradient if need_basis else None  # here, while the gradient is in the cache
        if need_left or need_right or need_scale:
            if offsets is not None:
                d = d.index_select(0, bag_of(offsets, i1.numel()))
            if need_scale:
                d_scale = (a * b).mul_(d).sum(1)
            if scale is not None:
                d.mul_(scale.unsqueeze(1))
            d_left = ctx.row_gradient(d * b, i1, ctx.side) if need_left else None
            d_right = ctx.row_gradient(d.mul_(a), i2, ctx.side) if need_right else None
        return d_left, d_right, d_basis, None, None, d_scale, None


def _reference_gradients(
    sparse: bool,
    ids: Tensor,
    offsets: Tensor | None,
    scale: Tensor | None,
    factors: Factors,
    needed: Sequence[bool],
    gradient: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments of `_Bags` that can be differentiated again."""

    def bags(left: Tensor, right: Tensor, basis: Tensor, scale: Tensor | None) -> Tensor:
        return frobenius_bags_reference(left, right, basis, ids, offsets, scale, sparse)

    wanted = [*needed[:3], needed[5]]
    d_left, d_right, d_basis, d_scale = gradients_of_reference(bags, [*factors, scale], wanted, gradient)
    return d_left, d_right, d_basis, None, None, d_scale, None


def frobenius_rows_many(factors: Sequence[Factors], ids: Tensor, *, path: Path | None = None) -> Tensor:
    """Rows [T, L, dim] of T tables for ids [T, L], a line for each table, in one pass over all of them.

    `factors` are (left, right, basis) of every table; ranks, terms, dims and types must be equal, sides need not. All
    gradients are dense. Forward, backward and SGD of 5 tables of 2 to 10 million rows at (8, 4), 2,048 ids each: 1.71
    ms on one core instead of 2.19 table by table with dim 16, 2.52 instead of 3.04 with dim 64.
    """
    if torch.is_autocast_enabled(ids.device.type):
        with torch.autocast(ids.device.type, enabled=False):
            return frobenius_rows_many(factors, ids, path=path)
    if takes_triton("the Frobenius lookup", factors[0][0], path, fits=fits_triton(factors)):
        return _FusedRows.apply(ids, None, None, False, *(tensor for table in factors for tensor in table))
    return _ManyRows.apply(ids, *(tensor for table in factors for tensor in table))


def _rows_many_reference(factors: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Reference of `frobenius_rows_many`, for the factors of all tables in turn."""
    lines = zip(_by_table(factors), ids, strict=True)
    return torch.stack([frobenius_bags_reference(*table, line, None, None) for table, line in lines])


class _ManyRows(torch.autograd.Function):
    """`_Bags` without bags, with the tables concatenated wherever an operation allows it."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, *factors: Tensor) -> Tensor:
        lefts, rights, bases = factors[::3], factors[1::3], torch.stack(factors[2::3])
        ctx.sides = [left.shape[0] for left in lefts]
        sides = torch.tensor(ctx.sides, device=ids.device).unsqueeze(1)
        i1 = ids // sides
        i2 = ids - i1 * sides
        a, b = (_gather_many(tables, index) for tables, index in ((lefts, i1), (rights, i2)))
        u = _sum_terms((a * b).flatten(0, 1), bases.shape[1]).unflatten(0, ids.shape)
        starts = sides.cumsum(0) - sides
        ctx.save_for_backward(u, (i1 + starts).flatten(), (i2 + starts).flatten(), a, b, bases, ids, *factors)
        return u @ bases

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        u, i1, i2, a, b, bases, ids, *factors = ctx.saved_tensors
        if records_gradients():
            needed = ctx.needs_input_grad[1:]
            return None, *gradients_of_reference(lambda *f: _rows_many_reference(f, ids), factors, needed, gradient)
        d = _repeated_product(gradient, bases, a.shape[2] // bases.shape[1])
        d_bases = u.transpose(1, 2) @ gradient
        d_lefts = _sum_rows((d * b).flatten(0, 1), i1, sum(ctx.sides)).split(ctx.sides)
        d_rights = _sum_rows(d.mul_(a).flatten(0, 1), i2, sum(ctx.sides)).split(ctx.sides)
        by_table = zip(d_lefts, d_rights, d_bases, strict=True)
        return None, *(gradient for table in by_table for gradient in table)


def fits_triton(factors: Sequence[Factors]) -> bool:
    """Whether the kernels take these tables; their loads of 16 bytes need factors that are aligned to 16 bytes."""
    left, _, basis = factors[0]
    if not (left.is_cuda or INTERPRETED):
        return False
    known = left.dtype in (torch.float32, torch.bfloat16, torch.float16)
    aligned = all(f.data_ptr() % 16 == 0 and f.is_contiguous() for table in factors for f in table)
    return known and aligned and left.shape[1] <= 128 and basis.shape[1] <= 256


class _FusedRows(torch.autograd.Function):
    """`_Bags` and `_ManyRows` in Triton: [N, dim] of one table and its bags, or [T, L, dim] for ids [T, L]."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, offsets: Tensor | None, scale: Tensor | None, sparse: bool, *factors: Tensor
    ) -> Tensor:
        from holdall.kernels import frobenius_triton as fused

        tables = _by_table(factors)
        num_lookups, dim = ids.shape[-1], tables[0][2].shape[1]
        num_bags = num_lookups if offsets is None else offsets.numel() - 1
        lookups = fused.Lookups(
            ids, num_lookups, num_bags, ids.stride(0), ids.stride(-1), num_bags, 1, offsets, None, scale
        )
        shape = (num_bags, dim) if ids.dim() == 1 else (len(tables), num_bags, dim)
        out = tables[0][0].new_empty(shape)
        columns = [fused.TableColumns(source=table, target=table) for table in range(len(tables))]
        u = fused.forward(tables, columns, lookups, out, saves_u=any(ctx.needs_input_grad))
        ctx.save_for_backward(ids, offsets, scale, u, *factors)
        ctx.sparse, ctx.columns, ctx.num_bags = sparse, columns, num_bags
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from holdall.kernels import frobenius_triton as fused

        ids, offsets, scale, u, *factors = ctx.saved_tensors
        if records_gradients():
            needed = ctx.needs_input_grad[4:]
            if ids.dim() == 2:
                by_table = gradients_of_reference(lambda *f: _rows_many_reference(f, ids), factors, needed, gradient)
                return None, None, None, None, *by_table
            needed = (*needed, False, False, ctx.needs_input_grad[2])
            each = _reference_gradients(ctx.sparse, ids, offsets, scale, _by_table(factors)[0], needed, gradient)
            return None, None, each[5], None, *each[:3]
        bag = None if offsets is None else bag_of(offsets, ids.numel())
        strides = (ids.stride(0), ids.stride(-1), ctx.num_bags, 1)
        lookups = fused.Lookups(ids, ids.shape[-1], ctx.num_bags, *strides, offsets, bag, scale)
        found, d_scale = fused_gradients(
            _by_table(factors),
            ctx.columns,
            lookups,
            u,
            gradient.contiguous(),
            sparse=ctx.sparse,
            needs_scale=ctx.needs_input_grad[2],
        )
        return None, None, None if d_scale is None else d_scale.to(scale.dtype), None, *found


def _by_table(factors: Sequence[Tensor]) -> list[Factors]:
    return list(zip(factors[::3], factors[1::3], factors[2::3], strict=True))


def fused_gradients(
    tables: Sequence[Factors],
    columns: Sequence[frobenius_triton.TableColumns],
    lookups: frobenius_triton.Lookups,
    u: Tensor,
    gradient: Tensor,
    *,
    sparse: bool = False,
    needs_scale: bool = False,
) -> tuple[list[Tensor], Tensor | None]:
    """Gradients of left, right and basis of every table in turn, by the kernels, and of the scale if needed.

    In torch's deterministic mode, lookups of a row are sorted and summed in order, without atomic additions.
    """
    from holdall.kernels import frobenius_triton as fused

    by_lookup = sparse or torch.are_deterministic_algorithms_enabled()
    found = fused.backward(tables, columns, lookups, u, gradient, by_lookup=by_lookup, needs_scale=needs_scale)
    dtype, sides = tables[0][0].dtype, [left.shape[0] for left, _, _ in tables]
    sums = [found.left, found.right]
    if by_lookup:
        ids = [_ids_of(lookups, column) for column in columns]
        if sparse:
            assert len(tables) == 1
            index = [ids[0] // sides[0], ids[0] % sides[0]]
            rows = [_sparse_rows(v.to(dtype), at, sides[0]) for v, at in zip(sums, index, strict=True)]
            return [*rows, found.basis[0].to(dtype)], found.scale
        starts = [sum(sides[:table]) for table in range(len(sides))]
        each = list(zip(ids, sides, starts, strict=True))
        index = [torch.cat([i // q + s for i, q, s in each]), torch.cat([i % q + s for i, q, s in each])]
        sums = [fused.sum_by_row(v, at, sum(sides)) for v, at in zip(sums, index, strict=True)]
    parts = [total.to(dtype).split(sides) for total in sums]
    by_table = zip(*parts, found.basis.to(dtype), strict=True)
    return [part for table in by_table for part in table], found.scale


def _ids_of(lookups: frobenius_triton.Lookups, column: frobenius_triton.TableColumns) -> Tensor:
    """Ids [L] of one table in the order in which the kernels read them."""
    start = column.source * lookups.source_stride + lookups.values.storage_offset()
    return lookups.values.as_strided((lookups.num_lookups,), (lookups.sample_stride,), start).long()


def _gather_many(tables: Sequence[Tensor], index: Tensor) -> Tensor:
    """[T, L, columns]: rows `index[t]` of every table, without a copy after the gather."""
    found = tables[0].new_empty(*index.shape, tables[0].shape[1])
    for table, rows, target in zip(tables, index, found, strict=True):
        torch.index_select(table, 0, rows, out=target)
    return found


def _sum_terms(products: Tensor, rank: int) -> Tensor:
    """u [L, r] from the products [L, p*r] of all terms, which it overwrites.

    Adding halves onto each other keeps the inner loops long: 2 to 4 times faster than a sum over the middle of
    [L, p, r] from 4,096 lookups on.
    """
    while (num_terms := products.shape[1] // rank) > 2:
        half = num_terms // 2 * rank
        products[:, :half].add_(products[:, -half:])
        products = products[:, :-half]
    return products if num_terms == 1 else products[:, :rank] + products[:, rank:]


def _repeated_product(gradient: Tensor, basis: Tensor, num_terms: int) -> Tensor:
    """`gradient @ basis.T`, [..., N, r], repeated for every term: [..., N, p*r].

    Copies cost less than a broadcast in the products that follow, and matrix products of fewer than 16 columns run at
    a fraction of the speed, so some copies come from repeating the basis. With the two products that follow, at
    N=4,096, p=4, r=8, dim 64 on two cores: 98 us; all copies from the basis 126; a broadcast 218.
    """
    in_product = math.gcd(num_terms, max(1, 16 // basis.shape[-2]))
    once = gradient @ torch.cat([basis] * in_product, -2).mT
    return torch.cat([once] * (num_terms // in_product), -1)


def _pool(u: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    """Sums [N, r] of u [L, r] over bags, outside of autograd."""
    if u.shape[0] == 0:  # embedding_bag needs a table of at least one row
        return u.new_zeros(offsets.numel() - 1, u.shape[1])
    lookups = torch.arange(u.shape[0], device=u.device)
    return F.embedding_bag(lookups, u, offsets, mode="sum", per_sample_weights=scale, include_last_offset=True)


def _sum_rows(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Dense [num_rows, columns] with `rows` added at `index`; many lookups share a row, so halves sum in float32.

    index_add_ is as fast as sorting and summing segments at 2,000 rows of 32 columns and 5 times faster at 15,000.
    """
    if rows.dtype in (torch.float16, torch.bfloat16):
        return _sum_rows(rows.float(), index, num_rows).to(rows.dtype)
    return rows.new_zeros(num_rows, rows.shape[1]).index_add_(0, index, rows)


def _sparse_rows(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Sparse gradient whose reader does the sum of `_sum_rows`."""
    return torch.sparse_coo_tensor(index.unsqueeze(0), rows, (num_rows, rows.shape[1]), check_invariants=False)
