"""A mini-batch: dense values, the ids of every feature, and labels.

Shapes: B samples, F features, N dense columns, L lookups in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from holdall.common.summary import Summarised, Summary


@dataclass(frozen=True)
class Ids:
    """Ids of F features for B samples, feature-major.

    One id per feature and sample: `values` is [F, B] and `offsets` None. Otherwise `values` is [L] and bag (f, b) is
    `values[offsets[f * B + b] : offsets[f * B + b + 1]]`, with `offsets` of length F * B + 1. Host tensors are int32
    where the ids fit; arithmetic on them is int64.
    """

    values: Tensor
    offsets: Tensor | None
    num_features: int
    weights: Tensor | None = None
    """One weight a lookup, in the order (and shape) of `values`."""

    @property
    def batch_size(self) -> int:
        if self.offsets is None:
            return self.values.shape[1]
        return (self.offsets.numel() - 1) // self.num_features

    def bag(self, feature: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`(values, offsets, weights)` of one feature; offsets hold B + 1 entries and start at 0, or are None."""
        if self.offsets is None:
            return self.values[feature], None, None if self.weights is None else self.weights[feature]
        size = self.batch_size
        bounds = self.offsets[feature * size : (feature + 1) * size + 1]
        start, end = int(bounds[0]), int(bounds[-1])
        weights = None if self.weights is None else self.weights[start:end]
        return self.values[start:end], bounds - bounds[0], weights

    def slice(self, start: int, stop: int) -> Ids:
        """Samples start..stop of every feature, as views where each has one id."""
        if self.offsets is None:
            weights = None if self.weights is None else self.weights[:, start:stop]
            return replace(self, values=self.values[:, start:stop], weights=weights)
        bounds = self.offsets[:-1].view(self.num_features, -1)[:, start:stop]
        lengths = self.offsets.diff().view(self.num_features, -1)[:, start:stop]
        offsets = torch.zeros(lengths.numel() + 1, dtype=self.offsets.dtype)
        torch.cumsum(lengths.flatten(), 0, out=offsets[1:])
        # Lookup j of the result is lookup `bounds[bag] + (j - offsets[bag])`.
        shifts = torch.repeat_interleave(bounds.flatten() - offsets[:-1], lengths.flatten())
        lookups = torch.arange(int(offsets[-1])) + shifts
        weights = None if self.weights is None else self.weights[lookups]
        return replace(self, values=self.values[lookups], offsets=offsets, weights=weights)

    def select(self, positions: Sequence[int]) -> Ids:
        """The features at these positions alone, in that order; itself where these are all."""
        if list(positions) == list(range(self.num_features)):
            return self
        if self.offsets is None:
            weights = None if self.weights is None else features_at(self.weights, positions)
            return Ids(features_at(self.values, positions), None, len(positions), weights)
        lengths = self.offsets.diff().view(self.num_features, -1)[list(positions)]
        offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
        bags = [self.bag(position) for position in positions]
        weights = None if self.weights is None else torch.cat([one for _, _, one in bags if one is not None])
        return Ids(torch.cat([values for values, _, _ in bags]), offsets, len(positions), weights)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Ids:
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def each(self, change: Callable[[Tensor], Tensor]) -> Ids:
        """Copy with `change` applied to each tensor."""
        return replace(
            self,
            values=change(self.values),
            offsets=None if self.offsets is None else change(self.offsets),
            weights=None if self.weights is None else change(self.weights),
        )


def features_at(values: Tensor, positions: Sequence[int]) -> Tensor:
    """Values [F', B] of the features at `positions`, in that order, from values [F, B]."""
    if list(positions) == list(range(values.shape[0])):
        return values
    if torch.compiler.is_compiling():  # tensors of a trace have no values, and must not be kept
        return values.index_select(0, torch.tensor(list(positions), device=values.device))
    return values.index_select(0, _on_device(tuple(positions), values.device))


@cache
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers as a tensor on a device; cached, because the copy waits for a GPU."""
    with torch.inference_mode(False):  # usable outside of inference mode, too
        return torch.tensor(numbers, device=device)


@dataclass(frozen=True, repr=False)
class Batch(Summarised):
    """Input of one training step."""

    dense: Tensor
    """[B, N] float32."""
    ids: Ids
    label: Tensor
    """[B] float32, 0 or 1."""
    weight: Tensor | None = None
    """[B] float32: weights of the samples, 1 in the mean of the training split; None where all weigh the same."""

    def _summary(self) -> Summary:
        parts = {"dense": self.dense, "ids": self.ids.values, "offsets": self.ids.offsets, "label": self.label}
        parts |= {"id weights": self.ids.weights, "weight": self.weight}
        rows = [
            (name, " x ".join(f"{size:,}" for size in part.shape), str(part.dtype).removeprefix("torch."), part.device)
            for name, part in parts.items()
            if part is not None
        ]
        title = f"Batch of {len(self):,} samples, {self.ids.num_features} features, {self.dense.shape[1]} dense columns"
        return Summary(title, ("tensor", "shape", "type", "device"), rows)

    def __len__(self) -> int:
        return self.label.shape[0]

    def slice(self, start: int, stop: int) -> Batch:
        """Samples start..stop, as views where every feature has one id."""
        ids = self.ids.slice(start, stop)
        weight = None if self.weight is None else self.weight[start:stop]
        return replace(self, dense=self.dense[start:stop], ids=ids, label=self.label[start:stop], weight=weight)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the batch, without those that are None."""
        for tensor in (self.dense, self.label, self.ids.values, self.ids.offsets, self.ids.weights, self.weight):
            if tensor is not None:
                yield tensor

    def without_samples(self) -> Batch:
        """Batch without samples, of the same types and features."""
        ids = self.ids
        if ids.offsets is None:
            values, offsets = ids.values[:, :0], None
        else:
            values, offsets = ids.values[:0], ids.offsets.new_zeros(1)
        weights = None if ids.weights is None else ids.weights[..., :0]
        weight = None if self.weight is None else self.weight[:0]
        return Batch(self.dense[:0], Ids(values, offsets, ids.num_features, weights), self.label[:0], weight)

    def empty_like(self) -> Batch:
        """Uninitialised batch of the same shapes and types, on the same device."""
        return Batch(
            dense=torch.empty_like(self.dense),
            ids=self.ids.each(torch.empty_like),
            label=torch.empty_like(self.label),
            weight=None if self.weight is None else torch.empty_like(self.weight),
        )

    def fill(self, other: Batch) -> None:
        """Copy the values of another batch of the same shapes into this one."""
        for tensor, source in zip(self.tensors(), other.tensors(), strict=True):
            tensor.copy_(source)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return Batch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            ids=self.ids.to(device, non_blocking=non_blocking),
            label=self.label.to(device, non_blocking=non_blocking),
            weight=None if self.weight is None else self.weight.to(device, non_blocking=non_blocking),
        )
