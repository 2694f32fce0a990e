"""Updates of rows that are stored as codes and trained, of several tables at once.

Gradients of all tables are summed together, with rows numbered one table after the other, and the rows of one kind are
decoded, moved and rounded together: a step costs as many operations for 26 tables as for one, but for reading and
writing each table's rows. The numbers are those of each table on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED, plain_torch, takes_triton
from holdall.kernels.row_gradient import RowGradient, join, sum_by_row
from holdall.kernels.stochastic import uniform_noise
from holdall.tables.rounding import HEADROOM, move_codes, move_on_grid, pack_pairs, unpack_pairs

if TYPE_CHECKING:
    from holdall.tables.quantized import StochasticRoundingTable


@dataclass(frozen=True, eq=False)
class GradientShare:
    """Gradient of the rows of one table, numbered from `start` to before `end` in a gradient of several tables."""

    joint: RowGradient
    """Its ids beyond those of all tables are of no row; its type may be another than that of the rows."""
    start: int
    end: int

    def own(self, dtype: torch.dtype) -> RowGradient:
        """The gradient of the table alone, in `dtype`."""
        ids = self.joint.ids
        lookups = ((ids >= self.start) & (ids < self.end)).nonzero()[:, 0]
        bags = lookups if self.joint.bag_of is None else self.joint.bag_of[lookups]
        return RowGradient(ids[lookups].long() - self.start, self.joint.grad.to(dtype), bags)


class Touched(NamedTuple):
    """Rows of a table that have a gradient: distinct ids [U], ascending, and their summed gradient [U, dim]."""

    number: int
    """Position of the table in a list."""
    ids: Tensor
    gradients: Tensor


Change = Callable[[Sequence[Touched], Tensor], Tensor]
"""What to add to rows [U, dim] of some tables, one after the other, for their gradients [U, dim]."""


def collect_jointly(lookups: Sequence[tuple[StochasticRoundingTable, Tensor]], gradient: Tensor) -> None:
    """Give tables the gradient [L, dim] of the rows that were looked up in them, one table after the other."""
    starts: dict[StochasticRoundingTable, int] = {}
    end = 0
    for table, _ in lookups:
        if table not in starts:
            starts[table] = end
            end += table.num_rows
    joint = RowGradient(_joined([ids + starts[table] for table, ids in lookups]), gradient)
    for table, start in starts.items():
        table.collect(GradientShare(joint, start, start + table.num_rows))


def sum_pending(tables: Sequence[StochasticRoundingTable]) -> list[Touched]:
    """Touched rows of every table that has gradients; those of several may be views of one tensor."""
    groups: dict[Hashable, list[int]] = {}
    for number, table in enumerate(tables):
        if table.pending:
            share = _only_share(table)
            joint = None if share is None else id(share.joint)
            groups.setdefault((table.dim, table.row_dtype, table.codes.device, joint), []).append(number)
    found = [touched for group in groups.values() for touched in _sum_group(tables, group)]
    return sorted(found, key=lambda touched: touched.number)


def _only_share(table: StochasticRoundingTable) -> GradientShare | None:
    """The share of a joint gradient that is all that a table has; None where there are others."""
    share = table.pending[0]
    return share if len(table.pending) == 1 and isinstance(share, GradientShare) else None


def _sum_group(tables: Sequence[StochasticRoundingTable], numbers: Sequence[int]) -> Iterator[Touched]:
    """`sum_pending` of tables that have shares of one joint gradient, or gradients of their own."""
    parts: list[GradientShare] = []
    share = _only_share(tables[numbers[0]])
    if share is not None:
        parts = [share for number in numbers if (share := _only_share(tables[number])) is not None]
        joint = share.joint
    else:
        own = [tables[number].own_gradient() for number in numbers]
        if len(own) == 1 or any(gradient.is_summed for gradient in own):
            for number, gradient in zip(numbers, own, strict=True):
                is_summed, dtype = gradient.is_summed, tables[number].row_dtype
                yield Touched(number, *((gradient.ids, gradient.grad) if is_summed else _sum_by_row(gradient, dtype)))
            return
        start = 0
        for number, gradient in zip(numbers, own, strict=True):
            parts.append(GradientShare(gradient, start, start + tables[number].num_rows))
            start = parts[-1].end
        joint = join([replace(part.joint, ids=part.joint.ids + part.start) for part in parts])
    distinct, sums = _sum_by_row(joint, tables[numbers[0]].row_dtype)
    ordered = sorted(zip(numbers, parts, strict=True), key=lambda pair: pair[1].start)
    edges = torch.tensor([(part.start, part.end) for _, part in ordered], device=distinct.device)
    cuts = torch.searchsorted(distinct, edges).tolist()
    starts = edges[:, 0].contiguous()
    of_part = torch.searchsorted(starts, distinct, right=True).sub_(1).clamp_(min=0)
    ids = distinct - starts[of_part]
    for (number, _), (first, last) in zip(ordered, cuts, strict=True):
        yield Touched(number, ids[first:last], sums[first:last])


def _sum_by_row(gradient: RowGradient, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`sum_by_row` of a gradient for rows of type `dtype`; a kernel sums it in float32."""
    fits = dtype.itemsize <= 4 and gradient.grad.shape[1] <= 2048
    if fits and gradient.ids.numel() and takes_triton("the sum of row gradients", gradient.grad):
        from holdall.kernels import row_update_triton

        return row_update_triton.sum_by_row(gradient)
    return sum_by_row(replace(gradient, grad=gradient.grad.to(dtype)))


