"""Cost model of collectives: measured seconds, scaled to other message sizes and numbers of processes.

    links = Links(hardware.collectives)
    links.all_reduce(4e6, 64)          # seconds for a tensor of 4 MB on each of 64 processes

`n` is always the bytes of the tensor that a process passes, its own part included, as `holdall hardware` measures it.
Seconds are a latency and a part that grows with the bytes:

    T(n, W) = latency * rounds(W) / rounds(W0) + above(n) * wire(W) / wire(W0)

W0 is the number of processes that measured. The latency is the intercept of the line through the two smallest
measured sizes. `above` is the rest of the seconds: interpolated log-log between measured sizes, which is exact for
latency + bytes / bandwidth, and extrapolated in proportion outside of them.

| collective | wire(W): bytes sent for each byte | rounds(W), in sequence |
| --- | --- | --- |
| all-reduce | 2 (W - 1) / W, a ring's | 2 (W - 1) over gloo (a ring), 2 log2 W over NCCL (a tree for small messages) |
| all-to-all | (W - 1) / W | W - 1, one message to each other process: an upper bound where they are sent concurrently |
| all-gather | W - 1 | half of an all-reduce's |

Where all-gather was not measured, it is half an all-reduce of W n bytes, whose second half is an all-gather.

Links between all pairs of processes are assumed to be equal to the measured ones: to predict for more machines, measure
between machines, with as many processes as there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from holdall.common.errors import ConfigError
from holdall.planning.machine.hardware import CollectiveRates

Array = npt.NDArray[Any]
Collective = Literal["all_reduce", "all_to_all", "all_gather"]


@dataclass(frozen=True)
class Message:
    """One collective of a step, with its expected bytes."""

    kind: str
    """Name by which `Collectives.count` counts it."""
    collective: Collective
    num_bytes: float
    """Bytes of the largest tensor of any process: all wait for it."""
    sent: float
    """Bytes that a process sends to others, on average."""
    calls: int = 1
    """Calls that share these bytes equally."""


class Links:
    """Seconds of collectives between processes, by the formula above; sizes may be numbers or arrays."""

    def __init__(self, measured: CollectiveRates):
        if measured.world_size < 2 or not measured.all_reduce or not measured.all_to_all:
            raise ConfigError(
                "the rates of collectives need two processes or more, and at least one size of each: measure again "
                "with `torchrun --nproc-per-node 2 -m holdall hardware`"
            )
        self.backend, self.measured_on = measured.backend, measured.world_size
        self._reduce, self._exchange = _Curve(measured.all_reduce), _Curve(measured.all_to_all)
        self._gather = _Curve(measured.all_gather) if measured.all_gather else None

    def all_reduce(self, num_bytes: Any, world_size: int) -> Any:
        """Seconds to sum a tensor of `num_bytes` over all processes."""
        return self._seconds(self._reduce, "all_reduce", num_bytes, world_size)

    def all_to_all(self, num_bytes: Any, world_size: int) -> Any:
        """Seconds to exchange tensors of `num_bytes`, 1/W of which is for each process."""
        return self._seconds(self._exchange, "all_to_all", num_bytes, world_size)

    def all_gather(self, num_bytes: Any, world_size: int) -> Any:
        """Seconds to gather the tensors of all processes, each of `num_bytes`, on every process."""
        if self._gather is None:
            return self.all_reduce(world_size * np.asarray(num_bytes), world_size) / 2
        return self._seconds(self._gather, "all_gather", num_bytes, world_size)

    def seconds(self, message: Message, world_size: int) -> float:
        """Seconds of all calls of a message."""
        one = getattr(self, message.collective)(message.num_bytes / max(1, message.calls), world_size)
        return message.calls * float(one)

    def by_kind(self, messages: Iterable[Message], world_size: int) -> dict[str, float]:
        """Seconds of messages, summed by kind."""
        found: dict[str, float] = {}
        for message in messages:
            found[message.kind] = found.get(message.kind, 0.0) + self.seconds(message, world_size)
        return found

    def _seconds(self, curve: _Curve, collective: Collective, num_bytes: Any, world_size: int) -> Any:
        if world_size == 1:
            return np.zeros_like(np.asarray(num_bytes, dtype=np.float64))
        rounds = self._rounds(collective, world_size) / self._rounds(collective, self.measured_on)
        wire = wire_share(collective, world_size) / wire_share(collective, self.measured_on)
        return curve.latency * rounds + curve.above(num_bytes) * wire

    def _rounds(self, collective: Collective, world_size: int) -> float:
        if collective == "all_to_all":
            return world_size - 1
        rounds = math.log2(world_size) if self.backend == "nccl" else world_size - 1
        return rounds if collective == "all_gather" else 2 * rounds


def wire_share(collective: Collective, world_size: int) -> float:
    """Bytes that a process sends to others for each byte of its tensor."""
    others = world_size - 1
    return {"all_reduce": 2 * others / world_size, "all_to_all": others / world_size, "all_gather": others}[collective]


class _Curve:
    """Measured seconds by size, split into a latency and the rest."""

    def __init__(self, measured: Mapping[str, float]):
        points = sorted((float(size), seconds) for size, seconds in measured.items())
        self.sizes = np.array([size for size, _ in points])
        # A smaller message is never slower: noise only makes a measurement longer.
        seconds = np.minimum.accumulate([seconds for _, seconds in reversed(points)])[::-1]
        self.latency = 0.0
        if len(points) > 1:
            each = (seconds[1] - seconds[0]) / (self.sizes[1] - self.sizes[0])
            self.latency = float(max(0.0, seconds[0] - each * self.sizes[0]))
        self.rest = seconds - self.latency

    def above(self, num_bytes: Any) -> Array:
        """Seconds beyond the latency."""
        sizes, rest = self.sizes, self.rest
        n = np.asarray(num_bytes, dtype=np.float64)
        outside = np.where(n < sizes[0], rest[0] * n / sizes[0], rest[-1] * n / sizes[-1])
        if len(sizes) == 1:
            return outside
        left = np.clip(np.searchsorted(sizes, n, side="right") - 1, 0, len(sizes) - 2)
        n0, n1, r0, r1 = sizes[left], sizes[left + 1], rest[left], rest[left + 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            power = np.log(r1 / r0) / np.log(n1 / n0)
            curved = r0 * (np.maximum(n, n0) / n0) ** power
        straight = r1 * (n - n0) / (n1 - n0)  # from 0 seconds, which has no logarithm
        inside = np.where(r0 > 0, curved, straight)
        return np.where((n < sizes[0]) | (n > sizes[-1]), outside, inside)
