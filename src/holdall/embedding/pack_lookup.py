"""Lookups of features in a pack of dense tables, with one gather for all of them.

The backward of a lookup gives its gradient to the pack instead of to autograd, so that an optimizer can sum and apply
it by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids, features_at
from holdall.embedding.dense_pack import DensePack
from holdall.kernels.dispatch import takes_triton
from holdall.kernels.row_gradient import RowGradient


@dataclass(frozen=True)
class PackGroup:
    """Features that one pack looks up."""

    pack: DensePack
    positions: tuple[int, ...]
    """Positions of the features in a batch."""
    names: tuple[str, ...]
    """Names of their tables."""
    whole_batch: bool
    """Whether these are all features of a batch, in its order."""

    def values(self, values: Tensor) -> Tensor:
        """Of values [F, B] those of these features."""
        return values if self.whole_batch else features_at(values, self.positions)

    def parameters(self) -> list[Tensor]:
        """Weights of all tables of the pack: what a lookup depends on, for autograd."""
        return [*self.pack.weights()]


def look_up_pack(group: PackGroup, ids: Ids) -> Tensor:
    """Pooled vectors [B, F', dim] of a group's features."""
    pack = group.pack
    pack.repack()
    if ids.weights is not None and ids.weights.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            "weights of lookups have no gradient where the tables have an optimizer: detach them, or build "
            "EmbeddingBags with fused=False"
        )
    if takes_triton("the lookup", pack.storage, fits=pack.fits_kernels) and (ids.offsets is None or group.whole_batch):
        return _look_up_fused(group, ids)
    if ids.offsets is None and ids.weights is None:
        # Sample-major, as batches lie in their files: the result is contiguous for the interaction that follows.
        rows = pack.locate(group.values(ids.values).t(), group.names)
        return PackedLookup.apply(pack, rows, None, None, pack.mean, *group.parameters())
    size, num_features = ids.batch_size, len(group.positions)
    if ids.offsets is None:
        rows = pack.locate(group.values(ids.values).t(), group.names).t().reshape(-1)
        offsets = torch.arange(rows.numel() + 1, device=rows.device)
        weights = None if ids.weights is None else group.values(ids.weights).reshape(-1)
    else:
        pieces = [ids.bag(position) for position in group.positions]
        lengths = torch.cat([bounds.diff() for _, bounds, _ in pieces if bounds is not None])
        which = torch.repeat_interleave(lengths.view(num_features, size).sum(1))
        rows = pack.locate(torch.cat([values for values, _, _ in pieces]), group.names, which)
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        weights = None if ids.weights is None else torch.cat([w for _, _, w in pieces if w is not None])
    vectors = PackedLookup.apply(pack, rows.long(), offsets, weights, pack.mean, *group.parameters())
    return vectors.view(num_features, size, pack.storage.shape[1]).transpose(0, 1)


def _look_up_fused(group: PackGroup, ids: Ids) -> Tensor:
    """`look_up_pack` in one Triton kernel, without waiting for the device.

    Inside `torch.autocast` the vectors have its type, which saves writing and reading them in float32.
    """
    pack = group.pack
    kind = pack.storage.device.type
    own = pack.vector_dtype or pack.storage.dtype
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own
    offsets = weights = None
    if ids.offsets is None:
        rows = pack.row_numbers(pack.locate(group.values(ids.values).t(), group.names))
        if ids.weights is not None:
            rows, weights = rows.t().reshape(-1), group.values(ids.weights).reshape(-1)
            offsets = torch.arange(rows.numel() + 1, device=rows.device)
    else:
        offsets, weights = ids.offsets, ids.weights
        bag = torch.repeat_interleave(offsets.diff(), output_size=ids.values.numel())
        rows = pack.row_numbers(pack.locate(ids.values, group.names, bag // ids.batch_size))
    return FusedLookup.apply(pack, rows, offsets, weights, pack.mean, len(group.positions), dtype, *group.parameters())


def pack_rows(group: PackGroup, values: Tensor) -> Tensor:
    """Rows [L, dim] of ids [L] of a group's only feature, not pooled."""
    pack = group.pack
    pack.repack()
    rows = pack.locate(values.long()[:, None], group.names)[:, 0]
    return PackedLookup.apply(pack, rows, None, None, False, *group.parameters())


def give_to_pack(ctx: Any, pack: DensePack, gradient: RowGradient, learns: Sequence[bool]) -> None:
    """Let a pack collect the gradient of a lookup; `learns` tells which of its tables are not frozen.

    The gradient is no result of the backward, so `torch.autograd.grad` cannot return it.
    """
    node = next(node for node, _ in ctx.next_functions if node is not None)
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        raise ConfigError(
            "torch.autograd.grad cannot give gradients of tables that have an optimizer, which collects them by row: "
            "call backward(), or make the Optimizers later"
        ) from error
    if not all(learns):
        frozen = [name for name, on in zip(pack.tables, learns, strict=True) if not on]
        gradient = pack.without(gradient, frozen)
    pack.collect(gradient)


class PackedLookup(torch.autograd.Function):
    """Rows of a pack's storage, pooled; the backward gives the gradient to the pack instead of to autograd."""

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
        ctx.pack, ctx.mean = pack, mean
        ctx.save_for_backward(rows, offsets, weights)
        dtype = pack.vector_dtype or pack.storage.dtype
        if offsets is None:
            found = _pinned_rows(pack.storage, rows) if pack.pin_output else F.embedding(rows, pack.storage)
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
        give_to_pack(ctx, ctx.pack, RowGradient(rows.reshape(-1), grad, bag_of, weights), ctx.needs_input_grad[5:])
        return (None,) * len(ctx.needs_input_grad)


def _pinned_rows(storage: Tensor, rows: Tensor) -> Tensor:
    """`F.embedding` into pinned memory, which torch allocates once and reuses in later steps."""
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
        give_to_pack(ctx, ctx.pack, RowGradient(rows.reshape(-1), grad, bag_of, weights), ctx.needs_input_grad[7:])
        return (None,) * len(ctx.needs_input_grad)
