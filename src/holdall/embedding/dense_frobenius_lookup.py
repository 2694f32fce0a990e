"""One-hot lookup in dense and Frobenius tables and tables in bands, whose kernels write into one output [B, F, dim].

A `DenseFrobeniusPlan` assigns each feature to the kernel that writes its vectors: that of a pack of dense
tables, that of a group of Frobenius tables, or that of all tables in bands. All other features are looked up
elsewhere, and their vectors are copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdall.embedding.band_lookup import BandPart
from holdall.embedding.dense_pack import DensePack
from holdall.embedding.pack_lookup import give_to_pack
from holdall.kernels.frobenius import Factors, fits_triton, fused_gradients
from holdall.kernels.row_gradient import RowGradient
from holdall.kernels.side_stream import beside
from holdall.tables import Table
from holdall.tables.frobenius import FrobeniusTable


@dataclass(frozen=True)
class DensePart:
    """Features whose vectors are rows of one pack: lines (source, target, start), see `lookup_triton.write_columns`."""

    pack: DensePack
    lines: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class FrobeniusPart:
    """Features of Frobenius tables of one shape: (table, source, target)."""

    members: list[tuple[FrobeniusTable, int, int]] = field(default_factory=list)

    def factors(self) -> list[Factors]:
        return [(table.left, table.right, table.basis) for table, *_ in self.members]


class DenseFrobeniusPlan:
    """Kernels of several kinds that write into one output, and the features of each."""

    def __init__(
        self, positions: Sequence[int], names: Sequence[str], tables: Mapping[str, Table], packs: Sequence[DensePack]
    ):
        """`positions` of the features in the order of the output; `names` of the tables of all features."""
        self.num_columns = len(positions)
        self.dense = [DensePart(pack) for pack in packs]
        self.frobenius: dict[Hashable, FrobeniusPart] = {}
        self.bands = BandPart()
        self.dim = tables[names[positions[0]]].dim
        self.rest: list[tuple[int, int]] = []
        """(position, column) of features that are looked up elsewhere."""
        for column, position in enumerate(positions):
            name = names[position]
            if not self._assign(name, tables[name], position, column):
                self.rest.append((position, column))
        self.dense = [part for part in self.dense if part.lines]
        self.rest_positions = tuple(position for position, _ in self.rest)
        self._on_device: dict[tuple[int, ...], Tensor] = {}

    def _assign(self, name: str, table: Table, position: int, column: int) -> bool:
        """Assign a feature to a kernel; False where none takes it."""
        for part in self.dense:
            if name in part.pack.tables:
                part.lines.append((position, column, part.pack.starts[name]))
                return True
        if self.bands.takes(table):
            self.bands.add(table, position, column)
            return True
        if not isinstance(table, FrobeniusTable) or not fits_triton([(table.left, table.right, table.basis)]):
            return False
        group = table.kernel_group()
        if group is not None:
            self.frobenius.setdefault(group, FrobeniusPart()).members.append((table, position, column))
        return group is not None

    @property
    def worthwhile(self) -> bool:
        """Whether any feature is assigned to a kernel."""
        return bool(self.dense or self.frobenius or self.bands.members)

    def lines(self, part: DensePart, device: torch.device) -> Tensor:
        """A part's lines on the device; cached, because copying them there waits for the device."""
        key = (id(part), device.index or 0)
        if key not in self._on_device:
            self._on_device[key] = torch.tensor(part.lines).to(device)
        return self._on_device[key]

    def bags_of(self, part: DensePart, size: int, device: torch.device) -> Tensor:
        """Row of the flat output [B * F] that each lookup [B, n] of a part is written to."""
        key = (id(part), device.index or 0, size)
        if key not in self._on_device:
            columns = self.lines(part, device)[:, 1]
            samples = torch.arange(size, device=device).unsqueeze(1) * self.num_columns
            found = (samples + columns).reshape(-1)
            self._on_device[key] = found.int() if size * self.num_columns < 2**31 else found
        return self._on_device[key]

    def sorted_rows(self, part: DensePart, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row numbers [B * n] of a part's lookups, the same in ascending order, and the output rows of the latter."""
        from holdall.kernels import lookup_triton
        from holdall.kernels.row_update_triton import sort_rows

        num_rows = part.pack.storage.shape[0]
        numbers = lookup_triton.row_numbers(values, self.lines(part, values.device), 0, num_rows).reshape(-1)
        ids, order = sort_rows(numbers, num_rows)
        return numbers, ids, self.bags_of(part, values.shape[1], values.device)[order]

    def parameters(self) -> Iterator[Tensor]:
        """Parameters that the kernels read: the packs' tables (whose gradients go to the pack), factors, bands."""
        for part in self.dense:
            yield from (table.weight for table in part.pack.tables.values())
        for group in self.frobenius.values():
            for factors in group.factors():
                yield from factors
        yield from self.bands.inputs()

    def dtypes(self) -> Iterator[torch.dtype]:
        yield from (part.pack.storage.dtype for part in self.dense)
        yield from (group.members[0][0].basis.dtype for group in self.frobenius.values())
        yield from (table.row_dtype for table, *_ in self.bands.members)

    def row_numbers(self, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """`(storage, rows [B, F], others)` for `dot_interaction_of_rows`, from one pack and Frobenius tables alone."""
        from holdall.kernels import frobenius_triton as fused
        from holdall.kernels import lookup_triton

        (part,) = self.dense
        device, size = values.device, values.shape[1]
        members = [member for group in self.frobenius.values() for member in group.members]
        others = values.new_empty(size, len(members), part.pack.storage.shape[1], dtype=dtype)
        key = (0, device.index or 0, 0, 0)
        if key not in self._on_device:
            by_column = {target: (source, 0, start) for source, target, start in part.lines}
            by_column.update({target: (source, slot, -1) for slot, (_, source, target) in enumerate(members)})
            lines = [by_column[column] for column in range(self.num_columns)]
            self._on_device[key] = torch.tensor(lines).to(device)
        slot = 0
        lookups = fused.one_id_a_sample(values, len(members))
        with beside(device) as other:
            for group in self.frobenius.values():
                places = [fused.TableColumns(source, slot + i) for i, (_, source, _) in enumerate(group.members)]
                slot += len(places)
                fused.forward(group.factors(), places, lookups, others)
        rows = lookup_triton.row_numbers(values, self._on_device[key], len(members), part.pack.storage.shape[0])
        other.join()
        return part.pack.storage, rows, others.flatten(0, 1)


class DenseFrobeniusLookup(torch.autograd.Function):
    """Vectors [B, F, dim] of ids `values` [F', B], written into one buffer as a `DenseFrobeniusPlan` assigns them.

    `tensors` are the plan's parameters and then the `num_rest` vectors [B, dim] of its `rest`. Packs get their gradient
    as from `FusedLookup`, with row numbers already sorted; factors get a dense one, bands those of `BandParameters`.
    The sort, a chain of small kernels, runs on a side stream beside the kernels that make the vectors.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: DenseFrobeniusPlan, values: Tensor, dtype: torch.dtype, num_rest: int, *tensors: Tensor
    ) -> Tensor:
        from holdall.kernels import frobenius_triton as fused
        from holdall.kernels import lookup_triton

        ctx.plan, columns = plan, tensors[len(tensors) - num_rest :]
        out = torch.empty(values.shape[1], plan.num_columns, plan.dim, dtype=dtype, device=values.device)
        lookups, learns = fused.one_id_a_sample(values, plan.num_columns), any(ctx.needs_input_grad)
        with beside(values.device) as other:
            sorted_rows = [plan.sorted_rows(part, values) for part in plan.dense if learns]
        us = [
            fused.forward(group.factors(), _places(group), lookups, out, saves_u=learns)
            for group in plan.frobenius.values()
        ]
        for part in plan.dense:
            lookup_triton.write_columns(part.pack.storage, values, plan.lines(part, values.device), out)
        if plan.bands.members:
            ctx.band_lookup = plan.bands.write(values, out)
        for (_, column), vectors in zip(plan.rest, columns, strict=True):
            out[:, column] = vectors
        other.join()
        ctx.column_types = [vectors.dtype for vectors in columns]
        ctx.save_for_backward(values, *us, *(tensor for each in sorted_rows for tensor in each))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        from holdall.kernels import frobenius_triton as fused

        plan: DenseFrobeniusPlan = ctx.plan
        values, *saved = ctx.saved_tensors
        us, rows = saved[: len(plan.frobenius)], saved[len(plan.frobenius) :]
        grad = grads[0].contiguous()
        lookups = fused.one_id_a_sample(values, plan.num_columns)
        found: list[Tensor | None] = []
        for i, part in enumerate(plan.dense):
            numbers, ids, sources = rows[3 * i : 3 * i + 3]
            bags = plan.bags_of(part, grad.shape[0], grad.device)
            gradient = RowGradient(numbers, grad.view(-1, grad.shape[-1]), bags, sorted=(ids, sources))
            start = 4 + len(found)
            learns = ctx.needs_input_grad[start : start + len(part.pack.tables)]
            give_to_pack(ctx, part.pack, gradient, learns)
            found.extend(None for _ in part.pack.tables)
        for group, u in zip(plan.frobenius.values(), us, strict=True):
            found.extend(fused_gradients(group.factors(), _places(group), lookups, u, grad)[0])
        if plan.bands.members:
            found.extend(plan.bands.gradients(ctx.band_lookup, values, grad))
        for (_, column), dtype in zip(plan.rest, ctx.column_types, strict=True):
            found.append(grad[:, column].to(dtype))
        return None, None, None, None, *found


def _places(group: FrobeniusPart) -> list[Any]:
    from holdall.kernels.frobenius_triton import TableColumns

    return [TableColumns(source, target) for _, source, target in group.members]
