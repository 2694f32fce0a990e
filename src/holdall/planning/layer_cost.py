"""What layers and interactions of any size cost, between and beyond the sizes that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from holdall.planning.machine.hardware import Interaction, Layer, by_size


def layer_seconds(layers: Sequence[Layer], inputs: int, outputs: int, samples: float) -> float:
    """A layer of any size; beyond the measured ones in proportion to its weights."""
    known = {(one.inputs, one.outputs): by_size(one.seconds, samples) for one in layers}
    return _on_grid(known, (inputs, outputs), (1.0, 1.0))


def interaction_seconds(interactions: Sequence[Interaction], vectors: int, dim: int, samples: float) -> float:
    """An interaction of any shape; beyond the measured ones in proportion to its products."""
    known = {(one.vectors, one.dim): by_size(one.seconds, samples) for one in interactions}
    return _on_grid(known, (vectors, dim), (2.0, 1.0))


def _on_grid(known: Mapping[tuple[int, int], float], at: tuple[int, int], growth: tuple[float, float]) -> float:
    """Seconds at a place of a measured grid, interpolated in the logarithms of both sides and of the seconds.

    Beyond the grid they grow with the given power of what is beyond.
    """
    corners: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    beyond = 1.0
    for axis, value in enumerate(at):
        ticks = sorted({place[axis] for place in known})
        inside = min(max(value, ticks[0]), ticks[-1])
        above = next(place for place, tick in enumerate(ticks) if tick >= inside)
        low, high = ticks[max(0, above - 1)], ticks[above]
        part = 1.0 if low == high else math.log(inside / low) / math.log(high / low)
        beyond *= max(1.0, value / ticks[-1]) ** growth[axis]
        corners = [
            ((*corner, tick), weight * share)
            for corner, weight in corners
            for tick, share in ((low, 1 - part), (high, part))
            if share > 0
        ]
    logs = [weight * math.log(max(known[corner], 1e-12)) for corner, weight in corners]  # type: ignore[index]
    return math.exp(sum(logs)) * beyond
