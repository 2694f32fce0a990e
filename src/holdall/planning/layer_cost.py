"""Cost model of layers and interactions: seconds at any size, interpolated from the measured sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from holdall.planning.machine.hardware import Interaction, Layer, seconds_at


def layer_seconds(layers: Sequence[Layer], inputs: int, outputs: int, samples: float) -> float:
    """Seconds of a layer of any size; beyond the measured sizes in proportion to its weights."""
    known = {(one.inputs, one.outputs): seconds_at(one.seconds, samples) for one in layers}
    return _on_grid(known, (inputs, outputs), (1.0, 1.0))


def interaction_seconds(interactions: Sequence[Interaction], vectors: int, dim: int, samples: float) -> float:
    """Seconds of an interaction of any shape; beyond the measured shapes in proportion to its products."""
    known = {(one.vectors, one.dim): seconds_at(one.seconds, samples) for one in interactions}
    return _on_grid(known, (vectors, dim), (2.0, 1.0))


def _on_grid(known: Mapping[tuple[int, int], float], at: tuple[int, int], growth: tuple[float, float]) -> float:
    """Seconds at point `at` of a measured grid: bilinear interpolation of the logarithms.

    Beyond the grid, seconds grow with the power `growth` of each axis.
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