@torch.no_grad()
def apply_row_updates(
    tables: Sequence[StochasticRoundingTable], change: Change, keys: Sequence[tuple[int, int]] | None = None
) -> None:
    """Add what `change` returns to the touched rows of all tables, and drop their gradients.

    Rounding draws from torch's global generator, or, with `keys` (`kernels.stochastic.keys` of a step) of each table,
    by the position of each number in its table: then a step gives the same bits whatever was drawn before.
    """
    kinds: dict[Hashable, list[Touched]] = {}
    for touched in sum_pending(tables):
        table = tables[touched.number]
        if touched.ids.numel():
            stored = (table.method.bits, table.grid.dtype, table.has_one_grid, table.method.state_bits)
            kind = (table.dim, table.row_dtype, table.codes.device, stored)
            kinds.setdefault(kind, []).append(touched)
    for table in tables:
        table.zero_pending()
    for group in kinds.values():
        _update_kind(tables, group, change, keys)


def _update_kind(
    tables: Sequence[StochasticRoundingTable],
    kind: Sequence[Touched],
    change: Change,
    keys: Sequence[tuple[int, int]] | None,
) -> None:
    """`apply_row_updates` of tables whose codes, grids and optimizer state have one type."""
    first = tables[kind[0].number]
    dtype = torch.promote_types(first.row_dtype, torch.float32)  # bfloat16 rows would lose small changes
    delta = change(kind, _joined([touched.gradients for touched in kind]).to(dtype))
    if keys is not None and _move_by_kernel(tables, kind, delta, keys):
        return
    codes = _joined([tables[touched.number].codes.index_select(0, touched.ids) for touched in kind])
    grid = first.grid
    if not first.has_one_grid:
        grid = _joined([tables[touched.number].grid.index_select(0, touched.ids) for touched in kind])
    draws = None
    if keys is not None:
        of_tables = [keys[touched.number] for touched in kind]
        draws = row_noise([touched.ids for touched in kind], first.dim, of_tables).to(dtype)
    packs = first.method.bits == 4
    codes = unpack_pairs(codes, first.dim) if packs else codes
    if first.has_one_grid:
        codes = move_on_grid(codes, grid, delta, first.method.levels, draws)
    else:
        codes, grid = move_codes(codes, grid, delta, first.method.levels, draws)
    codes = pack_pairs(codes) if packs else codes
    sizes = [touched.ids.numel() for touched in kind]
    for touched, its_codes in zip(kind, codes.split(sizes), strict=True):
        tables[touched.number].codes.index_copy_(0, touched.ids, its_codes)
    if first.has_one_grid:
        return
    for touched, its_grid in zip(kind, grid.split(sizes), strict=True):
        tables[touched.number].grid.index_copy_(0, touched.ids, its_grid)


def _move_by_kernel(
    tables: Sequence[StochasticRoundingTable],
    kind: Sequence[Touched],
    delta: Tensor,
    keys: Sequence[tuple[int, int]],
) -> bool:
    """Move the rows by a Triton kernel, where one is chosen and takes them all."""
    first = tables[kind[0].number]
    if first.has_one_grid or plain_torch() or not HAS_TRITON or not (delta.is_cuda or INTERPRETED):
        return False
    from holdall.kernels import code_rows_triton as fused

    parts = []
    for touched in kind:
        table = tables[touched.number]
        parts.append(fused.CodePart(table.codes, table.grid, keys[touched.number], touched.ids.numel()))
    if not all(fused.fits(part, delta) for part in parts) or not takes_triton("the update of codes", delta):
        return False
    ids = _joined([touched.ids for touched in kind])
    fused.move_rows(parts, ids, delta, first.method.bits, HEADROOM)
    return True


def row_noise(ids: Sequence[Tensor], dim: int, keys: Sequence[tuple[int, int]]) -> Tensor:
    """Uniform numbers [U, dim] for the rows `ids` of several tables, by the key of each and the position in it."""
    joined = _joined(ids)
    if len(ids) == 1:
        return uniform_noise(joined, dim, keys[0])
    sizes = torch.tensor([len(of_table) for of_table in ids], device=joined.device)
    of_rows = torch.tensor(keys, device=joined.device).repeat_interleave(sizes, dim=0, output_size=len(joined))
    low, high = of_rows.split(1, dim=1)
    return uniform_noise(joined, dim, (low, high))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
