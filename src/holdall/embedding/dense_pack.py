"""Dense tables of one width and type, end to end in one storage, and the lookups that read it.

A lookup hands its gradient to the pack instead of to autograd, so that an optimizer can sum and apply it by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.kernels.row_gradient import RowGradient
from holdall.tables.dense import DenseTable


class DensePack:
    """Dense tables of one dim and type, end to end in one storage [R, dim]; each keeps its `weight`, a view of it."""

    vector_dtype: torch.dtype | None = None
    """Type of looked-up vectors and of their gradients; that of the storage when None."""
    pins_vectors = False
    """Whether looked-up vectors are to lie where a GPU copies them from at full speed."""

    def __init__(self, tables: Mapping[str, DenseTable], generator: torch.Generator | None, device: torch.device | str):
        self.tables = dict(tables)
        self.collects = False
        """Set by the optimizer that consumes `gradients`; without one, gradients go to `weight.grad` as usual."""
        self.gradients: list[RowGradient] = []
        self.slots: dict[str, Tensor] = {}
        """Optimizer state, each kind laid out like the storage."""
        self._lay_out(device, generator)

    def _lay_out(self, device: torch.device | str, generator: torch.Generator | None = None) -> None:
        first = next(iter(self.tables.values()))
        num_rows = sum(table.num_rows for table in self.tables.values())
        self.storage = torch.empty(num_rows, first.dim, dtype=first.weight.dtype, device=device)
        self.starts: dict[str, int] = {}
        self._start_tensors: dict[tuple[tuple[str, ...], torch.device], Tensor] = {}
        start = 0
        for name, table in self.tables.items():
            self.starts[name] = start
            view = self.storage[start : start + table.num_rows]
            start += table.num_rows
            if table.weight.is_meta:
                table.weight = nn.Parameter(view)
                table.initialize(generator)
            else:
                table.weight.data = view.copy_(table.weight.data)

    def repack(self) -> None:
        """Lay the tables out anew if they were moved or cast one by one."""
        base, step = self.storage.data_ptr(), self.storage.shape[1] * self.storage.element_size()
        weights = {name: table.weight for name, table in self.tables.items()}
        if any(weight.data_ptr() != base + self.starts[name] * step for name, weight in weights.items()):
            if self.collects:
                raise ConfigError("the tables moved after their optimizer was made: move the model first")
            self._lay_out(next(iter(weights.values())).device)

    def start_tensor(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Where each of these tables starts; kept, because making one on a GPU waits for it.

        int32 on a GPU when every row number fits: half the bytes to sort.
        """
        key = (tuple(names), device)
        if key not in self._start_tensors:
            narrow = device.type != "cpu" and self.storage.shape[0] < 2**31
            dtype = torch.int32 if narrow else torch.int64
            self._start_tensors[key] = torch.tensor([self.starts[name] for name in names], dtype=dtype, device=device)
        return self._start_tensors[key]

    def locate(self, ids: Tensor, names: Sequence[str], which: Tensor | None = None) -> Tensor:
        """Row numbers of the storage for ids whose last dimension runs over these tables, or table `which[l]` for id l.

        int32 where `start_tensor` is and the ids are.
        """
        starts = self.start_tensor(names, ids.device)
        return ids + (starts if which is None else starts[which])

    def row_numbers(self, rows: Tensor) -> Tensor:
        """Located rows as a kernel takes them: contiguous, and int32 when every row number fits."""
        return rows.to(torch.int32 if self.storage.shape[0] < 2**31 else torch.int64).contiguous()

    def allocate_slots(self, make: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Make room for optimizer state; `make` gives tensors whose rows are those of the one it is given."""
        self.slots = make(self.storage)
        return self.slots

    def slot_views(self, name: str) -> dict[str, Tensor]:
        """The optimizer state of a table's rows, by kind."""
        return {slot: self.view(state, name) for slot, state in self.slots.items()}

    def view(self, packed: Tensor, name: str) -> Tensor:
        """The rows of table `name` in a tensor laid out like the storage, such as its optimizer state."""
        return packed[self.starts[name] : self.starts[name] + self.tables[name].num_rows]


class PackedLookup(torch.autograd.Function):
    """Rows of a pack's storage, pooled; the backward hands the gradient to the pack instead of to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        pack: DensePack,
        rows: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        mean: bool,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.pack, ctx.mean, ctx.with_bags = pack, mean, offsets is not None
        ctx.save_for_backward(rows, offsets, weights)
        dtype = pack.vector_dtype or pack.storage.dtype
        if offsets is None:
            found = _pinned_rows(pack.storage, rows) if pack.pins_vectors else F.embedding(rows, pack.storage)
            return found.to(dtype)
        mode = "mean" if mean else "sum"
        weights = None if weights is None else weights.to(pack.storage.dtype)
        return F.embedding_bag(
            rows, pack.storage, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True
        ).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, offsets, weights = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        bag_of = None
        if offsets is not None:
            lengths = offsets.diff()
            bag_of = torch.repeat_interleave(lengths)
            if ctx.mean:
                weights = lengths.to(grad.dtype).reciprocal()[bag_of]
        ctx.pack.gradients.append(RowGradient(rows.reshape(-1), grad, bag_of, weights))
        return (None, None, None, None, None, *(None for _ in ctx.pack.tables))


def _pinned_rows(storage: Tensor, rows: Tensor) -> Tensor:
    """`F.embedding` into memory that is taken from the system once, and not anew for every step."""
    found = torch.empty(rows.numel(), storage.shape[1], dtype=storage.dtype, pin_memory=True)
    torch.index_select(storage, 0, rows.reshape(-1), out=found)
    return found.view(*rows.shape, storage.shape[1])


class FusedLookup(torch.autograd.Function):
    """`PackedLookup` in Triton: bags lie feature-major, the output [B, F, dim] sample-major and in a given type."""

    @staticmethod
    def forward(
        ctx: Any,
        pack: DensePack,
        rows: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        mean: bool,
        num_features: int,
        dtype: torch.dtype,
        *parameters: Tensor,
    ) -> Tensor:
        from holdall.kernels import lookup_triton

        ctx.pack, ctx.mean, ctx.num_features = pack, mean, num_features
        ctx.save_for_backward(rows, offsets, weights)
        if offsets is None:
            return lookup_triton.gather(pack.storage, rows, dtype)
        return lookup_triton.pool(
            pack.storage, rows, offsets, weights, num_features=num_features, mean=mean, dtype=dtype
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, offsets, weights = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        bag_of = None
        if offsets is not None:
            lengths = offsets.diff()
            bag = torch.repeat_interleave(lengths, output_size=rows.numel())
            if ctx.mean:
                weights = lengths.float().reciprocal()[bag]
            size = lengths.numel() // ctx.num_features
            bag_of = bag % size * ctx.num_features + bag // size
        ctx.pack.gradients.append(RowGradient(rows.reshape(-1), grad, bag_of, weights))
        return (None, None, None, None, None, None, None, *(None for _ in ctx.pack.tables))
