"""Buckets of dense gradients, summed over processes while the backward computes the remaining ones.

A collective over gloo takes 2 ms however small it is, so gradients are sent in a few flat buckets. A bucket is sent as
soon as it is full, last layers first, so most are in flight before the backward ends. After `finish`, the `grad` of a
parameter is a view of its bucket: nothing is copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from holdall.distributed.collectives import Collectives, Pending

BUCKET_BYTES = 1 << 20
"""DLRM for Criteo Kaggle has 1.9 MB of dense gradients: three buckets, the last of which waits for the first layer."""


@dataclass
class _Bucket:
    flat: Tensor
    views: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    arrived: set[nn.Parameter] = field(default_factory=set)
    pending: Pending | None = None

    @property
    def full(self) -> bool:
        return len(self.arrived) == len(self.views)


class GradientBuckets:
    """Sums over ranks of the gradients of `parameters`, and of `num_signals` other numbers in the same messages.

        buckets.begin(signals)     # [num_signals] of this rank
        loss.backward()            # full buckets are sent
        buckets.flush()            # the others are sent; other work may follow
        sums = buckets.finish()    # signals summed over ranks; gradients are in place

    The caller scales the loss so that the sum over ranks is the wanted gradient. A parameter without a gradient on this
    rank counts as zero, so a rank without samples skips the backward. All ranks send buckets in the same order: a full
    one waits for those before it.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        collectives: Collectives,
        *,
        num_signals: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._collectives = collectives
        self._active = False
        self._next = 0
        """Buckets before this one have been sent."""
        groups = _grouped(list(parameters)[::-1], bucket_bytes)
        self._buckets = [_bucket(group) for group in groups]
        self._signals = _Bucket(torch.zeros(num_signals, device=collectives.processes.device))
        if self._buckets and self._buckets[-1].flat.dtype in (torch.float32, torch.float64):
            self._buckets[-1] = _bucket(groups[-1], num_signals)
            self._signals.flat = self._buckets[-1].flat[-num_signals:] if num_signals else self._signals.flat
        elif num_signals:
            self._buckets.append(self._signals)
        for bucket in self._buckets:
            for parameter in bucket.views:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if not self._active:
                return
            assert isinstance(parameter, nn.Parameter)
            assert parameter.grad is not None
            assert parameter not in bucket.arrived, "one backward a step"
            bucket.views[parameter].copy_(parameter.grad)
            bucket.arrived.add(parameter)
            self._send_full()

        return arrived

    def begin(self, signals: Tensor | None = None) -> None:
        """Start a step; call it before the backward."""
        self._active, self._next = True, 0
        for bucket in self._buckets:
            bucket.arrived.clear()
        if signals is not None:
            self._signals.flat.copy_(signals)

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].full:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        bucket.pending = self._collectives.start_all_reduce(bucket.flat)
        self._next += 1

    def flush(self) -> None:
        """Send the remaining buckets after the backward, with zeros for parameters without a gradient."""
        self._active = False
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            for parameter, view in bucket.views.items():
                if parameter not in bucket.arrived:
                    view.zero_()
            self._send()

    def finish(self) -> Tensor:
        """Wait for all sums, set the gradients, and return the summed signals."""
        for bucket in self._buckets:
            assert bucket.pending is not None, "flush comes first"
            bucket.pending.wait()
            bucket.pending = None
            for parameter, view in bucket.views.items():
                parameter.grad = view
        return self._signals.flat.clone()


def _grouped(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Groups of consecutive parameters of one type and device, of up to `bucket_bytes`."""
    groups: list[list[nn.Parameter]] = []
    free = 0
    for parameter in parameters:
        last = groups[-1][-1] if groups else None
        fits = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not fits or parameter.nbytes > free:
            groups.append([])
            free = bucket_bytes
        groups[-1].append(parameter)
        free -= parameter.nbytes
    return groups


def _bucket(parameters: list[nn.Parameter], more: int = 0) -> _Bucket:
    first = parameters[0]
    size = sum(parameter.numel() for parameter in parameters)
    bucket = _Bucket(torch.zeros(size + more, dtype=first.dtype, device=first.device))
    start = 0
    for parameter in parameters:
        bucket.views[parameter] = bucket.flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return bucket
